package sim

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// faster is an engine whose steps take so many times less.
func (p Profile) faster(times float64) Profile {
	for _, ms := range []*float64{&p.StepMS, &p.TokenMS, &p.PairMS, &p.SequenceMS, &p.ContextMS} {
		*ms /= times
	}
	return p
}

// unshared are requests that have no prefix in common, so many a second.
func unshared(t *testing.T, spec string, seed uint64, faster float64) []arrival.Request {
	t.Helper()
	w, err := arrival.Generate("unshared:"+spec, arrival.Options{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	var list []arrival.Request
	for s := w.Play(seed); ; {
		q, ok := s.Next()
		if !ok {
			return list
		}
		q.At = time.Duration(float64(q.At) / faster)
		list = append(list, q)
	}
}

// begun is a run that can be looked into while it is played.
func begun(t *testing.T, c Config) *run {
	t.Helper()
	r := &run{cfg: c.withDefaults()}
	if err := r.start(); err != nil {
		t.Fatal(err)
	}
	return r
}

// believed is what the scheduler thinks the pods take for a prompt, in ms.
func (r *run) believed(t *testing.T, tokens int) []float64 {
	t.Helper()
	s := r.placer.(*scout)
	d, err := s.picker.Pick(&pick.Request{Model: Model, Top: -1, Prompt: pick.Prompt{BlockSize: r.cfg.blockSize, Length: tokens}}, s.clock())
	if err != nil {
		t.Fatal(err)
	}
	ms := make([]float64, len(r.pods))
	for _, one := range d.Candidates {
		ms[slices.IndexFunc(r.pods, func(p *pod) bool { return p.name == one.Member.Info.Name })] = one.Cost.Prefill
	}
	return ms
}

// uneven is how far the one that is furthest from the mean is from it.
func uneven(v []float64) float64 {
	mean := 0.0
	for _, x := range v {
		mean += x / float64(len(v))
	}
	return max(slices.Max(v)/mean-1, 1-slices.Min(v)/mean)
}

// At three quarters of what eight engines can take, with nothing known of them
// and nothing in their caches, each computes as much as the others from the
// first minute of their time on, whether anybody reports, however fast they are,
// so that dozens of requests begin and end between two samples, and however late
// everything is on a busy machine.
func TestEqualEnginesComputeAlikeFromTheFirstMinute(t *testing.T) {
	for _, faster := range []float64{1, 4, 10} {
		list := unshared(t, "input=2000~500:500-4000,output=200~80:20-400,qps=57,seconds=121", uint64(faster), faster)
		for _, silent := range []bool{false, true} {
			for _, late := range []bool{false, true} {
				t.Run(fmt.Sprintf("faster=%v/silent=%v/late=%v", faster, silent, late), func(t *testing.T) {
					t.Parallel()
					c := fleetOf(8, 16, nil)
					c.Arrivals = func(uint64) arrival.Source { return scripted(16, list...) }
					c.NoReports, c.Engines[0] = silent, c.Engines[0].faster(faster)
					if late {
						c.EventLag, c.SampleAge, c.DecisionLag = 200*time.Millisecond, 300*time.Millisecond, 10*time.Millisecond
					}
					const most, apart = 0.05, 1.1
					r := begun(t, c)
					for minute := 1.0; minute <= 2; minute += 0.5 {
						r.calendar.at(time.Duration(minute/faster*float64(time.Minute)), func() {
							computed := make([]float64, len(r.pods))
							for i, p := range r.pods {
								computed[i] = float64(p.counts.computed)
							}
							if u := uneven(computed); u > most {
								t.Errorf("after %v minutes engines differ by %.3f: %.0f tokens computed", minute, u, computed)
							}
							if ms := r.believed(t, 2000); slices.Max(ms) > apart*slices.Min(ms) {
								t.Errorf("after %v minutes equal engines are believed to take %.1f ms", minute, ms)
							}
						})
					}
					if err := r.play(); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	}
}

// Where nobody reports, equal engines that have nothing cached are served about
// as well as in turn, which for equal requests is as good as it gets.
func TestSilentCallersWaitAsInTurn(t *testing.T) {
	for _, faster := range []float64{1, 4, 10} {
		list := unshared(t, "input=2000~500:500-4000,output=200~80:20-400,qps=57,seconds=61", uint64(faster), faster)
		mean := func(policy string) float64 {
			c := fleetOf(8, 16, nil)
			c.Policy, c.NoReports, c.Engines[0] = policy, true, c.Engines[0].faster(faster)
			c.Arrivals = func(uint64) arrival.Source { return scripted(16, list...) }
			r, err := Run(c)
			if err != nil {
				t.Fatal(err)
			}
			return r.TTFTMean
		}
		t.Run(fmt.Sprintf("faster=%v", faster), func(t *testing.T) {
			t.Parallel()
			if turn, own := mean("round-robin"), mean(""); own > 1.25*turn {
				t.Errorf("mean time to first token %.3f s, in turn %.3f s", own, turn)
			}
		})
	}
}

// Engines that differ by three are told apart within 200 requests, whether anybody
// reports or not: one of two, a single one among many, or half of them.
func TestSlowEnginesAreToldApartWithin200Requests(t *testing.T) {
	for _, q := range []struct {
		pods, slow, within int
		rate               float64
	}{{2, 1, 200, 2}, {8, 1, 200, 8}, {8, 4, 200, 8}} {
		for _, silent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d of %d/silent=%v", q.slow, q.pods, silent), func(t *testing.T) {
				t.Parallel()
				list := unshared(t, fmt.Sprintf("qps=%v,seconds=200", q.rate), 1, 1)
				list = list[:min(2*q.within, len(list))] // they meet others all the while
				c := fleetOf(q.pods, 16, nil)
				c.Arrivals = func(uint64) arrival.Source { return scripted(16, list...) }
				c.NoReports, c.Capacity = silent, 4
				quick := c.Engines[0]
				c.Engines = slices.Repeat([]Profile{quick.faster(1.0 / 3)}, q.slow)
				c.Engines = append(c.Engines, slices.Repeat([]Profile{quick}, q.pods-q.slow)...)
				var r *run
				ended := 0
				c.Each = func(Served) {
					if ended++; ended != q.within {
						return
					}
					ms := r.believed(t, 6000)
					for _, slow := range ms[:q.slow] {
						for _, fast := range ms[q.slow:] {
							if math.Abs(math.Log(slow/fast/3)) > math.Log(1.6) {
								t.Fatalf("after %d requests the first %d, three times slower, are believed to take %.0f ms", ended, q.slow, ms)
							}
						}
					}
				}
				r = begun(t, c)
				if err := r.play(); err != nil {
					t.Fatal(err)
				}
				if ended < q.within {
					t.Fatalf("only %d requests ended", ended)
				}
			})
		}
	}
}
