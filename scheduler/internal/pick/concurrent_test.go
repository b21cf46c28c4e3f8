package pick

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
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
	if n := len(b.forecast.marks); n != 0 {
		t.Errorf("%d marks are left", n)
	}
}

// What engines count becomes the speed that decisions use, and a number that
// another member got does not bring the old one's speed.
func TestTickLearnsFromLoadSamples(t *testing.T) {
	b := newBed(t)
	slow, fast := b.join("slow"), b.join("fast")
	totals := func(id fleet.ID, second int, msPerToken float64) {
		n := float64(second) * 3
		at := t0.Add(time.Duration(second) * time.Second)
		tt := fleet.NoTotals()
		tokens := n*1000 + float64(second*second%50)*200
		tt.PrefillRequests, tt.PrefillComputedTokens, tt.PrefillSeconds = n, tokens, tokens*msPerToken/1000
		b.fleet.Heard(id, *b.fleet.View().Member(id).Info, &fleet.Load{At: at, Running: 0, Waiting: 0, KVUsage: math.NaN(), Totals: tt}, at)
	}
	var now time.Time
	for s := range 100 {
		totals(slow, s, 0.3)
		totals(fast, s, 0.1)
		now = t0.Add(time.Duration(s) * time.Second)
		b.Tick(now)
	}
	d := b.pickAt(Request{Prompt: tokens(prompt(1, 0, 4000))}, now)
	byName := make(map[string]float64)
	for _, c := range d.Candidates {
		byName[c.Member.Info.Name] = c.Cost.Prefill
	}
	if first(d) != "fast" || math.Abs(byName["slow"]-1200) > 120 || math.Abs(byName["fast"]-400) > 40 {
		t.Errorf("first %s, prefill %v; want 1,200 and 400 ms", first(d), byName)
	}
	b.fleet.Leave(slow)
	b.Tick(now)
	if got := b.speeds.of(&fleet.Member{ID: slow, Info: &fleet.Info{Name: "another"}}); got.B != learn.Prior().B {
		t.Errorf("a new member has the speed of the one before: %+v", got)
	}
}

func TestUnknownPolicyOfThePickerIsAnError(t *testing.T) {
	if _, err := New(Config{Policy: "what"}); !errors.Is(err, ErrPolicy) {
		t.Errorf("%v", err)
	}
}

// BenchmarkPick: 8,192 token ids, 64 members, half of the prompt held by each
// of the first eight. "hash" is the hashing alone.
func BenchmarkPick(b *testing.B) {
	bed := newBed(b)
	le := prompt(1, 0, 8192)
	for i := range 64 {
		id := bed.join(fmt.Sprintf("m%02d", i))
		if i < 8 {
			bed.gpu(id, le, 32*(i+1))
		}
		bed.load(id, i%5, 0, t0)
	}
	run := func(name string, r Request) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				d := bed.pick(r)
				if r.Reserve {
					bed.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, t0)
				}
			}
		})
	}
	run("score", Request{Prompt: tokens(le)})
	run("score/top1", Request{Prompt: tokens(le), Top: 1})
	run("pick", Request{Prompt: tokens(le), Reserve: true})
	run("pick/top1", Request{Prompt: tokens(le), Reserve: true, Top: 1})
	run("pick/cold/top1", Request{Prompt: tokens(prompt(2, 0, 8192)), Reserve: true, Top: 1})
	keys, _ := blockkey.AppendBytes(nil, blockkey.Scope{Model: "model", BlockSize: 16}.Root(), le, 16, nil)
	run("pick/keys/top1", Request{Prompt: Prompt{Keys: keys, BlockSize: 16, Length: 8192}, Reserve: true, Top: 1})
	run("pick/none/top1", Request{Reserve: true, Top: 1})
	b.Run("hash", func(b *testing.B) {
		root := blockkey.Scope{Model: "model", BlockSize: 16}.Root()
		for b.Loop() {
			keys, _ = blockkey.AppendBytes(keys[:0], root, le, 16, nil)
		}
	})
}
