package sim

import (
	"fmt"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/line"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// lookEvery is how often those who wait are tried again while nothing is
// reported, as the scheduler does.
const lookEvery = 50 * time.Millisecond

// waits is the line in front of the picker. Its passes are entries of the
// calendar: one at every report and arrival, and others while anybody waits.
type waits struct {
	line             *line.Line
	stirred, looking bool    // a pass is entered; the next look is
	found            []found // in the pass under way
}

// found is what became of one that waited.
type found struct {
	r        *request
	decision *pick.Decision
	err      error
}

// wait lets a request enter the line, or refuses it.
func (s *scout) wait(r *request, q *pick.Request, full *pick.Full) {
	began := s.calendar.now
	w, err := s.queue.line.Enter(q, full, int(r.Priority), s.clock(), func(d *pick.Decision, _ time.Time, err error) {
		r.queued = s.calendar.now - began
		s.queue.found = append(s.queue.found, found{r, d, err})
	})
	if err != nil {
		s.refuse(r)
		return
	}
	s.calendar.at(began+s.cfg.Line.Wait, func() {
		if s.queue.line.Leave(w) {
			s.refuse(r)
		}
	})
	s.stir()
	if !s.queue.looking {
		s.queue.looking = true
		s.calendar.at(s.calendar.now+lookEvery, s.look)
	}
}

// stir enters a pass for this moment, behind what has been entered for it.
func (s *scout) stir() {
	if !s.queue.stirred && s.queue.line.Stats().Waiting > 0 {
		s.queue.stirred = true
		s.calendar.at(s.calendar.now, s.pass)
	}
}

func (s *scout) look() {
	s.stir()
	if s.queue.looking = s.queue.line.Stats().Waiting > 0; s.queue.looking {
		s.calendar.at(s.calendar.now+lookEvery, s.look)
	}
}

// pass tries those who wait. The line is closed to others until it is over, so
// what was found is delivered then.
func (s *scout) pass() {
	s.queue.stirred = false
	s.queue.line.Pass(s.clock)
	for i, f := range s.queue.found {
		s.queue.found[i] = found{}
		if f.err != nil {
			s.broken = fmt.Errorf("request %d: %w", f.r.ID, f.err)
			return
		}
		s.deliver(f.r, s.chosen(f.r, f.decision))
	}
	s.queue.found = s.queue.found[:0]
}
