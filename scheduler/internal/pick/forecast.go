package pick

import (
	"slices"
	"sync"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const (
	// stride: every so many blocks of a prompt are marked. What is predicted
	// is rounded down to it.
	stride = 8
	// maxMarks of one prompt, maxForecast of all.
	maxMarks, maxForecast = 1024, 1 << 16
	// holders remembered for one mark; the one that runs out first goes.
	holders = 4
	// maxForecastLife of a mark; see delay for how long it lives.
	maxForecastLife = 30 * time.Second
)

// forecast remembers for a short time what was sent where, so that siblings of
// a prompt stay together until the events of its blocks arrive. It is kept out
// of the index: what the index says is fact, and a prediction is renewed by
// each sibling and runs out by itself.
type forecast struct {
	mu    sync.Mutex
	at    map[blockkey.Key]int32 // place in marks
	marks []mark
	free  []int32   // places in marks, which are zero
	queue []dueMark // in order of insertion, from head on
	head  int
}

type mark [holders]sent

// sent says that a member got a prompt with this prefix. The zero value is
// over.
type sent struct {
	member fleet.ID
	epoch  uint64
	until  int64 // Unix nanoseconds
}

type dueMark struct {
	key   blockkey.Key
	until int64
}

// sighting is the state of one look at growing keys.
type sighting struct {
	next  int // position of the next key to look at
	ended bool
	found []found
}

type found struct {
	member fleet.ID
	epoch  uint64
	depth  int
}

// look continues at the keys that s has not seen, until no mark is there. It
// returns the deepest prefix found; len(keys) if the search could go on.
func (f *forecast) look(keys []blockkey.Key, s *sighting, now time.Time) int {
	if s.next == 0 {
		s.next = stride - 1
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	at := now.UnixNano()
	for ; !s.ended && s.next < len(keys); s.next += stride {
		live := false
		if place, ok := f.at[keys[s.next]]; ok {
			m := &f.marks[place]
			for i := range m {
				if m[i].until > at {
					live = true
					s.see(&m[i], s.next+1)
				}
			}
		}
		s.ended = !live
	}
	if !s.ended && len(s.found) > 0 {
		return len(keys)
	}
	deepest := 0
	for i := range s.found {
		deepest = max(deepest, s.found[i].depth)
	}
	return deepest
}

func (s *sighting) reset() { *s = sighting{found: s.found[:0]} }

func (s *sighting) see(m *sent, depth int) {
	for i := range s.found {
		if f := &s.found[i]; f.member == m.member && f.epoch == m.epoch {
			f.depth = depth
			return
		}
	}
	s.found = append(s.found, found{member: m.member, epoch: m.epoch, depth: depth})
}

// add marks every step-th of the keys as sent to a member.
func (f *forecast) add(keys []blockkey.Key, step int, s sent, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.at == nil {
		f.at = make(map[blockkey.Key]int32)
	}
	f.expireLocked(now)
	for i, n := step-1, 0; i < len(keys) && n < maxMarks; i, n = i+step, n+1 {
		m := f.markLocked(keys[i])
		at := 0
		for j := range m {
			if m[j].member == s.member && m[j].epoch == s.epoch && m[j].until != 0 {
				at = j
				break
			}
			if m[j].until < m[at].until {
				at = j
			}
		}
		m[at] = s
		f.queue = append(f.queue, dueMark{keys[i], s.until})
	}
	for len(f.queue)-f.head > maxForecast {
		f.popLocked(now.UnixNano(), true)
	}
}

// markLocked is the mark of a key; a new one is zero.
func (f *forecast) markLocked(key blockkey.Key) *mark {
	place, ok := f.at[key]
	if !ok {
		if n := len(f.free); n > 0 {
			place, f.free = f.free[n-1], f.free[:n-1]
		} else {
			place, f.marks = int32(len(f.marks)), append(f.marks, mark{})
		}
		f.at[key] = place
	}
	return &f.marks[place]
}

func (f *forecast) expire(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expireLocked(now)
}

func (f *forecast) expireLocked(now time.Time) {
	at := now.UnixNano()
	for f.head < len(f.queue) && f.queue[f.head].until <= at {
		f.popLocked(at, false)
	}
	if f.head > len(f.queue)/2 {
		f.queue = slices.Delete(f.queue, 0, f.head)
		f.head = 0
	}
}

// popLocked takes the oldest mark off the queue, and out of the map unless
// somebody renewed it.
func (f *forecast) popLocked(at int64, force bool) {
	d := f.queue[f.head]
	f.head++
	place, ok := f.at[d.key]
	if !ok {
		return
	}
	m := &f.marks[place]
	for i := range m {
		if m[i].until > at && (!force || m[i].until > d.until) {
			return
		}
	}
	*m = mark{}
	f.free = append(f.free, place)
	delete(f.at, d.key)
}

// predict remembers where the prompt went, unless all of it is there already.
// It returns the keys that are predicted there now, and for how long.
func (p *Picker) predict(w *work, r *Request, now time.Time) ([]blockkey.Key, time.Duration) {
	c := &w.candidates[w.best]
	if c.scope < 0 {
		return nil, 0
	}
	s := &w.scopes[c.scope]
	if c.cached() >= (s.blocks-1)*s.BlockSize {
		return nil, 0
	}
	s.hash(r, maxMarks*stride)
	ms := w.round.Costs[w.best].FirstToken()
	first := time.Duration(min(ms, 1e6) * float64(time.Millisecond))
	if w.exact(c, now) {
		p.delay.watch(index.Member(c.member.ID), s.keys, now.Add(first))
	}
	life := min(first+p.delay.confirm(), maxForecastLife)
	p.forecast.add(s.keys, stride, sent{
		member: c.member.ID,
		epoch:  c.member.Picture.Epoch,
		until:  now.Add(life).UnixNano(),
	}, now)
	return s.keys, life
}
