package fleet

import "time"

// Trust is how far the member's cache state can be believed.
type Trust uint8

const (
	// Unknown: there is no cache state.
	Unknown Trust = iota
	// Approximate: what is believed held is held to the best of knowledge;
	// blocks may be missing.
	Approximate
	// Syncing: the cache state is being rebuilt.
	Syncing
	// Exact: the cache state equals what the engine announced.
	Exact
)

func (t Trust) String() string {
	switch t {
	case Approximate:
		return "APPROXIMATE"
	case Syncing:
		return "SYNCING"
	case Exact:
		return "EXACT"
	}
	return "UNKNOWN"
}

// Wire is the trust's number on the bus and in the API, which are the same there.
func (t Trust) Wire() int32 { return int32(t) + 1 }

// TrustOf is the trust of a number on the bus; what it does not know is Unknown.
func TrustOf(wire int32) Trust {
	if wire < Unknown.Wire() || wire > Exact.Wire() {
		return Unknown
	}
	return Trust(wire - 1)
}

// Belief is how far a member's cache state can be believed at a moment, in a few
// words why no further, and what the blocks of the cache state count for.
type Belief struct {
	Trust  Trust
	Reason string
	Credit Credit
}

// Credit is what blocks count for.
type Credit uint8

const (
	// Uncredited: for nothing.
	Uncredited Credit = iota
	// Predicted: they are believed to be there, and promised to nobody.
	Predicted
	// Credited: they are held.
	Credited
)

// verifiedFor is how many of a member's heartbeats may be missing while its
// cache state counts. One that is late or lost is no suspicion yet.
const verifiedFor = 3

// Believe is the one rule for what may be said of a member's cache and what it
// is credited. A cache state that is EXACT or APPROXIMATE counts while somebody could
// object. Without the link, or the member's voice, it is the last known one:
// SYNCING, and no more than a prediction. Where requests found less than was
// promised, again and again, it is APPROXIMATE. A cache state that is SYNCING by itself, or
// UNKNOWN, counts for nothing.
func (v *View) Believe(m *Member, now time.Time) Belief {
	p := &m.CacheState
	if p.Trust != Exact && p.Trust != Approximate {
		return Belief{p.Trust, p.Reason, Uncredited}
	}
	switch {
	case v.cut.Load():
		return Belief{Syncing, "the connection to NATS is lost: the last known cache state", Predicted}
	case now.Sub(m.LastHeartbeat) > v.patience(m):
		return Belief{Syncing, "no heartbeat lately: the last known cache state", Predicted}
	}
	if bias := m.Bias(); bias.Tokens > 0 {
		return Belief{Approximate, bias.Reason, Credited}
	}
	return Belief{p.Trust, p.Reason, Credited}
}

// patience is how long a member may be silent while its cache state counts.
func (v *View) patience(m *Member) time.Duration {
	if m.Info.Heartbeat <= 0 {
		return v.cfg.Silence
	}
	return verifiedFor * m.Info.Heartbeat
}

// Link says that the connection through which members are heard is there, or is
// lost. Their silence counts from when it came back.
func (f *Fleet) Link(up bool, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if was := f.cut.Swap(!up); was && up {
		f.resumed, f.newest = now, later(f.newest, now)
		f.stale.Store(true)
	}
}

// Answered says that the connection carried something to us at a time, if not
// from a member: who is silent now is silent himself, even if all of them are.
func (f *Fleet) Answered(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.cut.Load() {
		f.aliveLocked(now)
		f.stale.Store(true)
	}
}
