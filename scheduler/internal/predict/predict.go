// Package predict knows predicted blocks: those of prompts that were just sent
// to a member and that no event has confirmed yet, so that siblings of a prompt
// stay together until the events arrive. They are kept out of the index: what
// the index says is fact, and a prediction is renewed by each sibling and runs
// out by itself. How long it is believed follows from how long events take.
//
// The package has no clock. A time that is passed in may carry a monotonic
// reading; only differences to other such times count.
package predict

import (
	"slices"
	"sync"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const (
	// Stride: the first of so many blocks of a prompt is marked; a mark knows the
	// blocks that follow up to the next one.
	Stride = 8
	// maxMarks of one prompt, maxAll of all.
	maxMarks, maxAll = 1024, 1 << 16
	// MaxBlocks of a prompt are looked at when it is sent.
	MaxBlocks = maxMarks * Stride
	// holders remembered for one mark, one member more than once where its
	// prompts part behind the mark; the one that runs out first goes.
	holders = 4
	// maxWithdrawn decisions are remembered; the one that was longest ago goes.
	maxWithdrawn = 1 << 14
	// longest that a mark may live.
	longest = 30 * time.Second
)

// Blocks are the predicted blocks of all members. It is safe for concurrent
// use.
type Blocks struct {
	index *index.Index
	delay delay

	mu     sync.Mutex             // guards what follows
	origin time.Time              // of until; the first time that was passed in
	at     map[blockkey.Key]int32 // place in marks
	marks  []mark
	free   []int32   // places in marks, which are zero
	queue  []dueMark // each mark once, from head on: in order of insertion, or of the last look at it
	head   int
	// withdrawn decisions, and in their order in a ring that turn writes.
	withdrawn map[uint64]struct{}
	order     []uint64
	turn      int
}

type mark [holders]sent

// sent says that a member got a prompt with this prefix. The zero value is
// over.
type sent struct {
	until    time.Duration
	epoch    uint64
	decision uint64
	member   index.Member
	follow   uint8 // so many blocks follow the marked one
	rest     [Stride - 1]blockkey.Key
}

// continues tells whether s is for the same member and says all that o does.
func (s *sent) continues(o *sent) bool {
	return s.member == o.member && s.epoch == o.epoch && s.common(o.rest[:o.follow]) == int(o.follow)
}

// common is how many blocks behind the mark are the same. Equal keys mean equal
// ones before them, so the last is looked at first.
func (s *sent) common(keys []blockkey.Key) int {
	n := min(int(s.follow), len(keys))
	for n > 0 && s.rest[n-1] != keys[n-1] {
		n--
	}
	return n
}

// dueMark is a mark and until when it was believed when it was put there.
type dueMark struct {
	key   blockkey.Key
	until time.Duration
}

// New returns no predictions yet; events are looked for in x.
func New(x *index.Index) *Blocks {
	return &Blocks{index: x, at: make(map[blockkey.Key]int32), withdrawn: make(map[uint64]struct{})}
}

// Search is one search among the predicted blocks, with keys that grow.
type Search struct {
	// Found members, each with the deepest prefix that was sent there.
	Found []Found
	next  int // position of the next key to look up
	ended bool
}

// Found is a member, in one epoch of its engine, and leading blocks that were
// sent there.
type Found struct {
	Member index.Member
	Epoch  uint64
	Depth  int
}

// Reset begins another search.
func (s *Search) Reset() { *s = Search{Found: s.Found[:0]} }

func (s *Search) see(m *sent, depth int) {
	for i := range s.Found {
		if f := &s.Found[i]; f.Member == m.member && f.Epoch == m.epoch {
			f.Depth = max(f.Depth, depth)
			return
		}
	}
	s.Found = append(s.Found, Found{Member: m.member, Epoch: m.epoch, Depth: depth})
}

// Match continues at the keys that s has not seen, until no mark is there. It
// returns the deepest prefix found; len(keys) if the search could go on. All
// but the last of several calls pass a multiple of Stride keys.
func (b *Blocks) Match(keys []blockkey.Key, s *Search, now time.Time) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.sinceLocked(now)
	for ; !s.ended && s.next < len(keys); s.next += Stride {
		live := false
		if place, ok := b.at[keys[s.next]]; ok {
			m := &b.marks[place]
			for i := range m {
				if m[i].until > at && !b.isWithdrawnLocked(m[i].decision) {
					live = true
					s.see(&m[i], s.next+1+m[i].common(keys[s.next+1:]))
				}
			}
		}
		s.ended = !live
	}
	if !s.ended && len(s.Found) > 0 {
		return len(keys)
	}
	deepest := 0
	for i := range s.Found {
		deepest = max(deepest, s.Found[i].Depth)
	}
	return deepest
}

// Sent is a prompt that went to a member.
type Sent struct {
	Decision uint64 // by which it can be withdrawn
	Member   index.Member
	Epoch    uint64
	// Keys of its leading blocks, at most MaxBlocks of them count. They are
	// not kept.
	Keys []blockkey.Key
	// First token is predicted after so long.
	First time.Duration
	// Exact: events will say when the blocks are there.
	Exact bool
}

// Add predicts the blocks of a prompt, and returns for how long.
func (b *Blocks) Add(s Sent, now time.Time) time.Duration {
	if s.Exact {
		b.delay.watch(s.Member, s.Keys, now.Add(s.First))
	}
	ttl := min(s.First+b.delay.confirm(), longest)
	b.add(s.Keys, Stride, sent{decision: s.Decision, member: s.Member, epoch: s.Epoch}, now.Add(ttl), now)
	return ttl
}

// Marks appends up to n of the keys that other schedulers adopt.
func Marks(dst, keys []blockkey.Key, n int) []blockkey.Key {
	for i := 0; i < len(keys) && n > 0; i, n = i+Stride, n-1 {
		dst = append(dst, keys[i])
	}
	return dst
}

// Adopt predicts what another scheduler sent to a member, of which it knows the
// Marks, until at most life after it was sent.
func (b *Blocks) Adopt(decision uint64, m index.Member, epoch uint64, marks []blockkey.Key, ttl time.Duration, at, now time.Time) {
	until := at.Add(min(ttl, longest))
	if len(marks) > 0 && until.After(now) {
		b.add(marks, 1, sent{decision: decision, member: m, epoch: epoch}, until, now)
	}
}

// Withdraw takes back what was predicted of a decision: its prompt may never be
// computed. What equal prompts were sent after it stays.
func (b *Blocks) Withdraw(decision uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.order) < maxWithdrawn {
		b.order = append(b.order, decision)
	} else {
		delete(b.withdrawn, b.order[b.turn])
		b.order[b.turn] = decision
		b.turn = (b.turn + 1) % maxWithdrawn
	}
	b.withdrawn[decision] = struct{}{}
}

func (b *Blocks) isWithdrawnLocked(decision uint64) bool {
	if len(b.withdrawn) == 0 {
		return false
	}
	_, ok := b.withdrawn[decision]
	return ok
}

// add marks the first of every step keys as sent to a member.
func (b *Blocks) add(keys []blockkey.Key, step int, s sent, until, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.sinceLocked(now)
	s.until = b.sinceLocked(until)
	b.expireLocked(at)
	for i, n := 0, 0; i < len(keys) && n < maxMarks; i, n = i+step, n+1 {
		s.follow = uint8(copy(s.rest[:step-1], keys[i+1:]))
		m := b.markLocked(keys[i], s.until)
		place := 0
		for j := range m {
			if m[j].until != 0 && s.continues(&m[j]) {
				place = j
				break
			}
			if m[j].until < m[place].until {
				place = j
			}
		}
		m[place] = s
	}
	for len(b.queue)-b.head > maxAll {
		b.popLocked(at, true)
	}
}

// sinceLocked is a time as marks have it. It is never 0, which is over.
func (b *Blocks) sinceLocked(t time.Time) time.Duration {
	if b.origin.IsZero() {
		b.origin = t.Add(-time.Nanosecond)
	}
	return t.Sub(b.origin)
}

// markLocked is the mark of a key; a new one is zero, and due at a time.
func (b *Blocks) markLocked(key blockkey.Key, until time.Duration) *mark {
	place, ok := b.at[key]
	if !ok {
		if n := len(b.free); n > 0 {
			place, b.free = b.free[n-1], b.free[:n-1]
		} else {
			place, b.marks = int32(len(b.marks)), append(b.marks, mark{})
		}
		b.at[key] = place
		b.queue = append(b.queue, dueMark{key, until})
	}
	return &b.marks[place]
}

// Confirm looks for the events of one of the prompts that were sent, so that a
// decision pays for one at most.
func (b *Blocks) Confirm(now time.Time) { b.delay.poll(b.index, 1, now) }

// Tick looks for the events of all of them, and drops what has run out.
func (b *Blocks) Tick(now time.Time) {
	b.delay.poll(b.index, probes, now)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expireLocked(b.sinceLocked(now))
}

func (b *Blocks) expireLocked(at time.Duration) {
	for b.head < len(b.queue) && b.queue[b.head].until <= at {
		b.popLocked(at, false)
	}
	if b.head > len(b.queue)/2 {
		b.queue = slices.Delete(b.queue, 0, b.head)
		b.head = 0
	}
}

// popLocked takes the oldest mark off the queue and out of the map. One that
// somebody renewed goes to the end of the queue instead.
func (b *Blocks) popLocked(at time.Duration, force bool) {
	d := b.queue[b.head]
	b.head++
	place := b.at[d.key]
	m := &b.marks[place]
	until := time.Duration(0)
	for i := range m {
		until = max(until, m[i].until)
	}
	if until > at && (!force || until > d.until) {
		b.queue = append(b.queue, dueMark{d.key, until})
		return
	}
	*m = mark{}
	b.free = append(b.free, place)
	delete(b.at, d.key)
}

// Stats describes the predictions.
type Stats struct {
	// Marks that are kept, prompts Watched for their events, and decisions
	// Withdrawn that are remembered.
	Marks, Watched, Withdrawn int
	// Confirm is how long after its first token is due what was sent is
	// believed without an event.
	Confirm time.Duration
}

// Stats returns the counts.
func (b *Blocks) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return Stats{Marks: len(b.at), Withdrawn: len(b.withdrawn), Watched: b.delay.watched(), Confirm: b.delay.confirm()}
}
