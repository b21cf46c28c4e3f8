package mirror

import (
	"cmp"
	"slices"

	"github.com/kvscout/kvscout/agent/internal/blockhash"
	"github.com/kvscout/kvscout/protocol/blockkey"
)

const (
	// maxTips bounds the chains that are remembered without a copy, because what
	// is stored next may go on with one.
	maxTips = 1 << 10
	// maxTries bounds the stores that are tried with each algorithm and seed.
	maxTries = 64
)

// seeds that engines have of their own, or are commonly given.
var seeds = []string{blockhash.DefaultSeed, "0", "42"}

// names recomputes the engine's hashes for groups that leave blocks out of
// their events, where no other group announces those. Blocks without copies
// live while they lead to one with a copy, or to a tip.
type names struct {
	on      bool
	digests []blockhash.Digest // by node; zero: not known
	reasons []int32            // by node: children that live, and tips
	tips    []int32            // the last blocks of the newest stores, a ring
	tip     int                // of them, the oldest
	last    named
	unnamed int  // blocks with copies and no content
	passed  bool // stores were passed over because no candidate was verified

	// Kept over a Reset.
	unit       int         // of the hashes in tokens, as learned; 0: not yet
	candidates []candidate // the likeliest first; nil: there is none
	sought     bool        // candidates were looked for
	verified   bool        // the first candidate is what the engine has
	tries      int         // to verify one
}

// named is what was named last: all groups tell the same tokens.
type named struct {
	parent        uint64
	hasParent     bool
	tokens        int
	print         uint64
	adapter, salt string
}

// anew forgets all but what is the engine's own.
func (n *names) anew() names {
	return names{unit: n.unit, candidates: n.candidates, sought: n.sought, verified: n.verified}
}

// relearn takes back what was concluded from a rule that is another now.
func (n *names) relearn(old, now Rule) {
	if old.Unit != now.Unit {
		n.unit = 0
	}
	if old.Algorithm != now.Algorithm || old.Seed != now.Seed || old.Tagged != now.Tagged {
		n.candidates, n.sought, n.verified, n.tries = nil, false, false, 0
	}
}

// grow makes room for nodes.
func (n *names) grow(nodes int) {
	if n.on {
		n.digests = append(n.digests, make([]blockhash.Digest, nodes-len(n.digests))...)
		n.reasons = append(n.reasons, make([]int32, nodes-len(n.reasons))...)
	}
}

// release forgets a node.
func (n *names) release(i int32) {
	if n.on {
		n.digests[i] = blockhash.Digest{}
	}
}

// judgeNames decides whether hashes must be recomputed: where no group announces
// every unit of them.
func (m *Mirror) judgeNames() {
	on := m.blockSize > 0 && len(m.groups) > 0 && !m.alone()
	for _, g := range m.groups {
		on = on && (!g.full() || g.blockSize != m.blockSize)
	}
	if on == m.names.on {
		return
	}
	m.names.on = on
	m.markAll()
	if !on {
		m.names = m.names.anew()
		m.each(func(int32) {})
		return
	}
	m.names.grow(len(m.nodes))
	m.breakCircles()
	for i := int32(1); i < int32(len(m.nodes)); i++ {
		if m.copied(i) {
			m.holdPath(m.nodes[i].parent)
			if !m.nodes[i].has(flagContent) {
				m.names.unnamed++
			}
		}
	}
}

// breakCircles takes the content of a block in each circle of blocks that are
// their own ancestors: none of them has a key, and from here on they would keep
// each other alive.
func (m *Mirror) breakCircles() {
	walk := make([]int32, len(m.nodes)) // by node, the first of the walk that came there
	for first := int32(1); first < int32(len(m.nodes)); first++ {
		at := first
		for at > 0 && walk[at] == 0 && m.nodes[at].has(flagLive) {
			walk[at] = first
			at = m.nodes[at].parent
		}
		if at <= 0 || walk[at] != first || !m.nodes[at].has(flagLive) {
			continue
		}
		n, parent := &m.nodes[at], m.nodes[at].parent
		m.stats.Contradictions++
		m.unclaim(at)
		m.detach(at)
		m.reclassify(at, 0)
		n.flags &^= flagContent | flagRoot | flagWithheld | flagShut
		m.mark(at)
		if parent != at {
			m.exorcise(parent)
		}
	}
}

// alone says that there is one group only, which needs the whole prefix.
func (m *Mirror) alone() bool { return len(m.groups) == 1 && m.groups[0].full() }

// unpin forgets all that only what is stored next could need.
func (m *Mirror) unpin() {
	for _, i := range m.names.tips {
		m.hold(i, -1)
		m.settle(i)
	}
	m.names.tips, m.names.tip, m.names.last = nil, 0, named{}
}

// holdPath counts a child that lives for the first time, where nothing was counted.
func (m *Mirror) holdPath(i int32) {
	for ; i > 0; i = m.nodes[i].parent {
		m.names.reasons[i]++
		if m.names.reasons[i] > 1 || m.copied(i) {
			return
		}
	}
}

// hold changes what keeps a block that has no copies, and those that lead to it.
func (m *Mirror) hold(i, by int32) {
	for i > 0 {
		was := m.alive(i)
		m.names.reasons[i] += by
		if m.alive(i) == was {
			return
		}
		m.mark(i)
		i = m.nodes[i].parent
	}
}

// pin keeps a chain for what may be stored below it, and forgets the oldest.
func (m *Mirror) pin(i int32) {
	if i == 0 {
		return
	}
	m.hold(i, 1)
	n := &m.names
	if len(n.tips) < maxTips && m.used < m.cfg.MaxNodes/2 {
		n.tips = append(n.tips, i)
		return
	}
	if len(n.tips) == 0 {
		m.hold(i, -1)
		m.settle(i)
		return
	}
	n.tip %= len(n.tips)
	oldest := n.tips[n.tip]
	n.tips[n.tip] = i
	n.tip++
	m.hold(oldest, -1)
	m.settle(oldest)
}

// name gives the blocks that a store tells the tokens of their content, whether
// it announces them or not.
func (m *Mirror) name(s *Store) {
	if len(s.Tokens) < m.blockSize || len(s.Tokens)%m.blockSize != 0 {
		return
	}
	now := named{s.Parent, s.HasParent, len(s.Tokens), blockkey.Local(s.Tokens, nil), s.Adapter, s.Salt}
	if now == m.names.last {
		return
	}
	dense := s.BlockSize == m.blockSize && len(s.Tokens) == len(s.Hashes)*s.BlockSize && (s.Refs == nil || len(s.Refs) == len(s.Hashes))
	m.names.last = now
	if !s.Withhold && (s.Refs == nil || dense) {
		m.pin(m.recompute(s))
	}
	if dense && len(s.Hashes) > 0 && !m.known(s.Hashes[0]) {
		m.pin(m.chain(s, func(k int) (uint64, blockhash.Digest, bool) { return s.Hashes[k], blockhash.Digest{}, true }))
	}
}

// known says whether the content of a hash is.
func (m *Mirror) known(hash uint64) bool {
	i := m.find(hash)
	return i != 0 && m.nodes[i].has(flagContent)
}

// recompute names blocks by the hashes that the engine must have for them. It
// returns the last one, 0 if that cannot be done.
func (m *Mirror) recompute(s *Store) int32 {
	if s.Adapter != "" && s.Root == "" && m.cfg.Rule.Tagged {
		return 0 // where it was loaded from is part of the hash
	}
	digest := blockhash.Digest{} // that of a root
	if s.HasParent {
		i := m.find(s.Parent)
		if i == 0 || m.names.digests[i] == digest {
			return 0
		}
		digest = m.names.digests[i]
	}
	if !m.computable(s, digest) {
		return 0
	}
	h := m.names.candidates[0]
	if !s.HasParent {
		digest = h.Root()
	}
	return m.chain(s, func(k int) (uint64, blockhash.Digest, bool) {
		next, ok := h.Next(&digest, s.Tokens[k*m.blockSize:(k+1)*m.blockSize], extrasOf(s, k))
		digest = next
		return h.Short(&next), next, ok
	})
}

func extrasOf(s *Store, k int) *blockhash.Extras {
	x := &blockhash.Extras{Adapter: s.Adapter, Root: s.Root}
	if k == 0 && !s.HasParent {
		x.Salt = s.Salt
	}
	if s.Refs != nil {
		for _, ref := range s.Refs[k] {
			x.Items = append(x.Items, blockhash.Item{ID: ref.ID, Offset: ref.Offset})
		}
	}
	return x
}

// chain describes the units of a store one below the other, by the hashes that
// hash gives them. It returns the last one, 0 at the bound.
func (m *Mirror) chain(s *Store, hash func(k int) (uint64, blockhash.Digest, bool)) int32 {
	adapter, known := m.adapter(s.Adapter)
	withhold := s.Withhold || !known
	at, link, flags := int32(0), s.Parent, flagContent
	if s.HasParent {
		if at = m.lookup(s.Parent); at == 0 {
			m.drop(len(s.Tokens) / m.blockSize)
			return 0
		}
	} else {
		link = uint64(blockkey.Scope{Model: m.cfg.Model, Adapter: s.Adapter, Salt: s.Salt, BlockSize: m.blockSize}.Root())
		flags |= flagRoot
	}
	above := at
	for k := range len(s.Tokens) / m.blockSize {
		short, digest, ok := hash(k)
		if !ok {
			break
		}
		var refs []blockkey.Ref
		if s.Refs != nil {
			refs = s.Refs[k]
		}
		if m.leadsTo(short, at) {
			m.stats.Contradictions++ // it would keep itself alive
			break
		}
		i := m.lookup(short)
		if i == 0 {
			m.drop(len(s.Tokens)/m.blockSize - k)
			break
		}
		block := node{parentHash: link, local: blockkey.Local(s.Tokens[k*m.blockSize:(k+1)*m.blockSize], refs), adapter: adapter, flags: flags}
		m.describe(i, at, &block, withhold)
		if flags&flagRoot != 0 && s.HidesExtras && digest == (blockhash.Digest{}) {
			m.checkRoot(i)
		}
		if digest != (blockhash.Digest{}) {
			m.names.digests[i] = digest
		}
		at, link, flags = i, short, flagContent
	}
	if at == above && above > 0 {
		m.exorcise(above)
		return 0
	}
	return at
}

// leadsTo says whether the block of a hash is one of those that lead to another,
// or is that.
func (m *Mirror) leadsTo(hash uint64, at int32) bool {
	i := m.find(hash)
	if i == 0 || i != at && m.nodes[i].child == 0 || m.nodes[i].has(flagContent) && i != at {
		return false
	}
	for steps := 0; at > 0 && at != i; steps++ {
		if steps > m.used {
			return true // a circle, of times when hashes were not recomputed
		}
		at = m.nodes[at].parent
	}
	return at == i
}

// computable says whether the engine's hashes can be computed. The first store whose
// announced hashes an algorithm and seed explain shows that, and by which.
func (m *Mirror) computable(s *Store, parent blockhash.Digest) bool {
	n := &m.names
	if n.verified {
		return true
	}
	if !n.sought {
		n.sought = true
		n.candidates = candidates(m.cfg.Rule)
	}
	if len(n.candidates) == 0 {
		return false
	}
	if n.tries++; n.tries > maxTries {
		n.candidates = nil
		return false
	}
	found := -1
	if len(s.Hashes) > 0 && s.Adapter == "" && s.Salt == "" && s.Refs == nil {
		found = slices.IndexFunc(n.candidates, func(c candidate) bool { return m.explains(c.Hasher, s, parent) })
	}
	if found < 0 {
		n.passed = true
		return false
	}
	n.candidates, n.verified = n.candidates[found:found+1], true
	if n.passed {
		m.outgrow("the engine's hashes can be recomputed from here on")
	}
	return true
}

// explains says whether a hasher gives a store all hashes that were announced.
func (m *Mirror) explains(h *blockhash.Hasher, s *Store, digest blockhash.Digest) bool {
	if !s.HasParent {
		digest = h.Root()
	}
	left := s.Hashes
	for k := 0; len(left) > 0 && (k+1)*m.blockSize <= len(s.Tokens); k++ {
		next, ok := h.Next(&digest, s.Tokens[k*m.blockSize:(k+1)*m.blockSize], &blockhash.Extras{})
		if !ok {
			return false
		}
		if digest = next; h.Short(&next) == left[0] {
			left = left[1:]
		}
	}
	return len(left) == 0
}

// candidate is what an engine may compute its hashes with.
type candidate struct {
	algorithm, seed string
	*blockhash.Hasher
}

func candidates(r Rule) []candidate {
	var all []candidate
	tried := seeds
	if r.Seed != "" {
		tried = append([]string{r.Seed}, seeds...)
	}
	for _, seed := range tried {
		for _, algorithm := range blockhash.Algorithms {
			if cmp.Or(r.Algorithm, algorithm) != algorithm {
				continue
			}
			if h, err := blockhash.New(algorithm, seed, r.Tagged); err == nil {
				all = append(all, candidate{algorithm, seed, h})
			}
		}
	}
	return all
}

// Hashing is how the engine makes its hashes, once its events have proved it and
// while they are recomputed.
func (m *Mirror) Hashing() (algorithm, seed string, proved bool) {
	if !m.names.on || !m.names.verified {
		return "", "", false
	}
	c := &m.names.candidates[0]
	return c.algorithm, c.seed, true
}

// unnamed says why blocks are held whose content is not known; empty: none is.
func (m *Mirror) unnamed() string {
	switch {
	case !m.names.on || m.names.unnamed == 0 && m.stats.Waiting == 0:
		return ""
	case !m.names.verified:
		return "the engine leaves blocks out of its events and its hashes cannot be recomputed: -hash-seed must be its PYTHONHASHSEED"
	}
	return "blocks are held whose tokens no event told"
}

// setNamed replaces the copies of a block where blocks without copies have names.
func (m *Mirror) setNamed(g *group, i int32, c copies) {
	was, lived := m.copied(i), m.alive(i)
	g.copies[i] = c
	now := m.copied(i)
	if was != now && !m.nodes[i].has(flagContent) {
		if now {
			m.names.unnamed++
		} else {
			m.names.unnamed--
		}
	}
	switch alive := m.alive(i); {
	case alive && !lived:
		m.hold(m.nodes[i].parent, 1)
	case lived && !alive:
		m.hold(m.nodes[i].parent, -1)
	}
}
