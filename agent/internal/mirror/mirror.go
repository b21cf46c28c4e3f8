// Package mirror keeps the blocks that one engine rank holds at this moment, as
// its KV events tell it, and says which of them a request could use.
//
// A block counts on a lane only while every block before it does: engines stop
// at the first miss. Whatever the events leave open is answered with "absent":
// a block wrongly believed absent costs a cache miss, one wrongly believed held
// misleads every decision about this member. The rules that follow from it:
//
//   - Every physical copy in GPU memory is announced and removed on its own, so
//     copies are counted per KV-cache group. Host and disk hold a block at most
//     once, there the last word counts.
//   - A root store whose blocks are present already is either a further copy or
//     the report of a hit (kv_cache_report_mode=full), which has no copy behind
//     it. It is a copy where no hit could have ended at its last block, or
//     where it leaves out blocks. Otherwise its copies are counted apart and
//     credited only when a later store below them verifies that the block is
//     still there.
//   - Blocks are credited when every group that needs the whole prefix holds
//     them, and there must be one. What the other groups need is said apart: of
//     each credited block, whether the engine would accept a hit that ends there.
//     Kinds of groups that cannot be followed end all credit.
//   - A block beyond the GPU prefix counts on a lower lane only by a copy of its
//     own on that lane: engines load a prefix, they do not hop between tiers.
//   - Tokens come from GPU stores only. Offloading events tell no salt and no
//     multimodal item, so their blocks are joined by engine hash.
//   - Groups that leave blocks out of their events don't say which. Where a group
//     announces every unit of the engine's hashes, equal hashes say it. Where none
//     does, the hashes of all units are recomputed from the tokens; a recomputed
//     hash names its content whether or not the engine has it. The GPU lane then
//     holds every block that leads to one with a copy, or to where a prompt that is
//     being computed goes on.
//   - One hash with two contents, or one content with two hashes, means that the
//     events don't tell all: all of them are withheld until they are gone.
//
// Changes collect in the mirror; Drain tells the difference to what it told
// before. A mirror belongs to one goroutine.
package mirror

import (
	"cmp"
	"slices"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Tier is where a copy of a block lies.
type Tier uint8

const (
	GPU Tier = iota
	Host
	Disk // local to the pod; shared and remote storage has no tier
)

// Lane is a nested, prefix-closed union of tiers.
type Lane uint8

const (
	LaneGPU  Lane = iota // GPU memory
	LaneHost             // GPU or host memory
	LaneDisk             // GPU or host memory or local disk

	Lanes = 3

	// Ends is no lane of its own: those blocks on the GPU lane at which the
	// engine would accept a hit to end. It is not prefix-closed, and there is
	// nothing on it unless Mirror.HasEnds.
	Ends Lane = Lanes
)

// GroupKind is the attention of a KV-cache group.
type GroupKind uint8

const (
	Unspecified GroupKind = iota // the event doesn't say
	Full                         // every block before a token is needed for it
	Sliding                      // the blocks of a window before it are
	State                        // the state that the last block ends with is
	Chunked                      // the blocks of its chunk are
	Other                        // anything else
)

// Drop says which groups of an engine with speculative decoding drop the last
// block of a hit, so that the draft model can compute it.
type Drop uint8

const (
	DropNone      Drop = iota
	DropAttention      // all attention groups
	DropLast           // the last attention group, and those like it
)

// Rule is what no event says about the hits of an engine.
type Rule struct {
	// Chunk of chunked-local attention, in tokens. 0: not known; such groups
	// are followed as if they needed the whole prefix, which promises less.
	Chunk int
	Drop  Drop
	// Unit of the engine's hashes in tokens; 0: the largest that divides the block
	// sizes of all groups.
	Unit int
	// Algorithm and Seed of its hashes; empty: those that are common are tried.
	Algorithm, Seed string
	// Groups are the kinds of those whose events name none.
	Groups Groups
	// Several: the engine has more than one group.
	Several bool
	// Tagged: its hashes cover what extra keys are, not only the keys.
	Tagged bool
}

// Groups are kinds by number of the group; what events say counts before them.
type Groups [8]struct {
	Kind   GroupKind // Unspecified: nothing is said
	Window int       // of Sliding, in tokens
}

// Store is one BlockStored event, normalised.
type Store struct {
	Tier   Tier
	Group  int
	Kind   GroupKind
	Window int // of a sliding group, in tokens; 0: not said

	Hashes    []uint64 // consecutive blocks of one chain; groups that don't need the whole prefix leave blocks out
	Parent    uint64   // hash before Hashes[0]
	HasParent bool     // false: Hashes[0] opens a prompt
	Tokens    []uint32 // of all blocks, more than Hashes account for where blocks are left out; empty in placeholders of offloading connectors
	BlockSize int

	Adapter string
	Root    string           // where the adapter was loaded from, which no event tells; empty: not known
	Salt    string           // counts only when HasParent is false
	Refs    [][]blockkey.Ref // aligned with Hashes, or nil

	// Withhold: the content cannot be keyed (adapter without a name, prompt
	// embeddings). Such blocks are mirrored and never published.
	Withhold bool
	// HidesExtras: the engine's era sends no extra keys, so a salt or an image
	// would be invisible.
	HidesExtras bool
	// Physical: the engine's era knows no hit reports, so every store is a copy.
	Physical bool
}

// Remove is one BlockRemoved event, normalised.
type Remove struct {
	Tier     Tier
	Group    int
	HasGroup bool // false: the engine's era names no groups
	Hashes   []uint64
}

// Op says that a run of consecutive blocks of one chain became held on a lane,
// or that it is held no longer; on Ends, that a hit may end at each of them. The receiver may keep Before and Keys, and must not change
// them: ops of one run share them.
type Op struct {
	Remove   bool
	Lane     Lane
	Position uint32         // of Keys[0] in its chain
	Before   []blockkey.Key // the blockkey.Lead keys before Keys[0], or all there are
	Keys     []blockkey.Key
}

// Config of a Mirror.
type Config struct {
	Model string // identity of the keys
	// BlockSize in tokens; 0: learned from the events.
	BlockSize int
	// MaxBlocks of the engine's GPU pool; 0: not known.
	MaxBlocks int
	// MaxNodes bounds the memory: blocks over all tiers, with the hashes that
	// are only known as parents. 0: 2,097,152, about 250 MB.
	MaxNodes int
	Rule     Rule
}

const (
	defaultMaxNodes = 1 << 21
	maxGroups       = 32
	maxBlockSize    = 1 << 20
	maxAdapters     = 4096
	maxAdapterName  = 4096
	// maxRootHashes bounds what is remembered of root blocks after their
	// eviction, on engines that hide salts.
	maxRootHashes = 65536
	// maxSuspects bounds blocks that are kept although it is not sure that the
	// engine holds a copy.
	maxSuspects = 1 << 14
	// maxProof is how many blocks upwards one store verifies.
	maxProof = 1 << 14
)

// Mirror of one rank's cache. The zero value is not usable.
type Mirror struct {
	cfg       Config
	blockSize int // 0: not known yet

	nodes    []node                 // nodes[0] is the trunk: parent of all root blocks
	free     int32                  // first free node, linked by next
	used     int                    // nodes in use, without the trunk
	byHash   table                  // by engine hash
	byKey    table                  // by block key, where one node alone claims it
	shared   map[blockkey.Key]int32 // keys that several nodes have claimed, and how many still do
	groups   []*group
	crowded  bool // more groups than maxGroups were named
	silent   bool // a group is there that is not known yet: nothing is held on any lane
	heard    bool // all groups that count are known
	noCredit string
	guess    string // why less than the engine's own number is promised; empty: it is not
	outgrown string // why all that came before must be told again; empty: it need not
	align    uint32 // hits end at multiples of so many blocks
	dropped  uint32 // blocks that a hit leaves out, its last ones
	names    names

	adapters map[string]uint16

	rootHashes map[blockkey.Key]uint64 // first hash of each root block, on engines that hide extras
	saltSeen   bool
	offloads   bool // blocks were announced outside GPU memory

	gpuCopies int    // sure copies in GPU memory over all groups
	suspects  int    // (block, group) pairs with only unverified copies
	proof     uint32 // counts the suspects that came
	lossy     bool   // knowledge was dropped in this incarnation

	call call

	dirty   []int32 // nodes with flagDirty, also freed ones
	changed []int32 // scratch of Drain
	stack   []int32 // scratch of walks
	runs    []run   // scratch of Drain
	visits  []visit // scratch of Drain

	count  [Lanes + 1]int // the last are Ends
	digest [Lanes + 1]uint64
	stats  Stats
}

// call is what the engine's block pool was last asked to store from the root of
// a prompt: one event a group, in rising order, all with the same tokens.
type call struct {
	group  int // of the last event
	tokens int
	print  uint64
	real   bool // its blocks are copies, not the report of a hit
}

// Stats of a mirror. Waiting and Withheld are as of the last Drain.
type Stats struct {
	Nodes      int    // hashes in memory
	GPUCopies  int    // copies in GPU memory over all groups
	Waiting    int    // blocks held whose prefix is not known
	Withheld   int    // blocks held that are not published, with all below them
	Suspect    int    // blocks with unverified copies only
	BlockSize  int    // 0: not known yet
	NoCredit   string // why nothing at all is published; empty: it is
	Guess      string // why depths are a lower bound; empty: they are not
	Groups     int    // KV-cache groups
	Recomputes bool   // hashes, because no group announces every block

	Stored         uint64 // copies announced
	Removed        uint64 // copies removed
	UnknownRemoved uint64 // removals of what is not there
	UnknownStored  uint64 // host and disk copies of unknown blocks, ignored
	Repeated       uint64 // blocks of root stores that were present already
	Refused        uint64 // stores of the wrong size or form
	Dropped        uint64 // blocks not mirrored because the bound was reached
	Contradictions uint64 // hashes with two contents, contents with two hashes
	Unnamed        uint64 // copies whose content cannot be told
}

// New makes an empty mirror.
func New(cfg Config) *Mirror {
	if cfg.MaxNodes <= 0 {
		cfg.MaxNodes = defaultMaxNodes
	}
	m := &Mirror{cfg: cfg}
	m.Reset()
	return m
}

// Reset forgets everything, also what Drain has told: a new incarnation of the engine
// begins. Counters go on.
func (m *Mirror) Reset() {
	stats := m.stats
	stats.Waiting, stats.Withheld = 0, 0
	*m = Mirror{
		cfg:        m.cfg,
		blockSize:  cmp.Or(m.cfg.BlockSize, m.names.unit),
		align:      1,
		names:      m.names.anew(),
		nodes:      make([]node, 1, 256),
		byHash:     newTable(),
		byKey:      newTable(),
		shared:     make(map[blockkey.Key]int32),
		adapters:   map[string]uint16{"": 0},
		rootHashes: make(map[blockkey.Key]uint64),
		stats:      stats,
	}
}

// SetMaxBlocks tells the size of the engine's GPU pool once it is known.
func (m *Mirror) SetMaxBlocks(n int) { m.cfg.MaxBlocks = n }

// SetMaxNodes replaces the bound of the memory. What is beyond it already stays
// until the engine removes it.
func (m *Mirror) SetMaxNodes(n int) { m.cfg.MaxNodes = n }

// SetRule tells how the engine's hits end once that is known.
func (m *Mirror) SetRule(r Rule) {
	if r != m.cfg.Rule {
		m.names.relearn(m.cfg.Rule, r)
		m.cfg.Rule = r
		m.judge()
	}
}

// Outgrown says why everything must be told again from the beginning of the
// engine's life, after a Reset: its blocks were taken for larger ones, or its
// hashes for others, than they are. Empty: it need not.
func (m *Mirror) Outgrown() string { return m.outgrown }

// HidesExtras says that the engine's events name no salts and no items: prompts
// with either have blocks here that nobody finds by their keys.
func (m *Mirror) HidesExtras() bool { return len(m.rootHashes) > 0 }

// Offloads says that the engine keeps blocks outside GPU memory, too.
func (m *Mirror) Offloads() bool { return m.offloads }

// HasEnds says that some group of the engine does not need the whole prefix: a
// hit ends at a block of Ends, and nowhere else.
func (m *Mirror) HasEnds() bool {
	for _, g := range m.groups {
		if g.tail != nil {
			return true
		}
	}
	return false
}

// Dropped is the number of blocks, the last ones, that the engine leaves out
// of a hit: one of the largest block size among the groups that drop one.
func (m *Mirror) Dropped() int { return int(m.dropped) }

// Kinds is the number of kinds of groups: those that differ in attention, in
// window or in block size.
func (m *Mirror) Kinds() int {
	kinds := 0
	for k, g := range m.groups {
		if !slices.ContainsFunc(m.groups[:k], g.like) {
			kinds++
		}
	}
	return kinds
}

// Overflown reports that more copies are believed to be in GPU memory than the
// engine has blocks: the mirror has drifted and must be reset. Where hits end
// inside of blocks, one block is announced several times, as far as it is filled.
func (m *Mirror) Overflown() bool {
	return m.cfg.MaxBlocks > 0 && m.gpuCopies > m.cfg.MaxBlocks && !m.inside()
}

// Count returns the number of blocks held on a lane, or of Ends, as of the last
// Drain.
func (m *Mirror) Count(l Lane) int { return m.count[l] }

// Digest returns the XOR of the digests of the keys held on a lane, as of the
// last Drain.
func (m *Mirror) Digest(l Lane) uint64 { return m.digest[l] }

// Stats returns the counters.
func (m *Mirror) Stats() Stats {
	s := m.stats
	s.Nodes = m.used
	s.GPUCopies = m.gpuCopies
	s.Suspect = m.suspects
	s.BlockSize = m.blockSize
	s.NoCredit = m.noCredit
	s.Guess = cmp.Or(m.guess, m.unnamed())
	s.Recomputes = m.names.on
	s.Groups = len(m.groups)
	return s
}

// Held says whether a block was held on a lane as of the last Drain.
func (m *Mirror) Held(hash uint64, l Lane) bool {
	i := m.find(hash)
	return i != 0 && m.nodes[i].published&(1<<l) != 0
}
