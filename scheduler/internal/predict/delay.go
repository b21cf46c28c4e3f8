package predict

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

const (
	// probes of predictions may be open at a time, each of at most maxProbe
	// blocks, for as long as a prediction may live at most.
	probes   = 16
	maxProbe = 1024
	// firstConfirm is how long after the first token is due an event may take,
	// until enough were observed. The observations give it afterwards: twice the
	// 95th percentile, within limits.
	firstConfirm           = 2 * time.Second
	leastConfirm, mostLate = 50 * time.Millisecond, 10 * time.Second
	enoughLate             = 20
)

// delay learns how long after the predicted first token the events of a prompt
// arrive.
type delay struct {
	believed atomic.Int64 // nanoseconds; 0: firstConfirm

	mu       sync.Mutex // guards the rest; whoever finds it taken goes on
	open     []probe
	turn     int
	late     [128]float64 // seconds, a ring
	observed int
	held     index.Answer
	sorted   []float64
}

// probe is a prediction that waits for its events.
type probe struct {
	member index.Member
	keys   []blockkey.Key
	due    time.Time
}

// confirm is how long after its first token is due a prediction is believed.
func (d *delay) confirm() time.Duration {
	if believed := d.believed.Load(); believed > 0 {
		return time.Duration(believed)
	}
	return firstConfirm
}

// watch waits for the events of a prompt that is not there yet.
func (d *delay) watch(m index.Member, keys []blockkey.Key, due time.Time) {
	if len(keys) == 0 || len(keys) > maxProbe || !d.mu.TryLock() {
		return
	}
	defer d.mu.Unlock()
	if len(d.open) < probes {
		d.open = append(d.open, probe{m, slices.Clone(keys), due})
	}
}

// poll asks the index for so many of the open probes.
func (d *delay) poll(x *index.Index, count int, now time.Time) {
	if !d.mu.TryLock() {
		return
	}
	defer d.mu.Unlock()
	for range min(count, len(d.open)) {
		d.turn = (d.turn + 1) % len(d.open)
		o := &d.open[d.turn]
		x.Match(o.keys, &d.held)
		there := false
		for h, depth := range d.held.All() {
			there = there || h.Member() == o.member && h.On(index.LaneGPU) && int(depth) == len(o.keys)
		}
		if there {
			d.late[d.observed%len(d.late)] = max(0, now.Sub(o.due).Seconds())
			d.observed++
			d.update()
		}
		if there || now.Sub(o.due) > longest {
			d.open = slices.Delete(d.open, d.turn, d.turn+1)
			if len(d.open) == 0 {
				return
			}
		}
	}
}

// watched is how many probes are open.
func (d *delay) watched() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.open)
}

func (d *delay) update() {
	if d.observed < enoughLate {
		return
	}
	d.sorted = append(d.sorted[:0], d.late[:min(d.observed, len(d.late))]...)
	slices.Sort(d.sorted)
	late := 2 * time.Duration(d.sorted[len(d.sorted)*95/100]*float64(time.Second))
	d.believed.Store(int64(min(max(late, leastConfirm), mostLate)))
}
