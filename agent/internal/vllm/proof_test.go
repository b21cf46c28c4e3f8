package vllm

import (
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/await"
)

// four is a tail that has applied stored(1) to stored(4), a batch each.
func four(t *testing.T, e *testEngine) (*state, *Tail) {
	t.Helper()
	e.start()
	p, tail := follow(t, e)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	for h := range uint64(4) {
		e.publish(stored(h + 1))
	}
	p.settles(t, Exact, 1, 2, 3, 4)
	return p, tail
}

// TestExactOnlyWhenCaughtUp is a connection that comes back while the engine
// has dropped blocks, and replays that lose what tells it.
func TestExactOnlyWhenCaughtUp(t *testing.T) {
	for _, c := range []struct {
		name    string
		swallow func(request, i, n int) bool
		trust   Trust
		held    []uint64
	}{
		{"the end, once", func(request, i, n int) bool { return request == 2 && i > 1 && i < n }, Exact, []uint64{3, 4}},
		{"all but one, always", func(_, i, n int) bool { return i > 1 && i < n }, Exact, []uint64{3, 4}},
		{"all but the first, always", func(_, i, _ int) bool { return i > 0 }, Approximate, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newTestEngine(t, true)
			p, _ := four(t, e)
			p.forbid(1)
			e.mu.Lock()
			e.asked, e.swallow = 2, c.swallow
			e.mu.Unlock()
			e.hide(removed(1))
			e.hide(removed(2))
			e.cut()
			p.settles(t, c.trust, c.held...)
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.lies > 0 {
				t.Errorf("exact %d times with a block that the engine had dropped", p.lies)
			}
		})
	}
}

// TestLostLastBatchIsFound is a batch that got lost, with none behind it that
// would show the gap.
func TestLostLastBatchIsFound(t *testing.T) {
	e := newTestEngine(t, true)
	p, tail := four(t, e)
	before := tail.Stats().Replayed // the four, if the first replay began after them
	e.hide(removed(1))
	p.settles(t, Exact, 2, 3, 4)
	if st := tail.Stats(); st.Replayed != before+1 || p.count() != 0 {
		t.Errorf("stats %+v, incarnations %q", st, p.ended())
	}
}

// TestReplayOfAnotherLifeIsRefused is an engine that restarted unseen and has
// passed the old sequence when the gap shows.
func TestReplayOfAnotherIncarnationIsRefused(t *testing.T) {
	e := newTestEngine(t, true)
	p, _ := four(t, e)
	e.rewind()
	for h := range uint64(6) {
		e.hide(stored(h + 101))
	}
	e.publish(stored(107))
	p.settles(t, Exact, 101, 102, 103, 104, 105, 106, 107)
	if p.count() == 0 {
		t.Error("the new incarnation was not noticed")
	}
}

// TestSilentEngineIsSuspected is a network that stands still without breaking.
func TestSilentEngineIsSuspected(t *testing.T) {
	e := newTestEngine(t, true)
	e.answers = true
	p, tail := four(t, e)
	silence := func(mute bool) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.mute = mute
	}
	silence(true)
	began := time.Now()
	await.True(t, "suspicion", func() bool { return p.worth() == Syncing })
	t.Log("suspected after", time.Since(began))
	silence(false)
	e.publish(stored(5)) // a sign of life
	p.settles(t, Exact, 1, 2, 3, 4, 5)
	if n := tail.Stats().Connections; n != 1 || p.count() != 0 {
		t.Errorf("%d connections, incarnations %q", n, p.ended())
	}
}

// TestAnsweringEngineIsNotSuspected is an engine that has nothing to say.
func TestAnsweringEngineIsNotSuspected(t *testing.T) {
	e := newTestEngine(t, true)
	e.answers = true
	p, tail := four(t, e)
	asked := tail.Stats().Replays
	time.Sleep(pingAfter + silentFor + 5*pollEvery) // the time is what is tested
	if p.suspected() {
		t.Error("silence was taken for absence")
	}
	if n := tail.Stats().Replays - asked; n > 1 {
		t.Errorf("asked %d times whether it has nothing to say", n)
	}
}
