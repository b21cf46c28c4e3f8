package reconcile

import "time"

const (
	// trailStep is the time between two points, trailPoints how many are kept.
	trailStep   = 20 * time.Millisecond
	trailPoints = 256
)

// trail is what a stream had announced at moments of the last seconds.
type trail struct {
	points []point // oldest first; a ring once it is full
	oldest int
}

type point struct {
	at   time.Time
	flow Totals
}

func (t *trail) get(i int) *point { return &t.points[(t.oldest+i)%len(t.points)] }

// add notes the newest state. Points closer than a step become one, with the
// time of the first: what came in between may have come at once.
func (t *trail) add(now time.Time, flow Totals) {
	n := len(t.points)
	if n > 0 {
		last := t.get(n - 1)
		if last.flow == flow {
			return
		}
		if now.Sub(last.at) < trailStep {
			last.flow = flow
			return
		}
	}
	p := point{at: now, flow: flow}
	if n < trailPoints {
		t.points = append(t.points, p)
		return
	}
	t.points[t.oldest] = p
	t.oldest = (t.oldest + 1) % n
}

// at is what was announced at a moment, a step earlier at most. It is false when
// that is too long ago to know, or before all.
func (t *trail) at(when time.Time) (Totals, bool) {
	for i := len(t.points) - 1; i >= 0; i-- {
		if p := t.get(i); !p.at.After(when.Add(-trailStep)) {
			return p.flow, true
		}
	}
	return Totals{}, false
}

// from is what was announced a while behind a moment: at the first point that is
// not before it, else now.
func (t *trail) from(when time.Time, now Totals) Totals {
	for i := range t.points {
		if p := t.get(i); !p.at.Before(when) {
			return p.flow
		}
	}
	return now
}
