package pick

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// Picks beside heartbeats, events, members that come and go, reports and
// ticks: every answer must hold together, and nothing is left in the end.
func TestPicksBesideEverything(t *testing.T) {
	b := newBed(t)
	for i := range 8 {
		b.join(fmt.Sprintf("m%d", i))
	}
	stop := make(chan struct{})
	var background, picks sync.WaitGroup
	loop := func(do func(i int, now time.Time)) {
		background.Add(1)
		go func() {
			defer background.Done()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
					do(i, t0.Add(time.Duration(i)*time.Millisecond))
				}
			}
		}()
	}
	loop(func(i int, now time.Time) {
		if m := b.fleet.View().Named(fmt.Sprintf("m%d", i%7)); m != nil {
			b.load(m.ID, i%5, i%3, now)
			b.hold(m.ID, index.LaneGPU, prompt(uint32(i%10), 320, 1600), 100)
		}
	})
	loop(func(i int, now time.Time) { // one member comes and goes
		if m := b.fleet.View().Named("m7"); m != nil {
			b.index.Forget(index.Member(m.ID))
			b.fleet.Leave(m.ID)
		} else {
			b.join("m7")
		}
		b.Tick(now)
		b.fleet.Sweep(t0)
	})
	for g := range 3 {
		picks.Add(1)
		go func() {
			defer picks.Done()
			for i := range 1000 {
				now := t0.Add(time.Duration(i) * time.Millisecond)
				r := Request{
					Model: "model", Session: fmt.Sprint(i % 20), Reserve: i%4 > 0,
					Prompt: tokens(prompt(uint32(i%20), 320, 1600+i%3)),
				}
				d, err := b.Pick(&r, now)
				if err != nil {
					t.Errorf("pick: %v", err)
					return
				}
				for _, c := range d.Candidates {
					sum := c.Cached.Known() + c.Cached.Predicted + c.Uncached
					if sum != d.PromptTokens || !(c.Cost.Total >= 0) || c.Member.Info.BlockSize != 16 {
						t.Errorf("candidate %+v of %d tokens", c, d.PromptTokens)
						return
					}
				}
				if r.Reserve && (i+g)%2 == 0 {
					b.Report(Report{Decision: d.ID, Outcome: fleet.Outcome(1 + i%4)}, now)
				}
			}
		}()
	}
	picks.Wait()
	close(stop)
	background.Wait()
	for range 2 {
		b.fleet.Sweep(t0.Add(time.Hour))
	}
	b.Tick(t0.Add(time.Hour))
	if st := b.fleet.Stats(); st.Decisions != 0 {
		t.Errorf("left: %+v", st)
	}
	for _, m := range b.fleet.View().Members {
		if r := m.Reserved(); r.Open != 0 || r.Tokens != 0 {
			t.Errorf("%s: %+v is left", m.Info.Name, r)
		}
	}
	if n := b.predicted.Stats().Marks; n != 0 {
		t.Errorf("%d marks are left", n)
	}
}
