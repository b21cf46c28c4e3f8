package sim

import (
	"errors"
	"fmt"

	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// waits is the admission queue in front of the picker. Its passes are entries of
// the calendar: one at every report, arrival and end of waiting, and others that
// poll while anybody waits.
type waits struct {
	*admission.Queue
	woken, polling bool    // a pass is entered; the next poll is
	found          []found // in the pass under way
}

// found is what became of one that waited.
type found struct {
	r *request
	admission.Outcome
}

// wait lets a request enter the queue, or refuses it.
func (s *scout) wait(r *request, q *pick.Request, noRoom *pick.NoRoom) {
	began := s.calendar.now
	w, err := s.queue.Enter(q, noRoom, int(r.Priority), 0, s.clock(), func(o admission.Outcome) {
		r.queued = s.calendar.now - began
		s.queue.found = append(s.queue.found, found{r, o})
	})
	if err != nil {
		s.refuse(r)
		return
	}
	s.calendar.at(began+s.cfg.Queue.Wait, func() {
		if s.queue.Leave(w) {
			s.refuse(r)
			s.wake()
		}
	})
	s.wake()
	if !s.queue.polling {
		s.queue.polling = true
		s.calendar.at(s.calendar.now+admission.PollEvery, s.poll)
	}
}

// wake enters a pass for this moment, behind what has been entered for it.
func (s *scout) wake() {
	if !s.queue.woken && s.queue.Waiting() > 0 {
		s.queue.woken = true
		s.calendar.at(s.calendar.now, func() { s.pass(false) })
	}
}

func (s *scout) poll() {
	s.pass(true)
	if s.queue.polling = s.queue.Waiting() > 0; s.queue.polling {
		s.calendar.at(s.calendar.now+admission.PollEvery, s.poll)
	}
}

// pass tries those who wait, until all had their turn. What was found is
// delivered then.
func (s *scout) pass(poll bool) {
	s.queue.woken = false
	for more := s.queue.Pass(s.clock, poll); more; {
		more = s.queue.Pass(s.clock, false)
	}
	for i, f := range s.queue.found {
		s.queue.found[i] = found{}
		switch {
		case errors.Is(f.Err, admission.ErrFull):
			s.refuse(f.r)
		case f.Err != nil:
			s.broken = fmt.Errorf("request %d: %w", f.r.ID, f.Err)
			return
		default:
			s.deliver(f.r, s.chosen(f.r, f.Decision))
		}
	}
	s.queue.found = s.queue.found[:0]
}
