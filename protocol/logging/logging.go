// Package logging keeps a log short enough to be read while things go wrong.
// Whoever logs says each change of state once and need not think of how often
// states change; here is the bound. What is left out is counted, and the last
// line about a thing is never lost: it comes later, with the count.
package logging

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// Of one message about one thing burst lines are written as they come, then
	// one every pause; of one message about all things together stormBurst, then
	// one every stormPause.
	burst      = 4
	pause      = 2 * time.Minute
	stormBurst = 20
	stormPause = 3 * time.Second
	// maxThings bounds what is remembered.
	maxThings = 8192
	// flushEvery is how often it is looked whether a line that was held back is due.
	flushEvery = time.Second
)

// names are the attributes that say what a line is about, occasions those that
// say when it was met. The values of others differ between lines about the same
// thing, too: of text the digits, numbers altogether.
var (
	names     = []string{"adapter", "address", "endpoint", "file", "member", "method", "model", "peer", "pod"}
	occasions = []string{"decision", "request", "session", "tenant"}
)

// Limiter is a slog.Handler in front of another one. Debug lines it passes on:
// who asks for them wants them all.
type Limiter struct {
	next   slog.Handler
	thing  string // what the attributes of With say
	shared *shared
}

type shared struct {
	mu     sync.Mutex // guards what follows
	things buckets
	storms buckets // by message
}

// buckets by what they are for.
type buckets struct {
	of     map[string]*bucket
	pruned time.Time // when those that are full were last taken out
}

// bucket lets lines through as long as it has tokens, which come back with time.
type bucket struct {
	tokens   int
	full     int
	every    time.Duration
	filledAt time.Time
	left     int // lines left out since the last that was written
	held     slog.Record
	by       slog.Handler // of held
}

// Limit returns a Limiter in front of next.
func Limit(next slog.Handler) *Limiter {
	return &Limiter{next: next, shared: &shared{
		things: buckets{of: make(map[string]*bucket)}, storms: buckets{of: make(map[string]*bucket)},
	}}
}

// Enabled implements slog.Handler.
func (l *Limiter) Enabled(ctx context.Context, level slog.Level) bool {
	return l.next.Enabled(ctx, level)
}

// WithAttrs implements slog.Handler.
func (l *Limiter) WithAttrs(attrs []slog.Attr) slog.Handler {
	var thing strings.Builder
	thing.WriteString(l.thing)
	for _, a := range attrs {
		describe(&thing, a)
	}
	return &Limiter{next: l.next.WithAttrs(attrs), thing: thing.String(), shared: l.shared}
}

// WithGroup implements slog.Handler.
func (l *Limiter) WithGroup(name string) slog.Handler {
	return &Limiter{next: l.next.WithGroup(name), thing: l.thing, shared: l.shared}
}

// Handle implements slog.Handler.
func (l *Limiter) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelInfo {
		return l.next.Handle(ctx, r)
	}
	var thing strings.Builder
	thing.WriteString(r.Message)
	thing.WriteString(l.thing)
	r.Attrs(func(a slog.Attr) bool { describe(&thing, a); return true })
	s, now := l.shared, time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.write(ctx, thing.String(), r, l.next, now)
}

// write passes a line on, or holds it back. The lock is held so that lines come
// out in their order.
func (s *shared) write(ctx context.Context, thing string, r slog.Record, next slog.Handler, now time.Time) error {
	about := s.things.at(thing, burst, pause, now)
	if about != nil && !about.take(now) {
		about.hold(r, next)
		return nil
	}
	if about != nil && about.left > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("left_out", about.left))
		about.clear()
	}
	storm := s.storms.at(r.Message, stormBurst, stormPause, now)
	if storm != nil && !storm.take(now) {
		storm.hold(r, next)
		return nil
	}
	if storm != nil && storm.left > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("others_left_out", storm.left))
		storm.clear()
	}
	return next.Handle(ctx, r)
}

// Start writes lines that were held back when they are due, until stop is called,
// which writes all that are left.
func (l *Limiter) Start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); l.run(ctx) }()
	return func() { cancel(); <-done }
}

func (l *Limiter) run(ctx context.Context) {
	tick := time.NewTicker(flushEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			l.flush(time.Now(), true)
			return
		case now := <-tick.C:
			l.flush(now, false)
		}
	}
}

func (l *Limiter) flush(now time.Time, all bool) {
	s := l.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.things.of {
		if b.left > 0 && (b.take(now) || all) {
			r, by := b.release("left_out", now)
			storm := s.storms.at(r.Message, stormBurst, stormPause, now)
			if storm != nil && !storm.take(now) && !all {
				storm.hold(r, by)
				continue
			}
			_ = by.Handle(context.Background(), r)
		}
	}
	for _, b := range s.storms.of {
		if b.left > 0 && (b.take(now) || all) {
			r, by := b.release("others_left_out", now)
			_ = by.Handle(context.Background(), r)
		}
	}
}

// at finds or makes the bucket of a key; nil: there are too many.
func (s *buckets) at(key string, full int, every time.Duration, now time.Time) *bucket {
	if b := s.of[key]; b != nil {
		return b
	}
	if len(s.of) >= maxThings && now.Sub(s.pruned) >= flushEvery {
		s.pruned = now
		for k, b := range s.of {
			if b.fill(now); b.left == 0 && b.tokens == b.full {
				delete(s.of, k)
			}
		}
	}
	if len(s.of) >= maxThings {
		return nil
	}
	b := &bucket{tokens: full, full: full, every: every, filledAt: now}
	s.of[key] = b
	return b
}

func (b *bucket) fill(now time.Time) {
	n := int(now.Sub(b.filledAt) / b.every)
	if b.tokens += n; b.tokens >= b.full {
		b.tokens, b.filledAt = b.full, now
		return
	}
	b.filledAt = b.filledAt.Add(time.Duration(n) * b.every)
}

func (b *bucket) take(now time.Time) bool {
	if b.fill(now); b.tokens == 0 {
		return false
	}
	b.tokens--
	return true
}

func (b *bucket) hold(r slog.Record, by slog.Handler) {
	b.left++
	b.held, b.by = r.Clone(), by
}

// release gives the line that was held, which is one of those left out.
func (b *bucket) release(count string, now time.Time) (slog.Record, slog.Handler) {
	r, by := b.held, b.by
	r.Time = now
	if b.left > 1 {
		r.AddAttrs(slog.Int(count, b.left-1))
	}
	b.clear()
	return r, by
}

func (b *bucket) clear() { b.left, b.held, b.by = 0, slog.Record{}, nil }

// describe adds what an attribute says of the thing that a line is about.
func describe(to *strings.Builder, a slog.Attr) {
	if slices.Contains(occasions, a.Key) {
		return
	}
	v := a.Value.Resolve()
	var text string
	switch v.Kind() {
	case slog.KindString:
		text = v.String()
	case slog.KindAny:
		err, ok := v.Any().(error)
		if !ok {
			return
		}
		text = err.Error()
	default:
		return
	}
	to.WriteByte(0)
	to.WriteString(a.Key)
	to.WriteByte('=')
	if slices.Contains(names, a.Key) {
		to.WriteString(text)
		return
	}
	for i := range len(text) {
		if text[i] < '0' || text[i] > '9' {
			to.WriteByte(text[i])
		}
	}
}
