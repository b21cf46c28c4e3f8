package vllm

import (
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/await"
)

// listening starts a Tail that listens for e, whose replay socket is open.
func listening(t *testing.T, replay bool) (*testEngine, *state, *Tail) {
	t.Helper()
	e := newTestEngine(t, replay)
	e.answers = true
	p := &state{}
	cfg := TailConfig{Endpoint: "tcp://" + e.pubAddr, Bind: true, Topic: "kv", Sink: p, Log: testLog(t)}
	if replay {
		cfg.Replay = "tcp://" + e.repAddr
	}
	tail := runTail(t, cfg)
	e.live()
	return e, p, tail
}

// live begins an incarnation of an engine that dials out.
func (e *testEngine) live() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.incarnation++
	e.next, e.ring = 0, nil
	if e.repAddr != "" {
		e.listen(e.repAddr, "ROUTER", e.router)
	}
}

// strangers shake hands with whoever listens for e, answer PINGs and say
// nothing. One that is hung up on stays away.
func strangers(t *testing.T, e *testEngine, n int) *testEngine {
	t.Helper()
	s := newTestEngine(t, false)
	s.pubAddr, s.answers = e.pubAddr, true
	for range n {
		var c net.Conn
		await.True(t, "a listener", func() (there bool) {
			var err error
			c, err = net.Dial("tcp", s.pubAddr)
			return err == nil
		})
		s.mu.Lock()
		s.conns = append(s.conns, c)
		s.mu.Unlock()
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			defer c.Close()
			if r := s.greet(c, "PUB"); r != nil {
				s.subscriber(c, r)
			}
		}()
	}
	return s
}

// say has every stranger say one message.
func (e *testEngine) say(frames ...[]byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.subs {
		write(c, frames...)
	}
}

// speaks publishes, as a busy engine would, until a batch was heard from it and
// not from its replay.
func (e *testEngine) speaks(t *testing.T, p *state, tail *Tail) (published []uint64) {
	t.Helper()
	live := func() uint64 { st := tail.Stats(); return st.Batches - st.Replayed }
	var last time.Time
	before := live()
	await.True(t, "a batch of the engine", func() bool {
		if len(published) > 0 && live() > before && slices.Contains(p.hashes(), published[len(published)-1]) {
			return true
		}
		if time.Since(last) > 100*time.Millisecond {
			last = time.Now()
			hash := uint64(1000 + len(published))
			published = append(published, hash)
			e.publish(stored(hash))
		}
		return false
	})
	return published
}

// TestTailListens has the engine connect to the agent.
func TestTailListens(t *testing.T) {
	e, p, tail := listening(t, true)
	e.hide(stored(1))
	e.dialOut()
	p.settles(t, Exact, 1)
	e.publish(stored(2))
	p.settles(t, Exact, 1, 2)
	if n := tail.Stats().Connections; n != 1 {
		t.Errorf("%d connections for one engine", n)
	}
}

// TestStrangerInBindModeDoesNotShutOutTheEngine has strangers that shake hands
// and answer PINGs, before and after the engine connects.
func TestStrangerInBindModeDoesNotShutOutTheEngine(t *testing.T) {
	for _, c := range []struct{ before, after int }{{1, 0}, {0, 1}, {64, 0}, {1, 80}, {0, 80}} {
		for _, replay := range []bool{true, false} {
			t.Run(fmt.Sprintf("%d before, %d after, replay %v", c.before, c.after, replay), func(t *testing.T) {
				t.Parallel()
				e, p, tail := listening(t, replay)
				strangers(t, e, c.before)
				e.hide(stored(1))
				e.dialOut()
				strangers(t, e, c.after)
				held := e.speaks(t, p, tail)
				if replay {
					p.settles(t, Exact, append([]uint64{1}, held...)...)
				}
				// It has shown what it is: nobody takes its place by coming.
				connections := tail.Stats().Connections
				s := strangers(t, e, 2)
				await.True(t, "greetings", func() bool { return s.subscribers() == 2 })
				strangers(t, e, 80)
				e.publish(stored(2))
				await.True(t, "the next batch", func() bool { return slices.Contains(p.hashes(), 2) })
				if n := tail.Stats().Connections; n != connections {
					t.Errorf("%d connections, %d before strangers came", n, connections)
				}
			})
		}
	}
}

// TestStrangersCannotTalkTheirWayIn has strangers that say what is no batch.
func TestStrangersCannotTalkTheirWayIn(t *testing.T) {
	for name, message := range map[string][][]byte{
		"no sequence":     {[]byte("kv"), []byte("short"), nil},
		"no batch":        {[]byte("kv"), be(7), []byte("what?")},
		"an end marker":   {[]byte("kv"), be(endMarker), pack(t, list{1.0, list{stored(5)}, 0})},
		"another topic":   {[]byte("other"), be(0), pack(t, list{1.0, list{stored(5)}, 0})},
		"a large message": {[]byte("kv"), be(0), make([]byte, waitingMessage)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, p, tail := listening(t, true)
			e.hide(stored(1))
			e.dialOut()
			p.settles(t, Exact, 1)
			s := strangers(t, e, 3)
			await.True(t, "greetings", func() bool { return s.subscribers() == 3 })
			s.say(message...)
			await.True(t, "hanging up", func() bool { return s.subscribers() == 0 })
			e.publish(stored(2))
			p.settles(t, Exact, 1, 2)
			if n := tail.Stats().Connections; n != 1 || p.count() != 0 {
				t.Errorf("%d connections, incarnations %q", n, p.ended())
			}
		})
	}
}

// TestWaitingPublisherFollowsTheFirst has two engines publish to one agent: the
// second is not heard while the first lives, and is when it has gone.
func TestWaitingPublisherFollowsTheFirst(t *testing.T) {
	e, p, _ := listening(t, false)
	e.dialOut()
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	other := newTestEngine(t, false)
	other.pubAddr, other.answers, other.incarnation = e.pubAddr, true, 7
	other.dialOut()
	other.publish(stored(77))
	e.publish(stored(2))
	p.settles(t, Exact, 1, 2)
	e.kill()
	p.settles(t, Exact, 77)
	if p.count() != 1 {
		t.Errorf("incarnations %q", p.ended())
	}
}

// TestPeersThatWaitAreBounded has the oldest silent ones make room, and neither
// the engine that is followed nor one whose batch waits.
func TestPeersThatWaitAreBounded(t *testing.T) {
	e, p, tail := listening(t, false)
	e.dialOut()
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	other := newTestEngine(t, false)
	other.pubAddr, other.answers = e.pubAddr, true
	other.dialOut()
	other.publish(stored(77))
	await.True(t, "a batch that waits", tail.peers.spoken)
	const more = 20
	old := strangers(t, e, more)
	await.True(t, "strangers", func() bool { return old.subscribers() == more })
	young := strangers(t, e, maxPeers-2)
	await.True(t, "the young in the place of the old", func() bool { return old.subscribers() == 0 && young.subscribers() == maxPeers-2 })
	if st := tail.Stats(); st.HungUp != more || st.Connections != 1 || other.subscribers() != 1 || e.subscribers() != 1 {
		t.Errorf("stats %+v; %d connections of the one that waits, %d of the one that is followed", st, other.subscribers(), e.subscribers())
	}
}

// TestStrangerInThePlaceOfTheEngineIsSuspected has a stranger take the place of
// an engine whose connection has ended, so that all looks well.
func TestStrangerInThePlaceOfTheEngineRaisesSuspicion(t *testing.T) {
	for _, c := range []struct {
		name    string
		between func(*testEngine)
		lives   int
		held    []uint64
	}{
		{"the same incarnation", func(e *testEngine) { e.hide(removed(1)) }, 0, []uint64{2}},
		{"another incarnation", func(e *testEngine) {
			e.rewind()
			for h := range uint64(4) {
				e.hide(stored(h + 101))
			}
		}, 1, []uint64{101, 102, 103, 104}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e, p, tail := listening(t, true)
			e.dialOut()
			e.publish(stored(1), stored(2))
			p.settles(t, Exact, 1, 2)
			s := strangers(t, e, 1)
			await.True(t, "a greeting", func() bool { return s.subscribers() == 1 })
			// What is missed between the two connections no message will tell.
			c.between(e)
			e.cut()
			await.True(t, "a second connection", func() bool { return tail.Stats().Connections > 1 })
			p.settles(t, Exact, c.held...)
			held := append(slices.Clone(c.held), e.speaks(t, p, tail)...)
			p.settles(t, Exact, held...)
			if p.count() != c.lives {
				t.Errorf("incarnations %q", p.ended())
			}
		})
	}
}

// TestEngineThatLeavesAStrangerBehindIsForgotten is an engine that ends while a
// stranger, who answers PINGs, has its place.
func TestEngineThatLeavesAStrangerBehindIsForgotten(t *testing.T) {
	e, p, tail := listening(t, true)
	strangers(t, e, 1)
	await.True(t, "the stranger", func() bool { return tail.Stats().Connections == 1 })
	e.hide(stored(1))
	e.dialOut()
	p.settles(t, Exact, 1)
	e.kill()
	await.True(t, "the end of the incarnation", func() bool { return len(p.hashes()) == 0 })
}

// TestSilentEngineGivesWay is a connection that stands still without breaking,
// and the engine's next one beside it.
func TestSilentEngineGivesWay(t *testing.T) {
	e, p, tail := listening(t, true)
	e.dialOut()
	e.publish(stored(1))
	p.settles(t, Exact, 1)
	e.mu.Lock()
	e.mute = true
	e.mu.Unlock()
	await.True(t, "suspicion", func() bool { return p.worth() == Syncing })
	next := newTestEngine(t, false)
	next.pubAddr, next.answers = e.pubAddr, true
	next.dialOut()
	e.mu.Lock()
	b := e.record([]any{stored(2)})
	e.mu.Unlock()
	next.say([]byte("kv"), be(b.sequence), b.payload)
	p.settles(t, Exact, 1, 2)
	if n := tail.Stats().Connections; n != 2 || p.count() != 0 {
		t.Errorf("%d connections, incarnations %q", n, p.ended())
	}
}
