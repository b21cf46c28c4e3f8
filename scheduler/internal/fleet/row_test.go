package fleet

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whatever happens to the fleet, rows say of every member what it says itself,
// and what a decision is told to be reserved is what readers see.
func TestRowsSayWhatMembersSay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f, now := New(Config{MaxMembers: 6}), t0
		member := func() *Member {
			v := f.View()
			if len(v.Members) == 0 {
				return nil
			}
			return rapid.SampledFrom(v.Members).Draw(t, "member")
		}
		some := func(do func(m *Member)) func(*rapid.T) {
			return func(*rapid.T) {
				if m := member(); m != nil {
					do(m)
				}
			}
		}
		var last Decision
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				f.Join(fmt.Sprint("m", rapid.IntRange(0, 9).Draw(t, "name")), now) // beyond the bound: refused
			},
			"hear": some(func(m *Member) {
				now = now.Add(time.Millisecond)
				n := rapid.IntRange(-1, 9).Draw(t, "running")
				l := load(now, n, n)
				l.Sleeping, l.Unreachable = n == 3, n == 4
				f.Receive(m.ID, Info{Models: []string{fmt.Sprint("model", n)}, BlockSize: 16, Blocks: uint64(n + 1)}, l, now)
			}),
			"leave":  some(func(m *Member) { f.Leave(m.ID) }),
			"epoch":  some(func(m *Member) { f.SetCacheState(m.ID, CacheState{Epoch: m.CacheState.Epoch + 1}) }),
			"decide": some(func(m *Member) { last = reserve(f, m, now) }),
			"fail": some(func(m *Member) {
				for range failLimit {
					f.Report(Report{Decision: reserve(f, m, now), Outcome: Failed}, now)
				}
			}),
			"finish": func(*rapid.T) { f.Report(Report{Decision: last, Outcome: Finished}, now) },
			"": func(t *rapid.T) {
				v := f.View()
				failing := false
				f.Decide("", now, func(_ ID, _ bool, reserved []Reserved) (Choice, bool) {
					for _, m := range v.Members {
						if reserved[m.ID] != *m.Reserved() {
							t.Fatalf("%s: a decision is told %+v, readers %+v", m.Info.Name, reserved[m.ID], *m.Reserved())
						}
					}
					return Choice{}, false
				})
				for i, m := range v.Members {
					failing = failing || m.Failing() != Failing{}
					s := &v.Rows[i]
					if s.Member != m || s.ID != m.ID || int(m.ID) >= v.IDs() || s.Hash != m.Hash || s.Model != m.Info.Model() ||
						s.BlockSize != m.Info.BlockSize || s.Blocks != int(m.Info.Blocks) ||
						int(s.Running) != m.Load.Running || int(s.Waiting) != m.Load.Waiting ||
						s.Sleeping != m.Load.Sleeping || s.Unreachable != m.Load.Unreachable ||
						s.LastHeartbeat != v.Since(m.LastHeartbeat) || s.Sampled != v.Since(m.Load.At) {
						t.Fatalf("row %+v of member %+v", s, m)
					}
				}
				if len(v.Rows) != len(v.Members) || v.Failing() != failing {
					t.Fatalf("%d rows for %d members; some fail: %v, want %v", len(v.Rows), len(v.Members), v.Failing(), failing)
				}
			},
		})
	})
}

func reserve(f *Fleet, m *Member, now time.Time) Decision {
	d, _ := f.Decide("", now, func(ID, bool, []Reserved) (Choice, bool) {
		return Choice{Member: m, Uncached: 10, PrefillMS: 5, Anyway: true}, true
	})
	return d
}
