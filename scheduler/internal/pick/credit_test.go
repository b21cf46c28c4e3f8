package pick

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// state is all that decides what may be said of a member's cache.
type state struct {
	trust      fleet.Trust
	held, sent bool // blocks stand in the index; the prompt was sent there before
	cut        bool // the link is lost
	silent     time.Duration
}

func (s state) String() string {
	return fmt.Sprintf("%v, held %v, sent %v, cut %v, silent for %v", s.trust, s.held, s.sent, s.cut, s.silent)
}

func states(each func(state)) {
	for _, trust := range []fleet.Trust{fleet.Unknown, fleet.Approximate, fleet.Syncing, fleet.Exact} {
		for bits := range 8 {
			for _, silent := range []time.Duration{0, 850 * time.Millisecond, time.Second, 4 * time.Second, 20 * time.Second} {
				each(state{trust, bits&1 != 0, bits&2 != 0, bits&4 != 0, silent})
			}
		}
	}
}

// Whatever the state of a member and of the link: what an answer credits, what
// it calls the cache state and what it says is missing fit together.
func TestTrustCreditAndFallbackAreOne(t *testing.T) {
	le := prompt(1, 0, 800)
	count := 0
	states(func(s state) {
		for _, name := range []string{policy.Default, "random", "session", "prefix-hash", "approx", "e2", "slo"} {
			for _, beside := range []bool{false, true} {
				count++
				b := newBed(t)
				info := fleet.Info{Name: "m", Models: []string{"model"}, BlockSize: 16, Heartbeat: 300 * time.Millisecond}
				id := b.joinAs(info)
				if s.sent {
					b.trust(id, fleet.Unknown) // so that it is noted
					b.pick(Request{Prompt: tokens(le), Reserve: true})
				}
				if s.held {
					b.gpu(id, le, 40)
				}
				b.fleet.SetCacheState(id, fleet.CacheState{Trust: s.trust, Reason: map[bool]string{false: "why"}[s.trust == fleet.Exact], Epoch: 1})
				now := t0.Add(s.silent)
				if beside { // a second member is heard, and known to have nothing
					info.Name = "other"
					other := b.joinAs(info)
					b.load(other, 0, 0, now)
				}
				if s.cut {
					b.fleet.Link(false, now)
				}
				d := b.pickAt(Request{Prompt: tokens(le), Policy: name, Candidates: []Ref{{Member: "m"}, {Member: "other"}}}, now)
				doubted := s.cut || s.silent > 900*time.Millisecond
				for i := range d.Candidates {
					c := &d.Candidates[i]
					known, held := c.Cached.Known(), c.Member.ID == id && s.held
					exact := c.Member.CacheState.Trust == fleet.Exact && !s.cut && (!doubted || c.Member.ID != id)
					switch {
					case known > 0 && c.Trust != fleet.Exact && c.Trust != fleet.Approximate:
						t.Errorf("%v, %s: %s is %v, and %d tokens are cached", s, name, c.Member.Info.Name, c.Trust, known)
					case (c.Trust == fleet.Exact) != exact:
						t.Errorf("%v, %s: %s is called %v", s, name, c.Member.Info.Name, c.Trust)
					case (c.Reason == "") != (c.Trust == fleet.Exact):
						t.Errorf("%v, %s: %s is %v because of %q", s, name, c.Member.Info.Name, c.Trust, c.Reason)
					case c.Member.ID == id && s.trust == fleet.Approximate && !doubted && c.Reason != "why":
						t.Errorf("%v, %s: a lower bound is one because of %q", s, name, c.Reason)
					case held && exact && known != 640:
						t.Errorf("%v, %s: %d tokens of an exact cache state count", s, name, known)
					case held && doubted && (s.trust == fleet.Exact || s.trust == fleet.Approximate) && (known != 0 || c.Cached.Predicted < 640):
						t.Errorf("%v, %s: of the last known cache state %+v counts", s, name, c.Cached)
					case !s.sent && (s.trust == fleet.Syncing || s.trust == fleet.Unknown) && c.Member.ID == id && c.Cached != (Cached{}):
						t.Errorf("%v, %s: of no cache state %+v counts", s, name, c.Cached)
					}
				}
				if best := &d.Candidates[0]; (d.Fallback() == "") != (best.Trust == fleet.Exact) {
					t.Errorf("%v, %s: the first is %v, fallback %q", s, name, best.Trust, d.Fallback())
				}
			}
		}
	})
	t.Logf("%d answers", count)
}

// An engine whose events name no salts and no items may hold such prompts, and
// nobody can know.
func TestWhatEventsHideIsNotCalledExact(t *testing.T) {
	b := newBed(t)
	id := b.joinAs(fleet.Info{Name: "old", Models: []string{"model"}, BlockSize: 16, HidesExtras: true})
	b.joinAs(fleet.Info{Name: "new", Models: []string{"model"}, BlockSize: 16})
	plain := prompt(1, 0, 800)
	b.gpu(id, plain, 40)
	for name, c := range map[string]struct {
		r    Request
		want fleet.Trust
	}{
		"plain":  {Request{Prompt: tokens(plain)}, fleet.Exact},
		"salted": {Request{Prompt: tokens(plain), Salt: "tenant"}, fleet.Approximate},
		"items":  {Request{Prompt: tokens(plain), Items: []blockkey.Item{{ID: "image", Offset: 3, Length: 9}}}, fleet.Approximate},
	} {
		d := b.pick(c.r)
		for i := range d.Candidates {
			got, want := d.Candidates[i].Belief, fleet.Exact
			if d.Candidates[i].Member.ID == id {
				want = c.want
			}
			if got.Trust != want || (got.Reason == "") != (want == fleet.Exact) {
				t.Errorf("%s: %s is %v (%s), want %v", name, d.Candidates[i].Member.Info.Name, got.Trust, got.Reason, want)
			}
		}
	}
}
