package fleet

import "time"

// Trust is how far the picture of a member's cache can be believed.
type Trust uint8

const (
	// Unknown: there is no picture.
	Unknown Trust = iota
	// Approximate: what is believed held is held to the best of knowledge;
	// blocks may be missing.
	Approximate
	// Syncing: the picture is being rebuilt.
	Syncing
	// Exact: the picture equals what the engine announced.
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

// Belief is how far a member's picture can be believed at a moment, in a few
// words why no further, and what the blocks of the picture count for.
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

// provenFor is how many of a member's heartbeats may be missing while its
// picture counts. One that is late or lost is no doubt yet.
const provenFor = 3

// Believe is the one rule for what may be said of a member's cache and what it
// is credited. A picture that is EXACT or APPROXIMATE counts while somebody could
// object. Without the link, or the member's voice, it is the last known one:
// SYNCING, and no more than a prediction. A picture that is SYNCING by itself, or
// UNKNOWN, counts for nothing.
func (v *View) Believe(m *Member, now time.Time) Belief {
	p := &m.Picture
	if p.Trust != Exact && p.Trust != Approximate {
		return Belief{p.Trust, p.Reason, Uncredited}
	}
	switch {
	case v.cut.Load():
		return Belief{Syncing, "the connection to NATS is lost: the last known picture", Predicted}
	case now.Sub(m.Heard) > v.patience(m):
		return Belief{Syncing, "not heard lately: the last known picture", Predicted}
	}
	return Belief{p.Trust, p.Reason, Credited}
}

// patience is how long a member may be silent while its picture counts.
func (v *View) patience(m *Member) time.Duration {
	if m.Info.Heartbeat <= 0 {
		return v.cfg.Silence
	}
	return provenFor * m.Info.Heartbeat
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
		f.heardLocked(now)
		f.stale.Store(true)
	}
}
