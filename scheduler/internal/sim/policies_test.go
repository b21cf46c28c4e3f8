package sim

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// talks are conversations with a name each, or requests that share nothing.
func talks(seed uint64, rate, more float64, span time.Duration, size int) []arrival.Request {
	r := rand.New(rand.NewPCG(seed, 7))
	var list []arrival.Request
	begin := 0.0
	for chat := 1; ; chat++ {
		begin += r.ExpFloat64() / (rate * (1 - more))
		if begin > span.Seconds() {
			break
		}
		length := size + r.IntN(12_000)
		for at := begin; at < span.Seconds(); at += 5 + 20*r.Float64() {
			q := arrival.Request{At: time.Duration(at * float64(time.Second)), Length: length, Output: 1 + r.IntN(600)}
			q.Session = fmt.Sprint("talk ", chat)
			q.Keys = keys(chat, (q.Length+q.Output)/size)
			list = append(list, q)
			if r.Float64() > more {
				break
			}
			length += q.Output + r.IntN(2000)
		}
	}
	sortByTime(list)
	return list
}

func play(t *testing.T, policy string, list []arrival.Request) Result {
	t.Helper()
	cfg := fleetOf(8, 256, list)
	cfg.Policy = policy
	r, err := Run(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestBelowSaturationFewSessionsAreBroken(t *testing.T) {
	list := talks(1, 6, 0.8, 4*time.Minute, 256)
	for _, policy := range []string{"session", "sticky"} {
		if r := play(t, policy, list); r.StickyBroken > 0.02 {
			t.Errorf("%s: %.3f of the turns went elsewhere", policy, r.StickyBroken)
		}
	}
	if r := play(t, "least-requests", list); r.StickyBroken < 0.5 {
		t.Errorf("least-requests keeps sessions: %.3f", r.StickyBroken)
	}
}

func TestE2IsNoWorseThanLeastRequestsWhenNothingIsShared(t *testing.T) {
	for _, rate := range []float64{4, 10} {
		list := talks(2, rate, 0, 3*time.Minute, 256)
		a, b := play(t, "e2", list), play(t, "least-requests", list)
		if a.TTFTMean > 1.03*b.TTFTMean {
			t.Errorf("%v requests a second: TTFT %.3f s, by least-requests %.3f s", rate, a.TTFTMean, b.TTFTMean)
		}
	}
}
