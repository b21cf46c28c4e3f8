package vllm

import (
	"slices"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/vmihailenco/msgpack/v5"
)

func stored(hashes ...uint64) any {
	l := list{}
	for _, h := range hashes {
		l = append(l, h)
	}
	return list{"BlockStored", l, nil, list{1, 2}, 2, nil, "GPU", nil, nil}
}

func removed(hash uint64) any { return list{"BlockRemoved", list{hash}, "GPU"} }

func TestTailFollowsFromTheFirstBatch(t *testing.T) {
	for _, replay := range []bool{true, false} {
		e := newTestEngine(t, replay)
		p, tail := follow(t, e)
		await.True(t, "state while the engine is away", func() bool { return p.said(Syncing) })
		e.start()
		// It came into being under our eyes: even without replay nothing can be missing.
		p.settles(t, Exact)
		await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
		e.publish(stored(1), stored(2))
		e.publish(removed(1), stored(3))
		p.settles(t, Exact, 2, 3)
		if p.count() != 0 {
			t.Errorf("new incarnations %q", p.ended())
		}
		if st := tail.Stats(); st.Batches != 2 || st.Sequence != 1 || !st.Connected {
			t.Errorf("stats %+v", st)
		}
	}
}

func TestLateTailReplays(t *testing.T) {
	for _, topic := range []bool{true, false} {
		e := newTestEngine(t, true)
		e.repliesWithTopic = topic
		e.start()
		for h := range uint64(50) {
			e.publish(stored(h + 1))
		}
		e.publish(list{"AllBlocksCleared"}, stored(60))
		p, tail := follow(t, e)
		p.settles(t, Exact, 60)
		if st := tail.Stats(); st.Replayed != 51 {
			t.Errorf("replayed %d batches", st.Replayed)
		}
	}
}

func TestLateTailWithAShortRingIsALowerBound(t *testing.T) {
	e := newTestEngine(t, true)
	e.keep = 3
	e.start()
	for h := range uint64(10) {
		e.publish(stored(h + 1))
	}
	p, tail := follow(t, e)
	p.settles(t, Approximate, 8, 9, 10)
	if lost := tail.Stats().LostBatches; lost != 7 {
		t.Errorf("%d batches lost, want 7", lost)
	}
	// What is cleared is known again.
	e.publish(list{"AllBlocksCleared"})
	p.settles(t, Exact)
	e.publish(stored(20))
	p.settles(t, Exact, 20)
}

func TestClearDoesNotMakeOffloadedBlocksKnown(t *testing.T) {
	e := newTestEngine(t, true)
	e.keep = 1
	e.start()
	e.hide(stored(1))
	e.hide(object{"type": "BlockStored", "block_hashes": list{2}, "parent_block_hash": nil, "token_ids": nil, "block_size": 0, "medium": "CPU"})
	p, _ := follow(t, e)
	p.settles(t, Approximate, 2)
	e.publish(list{"AllBlocksCleared"})
	p.settles(t, Approximate)
}

func TestGapIsReplayed(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, tail := follow(t, e)
	p.settles(t, Exact) // the replay at the start is over
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	e.publish(stored(1), stored(2))
	e.hide(removed(1))
	e.hide(stored(3))
	e.publish(stored(4))
	p.settles(t, Exact, 2, 3, 4)
	if st := tail.Stats(); st.Gaps != 1 || st.LostBatches != 0 || p.count() != 0 {
		t.Errorf("stats %+v, incarnations %q", st, p.ended())
	}
	if !p.said(Syncing) {
		t.Error("never said that it was syncing")
	}
}

func TestReplayThatDropsConverges(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	want := []uint64{}
	for h := range uint64(1000) {
		e.hide(stored(h + 1))
		want = append(want, h+1)
	}
	// A full pipe: after some messages nothing more comes, not even the end
	// marker; or a hole in the middle.
	e.swallow = func(request, i, n int) bool {
		if request%2 == 0 {
			return i > 250
		}
		return i > 100 && i < 110
	}
	p, tail := follow(t, e)
	p.settles(t, Exact, want...)
	if st := tail.Stats(); st.Replays < 3 || st.LostBatches != 0 {
		t.Errorf("stats %+v", st)
	}
}

func TestUnfillableGapForgets(t *testing.T) {
	for _, c := range []struct {
		name   string
		replay bool
		gap    func(*testEngine)
	}{
		{"no replay socket", false, func(e *testEngine) { e.hide(removed(1)) }},
		{"number that was never used", true, (*testEngine).skip},
		{"ring moved on", true, func(e *testEngine) { e.keep = 1; e.hide(removed(1)); e.hide(stored(7)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newTestEngine(t, c.replay)
			e.start()
			p, tail := follow(t, e)
			await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
			await.True(t, "beginning", func() bool { return p.worth() != Syncing })
			e.publish(stored(1), stored(2))
			await.True(t, "first batch", func() bool { return len(p.hashes()) == 2 })
			c.gap(e)
			e.publish(stored(3))
			p.settles(t, Approximate, 3)
			if p.count() != 1 || tail.Stats().LostBatches == 0 {
				t.Errorf("incarnations %q, stats %+v", p.incarnations, tail.Stats())
			}
			// Live events flow on, without another look back.
			e.publish(stored(4))
			p.settles(t, Approximate, 3, 4)
			if p.count() != 1 {
				t.Errorf("incarnations %q", p.ended())
			}
		})
	}
}

func TestLiveEventsFlowAfterASilentReplay(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	e.swallow = func(int, int, int) bool { return true }
	p, _ := follow(t, e)
	p.settles(t, Approximate)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	e.hide(stored(2))
	e.publish(stored(3))
	e.publish(stored(4))
	p.settles(t, Approximate, 3, 4)
}

func TestRestartAtTheSameAddress(t *testing.T) {
	for _, c := range []struct {
		name    string
		replay  bool
		batches int // of the new incarnation, before we are back
		keep    int
		trust   Trust
		held    []uint64
	}{
		{"idle", true, 0, 0, Exact, nil},
		{"below the old sequence", true, 2, 0, Exact, []uint64{101, 102}},
		{"beyond the old sequence", true, 6, 0, Exact, []uint64{101, 102, 103, 104, 105, 106}},
		{"far beyond, ring moved on", true, 9, 2, Approximate, []uint64{108, 109}},
		{"idle, no replay", false, 0, 0, Exact, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newTestEngine(t, c.replay)
			e.keep = c.keep
			e.start()
			p, _ := follow(t, e)
			await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
			// A short ring must not move on before the first replay is over.
			await.True(t, "beginning", func() bool { return p.worth() != Syncing })
			for h := range uint64(4) {
				e.publish(stored(h + 1))
			}
			await.True(t, "first incarnation", func() bool { return len(p.hashes()) == 4 })
			e.kill()
			await.True(t, "the end of the first incarnation", func() bool { return p.count() == 1 })
			began := time.Now()
			e.startWith(c.batches)
			p.settles(t, c.trust, c.held...)
			if took := time.Since(began); took > time.Second {
				t.Errorf("right again only after %v", took)
			}
			if p.count() != 1 {
				t.Errorf("incarnations %q", p.ended())
			}
		})
	}
}

// TestRestartBehindTheConnection is a new incarnation that was there before the old
// connection broke, so that no dial is ever refused.
func TestRestartBehindTheConnection(t *testing.T) {
	for _, replay := range []bool{true, false} {
		e := newTestEngine(t, replay)
		e.start()
		p, _ := follow(t, e)
		await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
		for h := range uint64(4) {
			e.publish(stored(h + 1))
		}
		await.True(t, "first incarnation", func() bool { return len(p.hashes()) == 4 })
		e.rewind()
		for h := range uint64(8) {
			e.hide(stored(h + 101))
		}
		e.cut()
		if replay {
			p.settles(t, Exact, 101, 102, 103, 104, 105, 106, 107, 108)
		} else {
			p.settles(t, Approximate)
		}
		if p.count() != 1 {
			t.Errorf("incarnations %q", p.ended())
		}
	}
}

// TestRestartWithoutAReplaySocket is a new incarnation that has none any more: nobody
// will answer there, so the wait for an answer is not worth its while.
func TestRestartWithoutAReplaySocket(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, _ := follow(t, e)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	e.mu.Lock()
	e.sockets[1].Close()
	e.mu.Unlock()
	e.rewind()
	began := time.Now()
	e.cut()
	await.True(t, "the end of the first incarnation", func() bool { return p.count() == 1 })
	if took := time.Since(began); took >= compareWithin {
		t.Errorf("suspected only after %v", took)
	}
}

// TestRestartBehindAnIdleConnection has no batch to tell the two incarnations by: what
// depends on the engine's process must begin anew nevertheless.
func TestRestartBehindAnIdleConnection(t *testing.T) {
	for _, replay := range []bool{true, false} {
		e := newTestEngine(t, replay)
		e.start()
		p, _ := follow(t, e)
		await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
		await.True(t, "beginning", func() bool { return p.worth() != Syncing })
		e.rewind()
		e.hide(stored(101))
		e.cut()
		if replay {
			p.settles(t, Exact, 101)
		} else {
			await.True(t, "the end of the first incarnation", func() bool { return p.count() == 1 })
			p.settles(t, Approximate)
		}
		if p.count() != 1 {
			t.Errorf("incarnations %q", p.ended())
		}
		// It is an incarnation like any other once it has spoken.
		await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
		e.publish(stored(102))
		await.True(t, "batch of the second incarnation", func() bool { return slices.Contains(p.hashes(), 102) })
	}
}

func TestLostConnectionToTheSameEngine(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, _ := follow(t, e)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	e.cut()
	e.hide(stored(2))
	p.settles(t, Exact, 1, 2)
	if p.count() != 0 {
		t.Errorf("incarnations %q", p.ended())
	}
	if !p.suspected() {
		t.Error("a lost connection raised no suspicion")
	}
	// The ring moves on while nobody listens: it cannot be the same for sure.
	e.mu.Lock()
	e.keep = 1
	e.mu.Unlock()
	e.hide(stored(3))
	e.cut()
	e.hide(stored(4))
	p.settles(t, Approximate, 4)
	if p.count() != 1 {
		t.Errorf("incarnations %q", p.ended())
	}
}

func TestFallingSequenceIsANewIncarnation(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, _ := follow(t, e)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	for h := range uint64(4) {
		e.publish(stored(h + 1))
	}
	await.True(t, "first incarnation", func() bool { return len(p.hashes()) == 4 })
	e.rewind()
	e.hide(stored(101))
	e.publish(stored(102))
	p.settles(t, Exact, 101, 102)
	if p.count() != 1 {
		t.Errorf("incarnations %q", p.ended())
	}
}

func TestUnreadableBatchForgets(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, tail := follow(t, e)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	e.publish(msgpack.RawMessage{0xc1}) // is no msgpack
	p.settles(t, Approximate)
	e.publish(stored(2))
	p.settles(t, Approximate, 2)
	if st := tail.Stats(); st.Undecodable != 1 || st.UnknownShapes != 0 || p.count() != 1 {
		t.Errorf("stats %+v, incarnations %q", st, p.ended())
	}
}

// An engine that has sent once what no known release sends is not believed
// before it is another process: what else means something else is not known.
func TestUnknownShapeIsNotBelieved(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, tail := follow(t, e)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	e.publish(list{"BlockRemoved", list{1}, "GPU", 0, "moved"})
	p.settles(t, Unreadable)
	e.publish(stored(2))
	p.settles(t, Unreadable, 2)
	if st := tail.Stats(); st.Undecodable != 1 || st.UnknownShapes != 1 || st.Batches != 2 {
		t.Errorf("stats %+v, incarnations %q", st, p.ended())
	}
	e.kill()
	e.startWith(1)
	p.settles(t, Exact, 101)
}

func TestMalformedMessagesAreCounted(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, tail := follow(t, e)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	e.mu.Lock()
	for _, c := range e.subs {
		write(c, []byte("kv"))
		write(c, []byte("kv"), []byte("short"), nil)
		write(c, []byte("kv"), be(endMarker), nil)
	}
	e.mu.Unlock()
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	if n := tail.Stats().Malformed; n != 3 {
		t.Errorf("%d malformed messages, want 3", n)
	}
}

func TestTailRestartsOnRequest(t *testing.T) {
	e := newTestEngine(t, true)
	e.start()
	p, tail := follow(t, e)
	await.True(t, "subscription", func() bool { return e.subscribers() == 1 })
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	tail.Restart("another model")
	await.True(t, "new incarnation", func() bool { return p.count() == 1 })
	p.settles(t, Exact, 1)
}

func TestNewTailChecksEndpoints(t *testing.T) {
	for _, cfg := range []TailConfig{{Endpoint: "udp://x"}, {Endpoint: "tcp://127.0.0.1:1", Replay: "nonsense"}} {
		if _, err := NewTail(cfg); err == nil {
			t.Errorf("%+v was accepted", cfg)
		}
	}
}

func TestOnlyAnEngineSeenMissingJustNowIsNewborn(t *testing.T) {
	refused := time.Unix(100, 0)
	for after, want := range map[time.Duration]bool{
		0: true, redialEvery: true, redialSlow * 5 / 4: true,
		bornWithin: false, time.Hour: false, // the agent was stopped in between
	} {
		if got := youngAt(refused.Add(after), refused); got != want {
			t.Errorf("%v after a refused connection: %v", after, got)
		}
	}
	if youngAt(refused, time.Time{}) {
		t.Error("newborn without a refused connection")
	}
}
