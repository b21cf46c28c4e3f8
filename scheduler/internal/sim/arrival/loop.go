package arrival

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// loops is closed-loop traffic: so many sessions at a time, each asking its
// next turn a pause after the last answer was complete. A turn's prompt is all
// that was said before it and a new input; what was generated is part of it.
type loops struct {
	sessions, concurrency int
	ramp                  time.Duration // over which the first sessions begin
	apps                  int           // a session belongs to one; it decides the shared head
	shared, head          draw          // tokens that an app's sessions share; that the session has alone
	turns, input, output  draw
	pause                 draw // seconds
}

func (l loops) check() error {
	switch {
	case l.sessions < 1 || l.concurrency < 1 || l.apps < 1 || l.sessions > maxRequests || l.apps > maxRequests:
		return fmt.Errorf("%d sessions of %d apps, %d at a time: want at least 1 and at most %d", l.sessions, l.apps, l.concurrency, maxRequests)
	case float64(l.sessions)*l.turns.max > maxRequests:
		return fmt.Errorf("%d sessions of up to %.0f turns: want at most %d requests", l.sessions, l.turns.max, maxRequests)
	case l.shared.min+l.head.min+l.input.min < 1:
		return fmt.Errorf("prompts may be empty: shared, head and input are 0")
	}
	return nil
}

func (l loops) workload(name string, size int) Workload {
	return Workload{Name: name, play: func(seed uint64) Source { return l.source(size, seed) }}
}

// session is a script that a seed wrote: policies change when its turns are
// asked, never what they are.
type session struct {
	n     int
	turns []turn // that were not asked
	spans []span // said so far
}

type turn struct {
	input, output int
	pause         time.Duration // before it
}

// looping is a source of sessions. It is deterministic: same seed and same
// times of completion, same requests.
type looping struct {
	size    int
	total   int
	issued  int
	ready   readyTurns
	waiting []*session       // not begun, in order
	open    map[int]*session // by the id of the request that is under way
}

func (l loops) source(size int, seed uint64) *looping {
	rng := rand.New(rand.NewPCG(seed, 0x6c6f6f70))
	shared := make([]span, l.apps)
	for a := range shared {
		shared[a] = span{id: uint64(a), tokens: l.shared.tokens(rng)}
	}
	s := &looping{size: size, open: make(map[int]*session)}
	for n := range l.sessions {
		one := &session{n: n, spans: []span{shared[rng.IntN(l.apps)], {id: content(n, 0), tokens: l.head.tokens(rng)}}}
		for range max(1, l.turns.tokens(rng)) {
			one.turns = append(one.turns, turn{input: l.input.tokens(rng), output: max(1, l.output.tokens(rng)),
				pause: time.Duration(l.pause.value(rng) * float64(time.Second))})
		}
		one.turns[0].pause = 0
		s.total += len(one.turns)
		if n < l.concurrency {
			s.ready.push(time.Duration(float64(l.ramp)*rng.Float64()), one)
		} else {
			s.waiting = append(s.waiting, one)
		}
	}
	return s
}

// content numbers what is said in sessions: piece 0 is a session's head.
func content(session, piece int) uint64 { return private(session<<32 | piece) }

func (s *looping) BlockSize() int { return s.size }
func (s *looping) Len() int       { return s.total }

func (s *looping) Peek() (time.Duration, bool) {
	if len(s.ready) == 0 {
		return 0, false
	}
	return s.ready[0].at, true
}

func (s *looping) Next() (Request, bool) {
	if len(s.ready) == 0 {
		return Request{}, false
	}
	r := heap.Pop(&s.ready).(readyTurn)
	one := r.session
	t := one.turns[0]
	one.turns = one.turns[1:]
	one.spans = append(one.spans, span{id: content(one.n, len(one.spans)), tokens: t.input})
	length := 0
	for _, p := range one.spans {
		length += p.tokens
	}
	one.spans = append(one.spans, span{id: content(one.n, len(one.spans)), tokens: t.output})
	q := Request{ID: s.issued, At: r.at, Length: length, Output: t.output, Session: "s" + strconv.Itoa(one.n),
		Keys: appendKeys(make([]blockkey.Key, 0, (length+t.output)/s.size), one.spans, s.size)}
	s.open[q.ID] = one
	s.issued++
	return q, true
}

// Done asks the session's next turn after its pause, or lets the next session
// begin in its place.
func (s *looping) Done(id int, at time.Duration) {
	one, ok := s.open[id]
	if !ok {
		panic(fmt.Sprintf("request %d is done that is not under way", id))
	}
	delete(s.open, id)
	if len(one.turns) > 0 {
		s.ready.push(at+one.turns[0].pause, one)
	} else if len(s.waiting) > 0 {
		s.ready.push(at, s.waiting[0])
		s.waiting = s.waiting[1:]
	}
}

// readyTurns is a heap by time, then by session.
type readyTurns []readyTurn

type readyTurn struct {
	at      time.Duration
	session *session
}

func (h readyTurns) Len() int { return len(h) }
func (h readyTurns) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].session.n < h[j].session.n
}
func (h readyTurns) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push is heap.Interface's.
func (h *readyTurns) Push(x any) { *h = append(*h, x.(readyTurn)) }

// Pop is heap.Interface's.
func (h *readyTurns) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

func (h *readyTurns) push(at time.Duration, one *session) { heap.Push(h, readyTurn{at, one}) }
