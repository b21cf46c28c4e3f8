package fleet

import (
	"maps"
	"math"
	"slices"
	"time"
)

// HitRule is what an engine makes of the blocks that it holds.
type HitRule struct {
	// Ends: a hit ends only where the index has an end. Otherwise anywhere.
	Ends bool
	// Dropped is the number of blocks, the last ones, that are left out of a hit.
	// An end of the index is then the block that is dropped.
	Dropped int
	// DroppedToTheEnd: the dropped block may be the prompt's last one.
	DroppedToTheEnd bool
}

// Limit is how many leading blocks of a prompt a hit can stand on.
func (r *HitRule) Limit(tokens, size int) int {
	if r.Dropped > 0 && r.DroppedToTheEnd {
		return tokens / size
	}
	return (tokens - 1) / size // the last token is always computed
}

// Info is who a member is and what it serves.
type Info struct {
	// Name is <namespace>_<pod uid>_<rank>.
	Name                   string
	Namespace, Pod, PodUID string
	Rank                   int
	Address                string
	TLS                    bool // the engine at Address speaks it
	Engine, EngineVersion  string
	Models                 []string // served names; keys are rooted in the first
	Root                   string
	Adapters               []Adapter
	BlockSize              int // 0: not known
	Blocks                 uint64
	MaxModelLen            int
	// HidesExtras: blocks of prompts with a cache salt or multimodal items are not
	// known by their keys.
	HidesExtras bool
	// Offloads: the engine keeps blocks outside GPU memory, too.
	Offloads bool
	// Heartbeat is the time between two signs of life; 0: not known.
	Heartbeat time.Duration
	// AgentRelease is the agent's own version, as it says.
	AgentRelease string
	// Labels as given to the agent; not to be changed.
	Labels map[string]string
}

// Labels with a meaning.
const (
	// RoleLabel: prefill, decode or both.
	RoleLabel = "kvscout.role"
	// WorkloadLabel: kind/name of what the pod belongs to, like Deployment/llama.
	WorkloadLabel = "kvscout.workload"
	// GPULabel: the kind of accelerator.
	GPULabel = "kvscout.gpu"
)

// Role says for which part of a request a member is there.
type Role uint8

const (
	// Both, also where no role is said.
	Both Role = iota
	// Prefill: computes prompts for members that decode.
	Prefill
	// Decode: decodes, and computes what it must itself.
	Decode
)

// Role of the member.
func (i *Info) Role() Role {
	if i.Labels == nil {
		return Both
	}
	switch i.Labels[RoleLabel] {
	case "prefill":
		return Prefill
	case "decode":
		return Decode
	}
	return Both
}

// Adapter is a LoRA adapter that a member serves.
type Adapter struct{ Name, Root string }

// Model is the identity that the member's keys are rooted in.
func (i *Info) Model() string {
	if len(i.Models) == 0 {
		return ""
	}
	return i.Models[0]
}

// URL of the engine's HTTP server.
func (i *Info) URL() string {
	if i.TLS {
		return "https://" + i.Address
	}
	return "http://" + i.Address
}

func (i *Info) equal(o *Info) bool {
	return i.Name == o.Name && i.Namespace == o.Namespace && i.Pod == o.Pod && i.PodUID == o.PodUID &&
		i.Rank == o.Rank && i.Address == o.Address && i.TLS == o.TLS && i.Engine == o.Engine && i.EngineVersion == o.EngineVersion &&
		i.Root == o.Root && i.BlockSize == o.BlockSize && i.Blocks == o.Blocks && i.MaxModelLen == o.MaxModelLen && i.HidesExtras == o.HidesExtras && i.Offloads == o.Offloads && i.Heartbeat == o.Heartbeat &&
		slices.Equal(i.Models, o.Models) && slices.Equal(i.Adapters, o.Adapters) &&
		maps.Equal(i.Labels, o.Labels)
}

// Load is one sample of an engine's state.
type Load struct {
	At               time.Time // zero: there was none
	Running, Waiting int       // -1: not known
	KVUsage          float64   // share of blocks in use by requests; NaN: not known
	Totals           Totals
	RunningAdapters  []string
	Sleeping         bool
	Unreachable      bool // the engine does not answer its agent
	// ProcessStart names the engine's process, by about when it began in Unix
	// milliseconds; 0: not known.
	ProcessStart uint64
}

// Totals since the engine started; NaN: not known. The engine counts each group
// at a moment of its own.
type Totals struct {
	// As a request begins.
	PromptTokens, CachedTokens float64
	// With every token.
	GenerationTokens                   float64
	InterTokenSeconds, InterTokenCount float64
	// As a request ends.
	PrefillSeconds, PrefillComputedTokens, PrefillRequests float64
	QueueSeconds, QueueRequests                            float64
	RequestPromptTokens, RequestGenerationTokens           float64
}

// NoTotals knows nothing.
func NoTotals() Totals {
	n := math.NaN()
	return Totals{n, n, n, n, n, n, n, n, n, n, n, n}
}

func noLoad() Load {
	return Load{Running: -1, Waiting: -1, KVUsage: math.NaN(), Totals: NoTotals()}
}

// clean makes what cannot be true unknown, and lets no sample come from the
// future.
func (l *Load) clean(now time.Time) Load {
	c := *l
	if c.At.After(now) {
		c.At = now
	}
	c.Running = max(c.Running, -1)
	c.Waiting = max(c.Waiting, -1)
	if !(c.KVUsage >= 0 && c.KVUsage <= 1) {
		c.KVUsage = math.NaN()
	}
	t := &c.Totals
	for _, v := range []*float64{
		&t.PromptTokens, &t.CachedTokens, &t.GenerationTokens,
		&t.PrefillSeconds, &t.PrefillComputedTokens, &t.PrefillRequests,
		&t.InterTokenSeconds, &t.InterTokenCount, &t.QueueSeconds, &t.QueueRequests,
		&t.RequestPromptTokens, &t.RequestGenerationTokens,
	} {
		if !(*v >= 0 && *v <= math.MaxFloat64) {
			*v = math.NaN()
		}
	}
	return c
}

// CacheState is the state of a member's cache that the index has.
type CacheState struct {
	Trust           Trust
	Reason          string // in a few words when Trust is not Exact
	Epoch, Sequence uint64
	EngineBatches   uint64    // event batches that the cache state stands on
	Held            [3]uint64 // blocks by lane
	Rule            HitRule
	Trace           string // context of the span that the last change was sent in; may be empty
}

// Member is what was known of a member when its View was made. All but
// Reserved, Reported, Failing and Bias stays as it is.
type Member struct {
	ID            ID
	Hash          uint64 // of the name, the same at every scheduler
	Info          *Info  // not to be changed
	Load          Load
	CacheState    CacheState
	LastHeartbeat time.Time
	Withdrawn     Withdrawal
	account       *account
}

// Reserved is what decisions have reserved on the member up to this moment.
// It is not to be changed.
func (m *Member) Reserved() *Reserved { return m.account.reserved.Load() }

// Reported is what callers have reported of the member up to this moment.
func (m *Member) Reported() Reported { return *m.account.reported.Load() }

// Failing says whether callers reported failures of the member lately.
func (m *Member) Failing() Failing { return *m.account.failing.Load() }

// Bias is what reports have shown of the member's promises up to this moment. It
// is not to be changed, and is nothing once the engine is another incarnation.
func (m *Member) Bias() *Bias {
	if b := m.account.bias.Load(); b.epoch == m.CacheState.Epoch {
		return b
	}
	return &unseen
}

// HasAdapter tells whether the member serves the adapter.
func (m *Member) HasAdapter(name string) bool {
	for i := range m.Info.Adapters {
		if m.Info.Adapters[i].Name == name {
			return true
		}
	}
	return false
}
