package vllm

import (
	"maps"
	"testing"

	"github.com/kvscout/kvscout/e2e/await"
)

// TestTailGoesOnInTheKnownLife is an agent that restarts beside an engine which
// runs, or does not run, on.
func TestTailGoesOnInTheKnownIncarnation(t *testing.T) {
	for _, c := range []struct {
		name     string
		noReplay bool
		between  func(*testEngine)
		resumed  bool
		trust    Trust
		held     []uint64
	}{
		{"nothing happened", false, func(*testEngine) {}, true, Exact, []uint64{1, 2, 3}},
		{"some batches more", false, func(e *testEngine) { e.hide(stored(4)); e.hide(removed(1)) }, true, Exact, []uint64{2, 3, 4}},
		{"ring moved on", false, func(e *testEngine) { e.keep = 2; e.hide(stored(4)); e.hide(stored(5)) }, false, Approximate, []uint64{4, 5}},
		{"ring begins with the last known batch", false, func(e *testEngine) { e.keep = 2; e.hide(stored(4)) }, true, Exact, []uint64{1, 2, 3, 4}},
		{"restart, idle since", false, func(e *testEngine) { e.rewind() }, false, Exact, nil},
		{"restart, behind", false, func(e *testEngine) { e.rewind(); e.hide(stored(9)) }, false, Exact, []uint64{9}},
		{"restart, the same hashes and further", false, func(e *testEngine) {
			e.rewind()
			for h := range uint64(6) {
				e.hide(stored(h + 1))
			}
		}, false, Exact, []uint64{1, 2, 3, 4, 5, 6}},
		{"no replay socket", true, func(e *testEngine) { e.hide(stored(4)) }, false, Approximate, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newTestEngine(t, !c.noReplay)
			e.start()
			first, _ := follow(t, e)
			await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
			for h := range uint64(3) {
				e.publish(stored(h + 1))
			}
			await.True(t, "first incarnation", func() bool { return len(first.hashes()) == 3 })
			first.mu.Lock()
			mark, saved := first.mark, maps.Clone(first.held)
			first.mu.Unlock()
			if mark.Sequence != 2 || mark.Digest == 0 || !mark.Whole || mark.Offloads {
				t.Errorf("mark %+v", mark)
			}
			c.between(e)

			p := &state{saved: saved}
			cfg := TailConfig{Endpoint: "tcp://" + e.pubAddr, Sink: p, Log: testLog(t), Known: &mark}
			if !c.noReplay {
				cfg.Replay = "tcp://" + e.repAddr
			}
			runTail(t, cfg)
			p.settles(t, c.trust, c.held...)
			p.mu.Lock()
			defer p.mu.Unlock()
			if (p.resumed == 1) != c.resumed || (len(p.incarnations) == 0) != c.resumed {
				t.Errorf("resumed %d times, incarnations %q", p.resumed, p.incarnations)
			}
		})
	}
}

func TestKnownIncarnationEndsWhereNobodyListens(t *testing.T) {
	e := newTestEngine(t, true)
	p := &state{saved: map[uint64]int{1: 1}}
	runTail(t, TailConfig{
		Endpoint: "tcp://" + e.pubAddr, Replay: "tcp://" + e.repAddr, Sink: p, Log: testLog(t),
		Known: &Mark{Sequence: 7, Digest: 7, Whole: true},
	})
	await.True(t, "end of the known incarnation", func() bool { return p.count() == 1 })
	e.start()
	p.settles(t, Exact)
}

func TestSuspicionOutlivesTheProcess(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	e.keep = 2
	for h := range uint64(4) {
		e.hide(stored(h + 1))
	}
	first, _ := follow(t, e)
	first.settles(t, Approximate, 3, 4)
	first.mu.Lock()
	mark, saved := first.mark, maps.Clone(first.held)
	first.mu.Unlock()
	if mark.Whole {
		t.Error("the mark hides that batches were lost")
	}
	p := &state{saved: saved}
	runTail(t, TailConfig{Endpoint: "tcp://" + e.pubAddr, Replay: "tcp://" + e.repAddr, Sink: p, Log: testLog(t), Known: &mark})
	p.settles(t, Approximate, 3, 4)
	e.publish(list{"AllBlocksCleared"})
	p.settles(t, Exact)
}
