package recording

// quiet is for how long no event must have come before a request that is to be
// judged exactly: an answer often overtakes the last event of its request.
const quiet = 0.2

// Question is a request that was alone in the engine, with what came of it.
type Question struct {
	Step  int // index of its Send in Steps
	Done  Done
	Blind bool // something was done to the engine that no event had told yet
	Rank  int  // the rank that served it; -1 when nothing tells
}

// Questions gives the isolated requests in order: no other request was in
// flight from their send to their done, and no event had come for a while
// before their send.
func (r *Recording) Questions() []Question {
	var (
		questions []Question
		pending   = map[int]bool{} // numbers in flight
		aborting  int              // requests in flight that will be aborted
		open      = -1             // index in questions of the lone request in flight
		lastEvent = -1.0
		acted     bool // an action since the last event
	)
	for i, s := range r.Steps {
		switch {
		case s.Batch != nil:
			lastEvent, acted = s.At, false
		case s.Action != "" || s.Result != "":
			acted = true // it took effect at some moment between the two
		case s.Aborted:
			aborting = max(0, aborting-1)
		case s.Send != nil:
			alone := len(pending) == 0 && aborting == 0
			if open >= 0 {
				questions = questions[:open] // its peace is disturbed
				open = -1
			}
			if s.Send.Number == 0 {
				aborting++
				continue
			}
			pending[s.Send.Number] = true
			if alone && (lastEvent < 0 || s.At-lastEvent >= quiet) {
				open = len(questions)
				questions = append(questions, Question{Step: i, Blind: acted, Rank: r.servedBy(i)})
			}
		case s.Done != nil:
			delete(pending, s.Done.Number)
			if open >= 0 && r.Steps[questions[open].Step].Send.Number == s.Done.Number {
				questions[open].Done = *s.Done
				open = -1
			}
		}
	}
	if open >= 0 {
		questions = questions[:open]
	}
	return questions
}

// servedBy tells the rank of a request by where it was steered, by there being
// one rank only, or by who announced events before the next request.
func (r *Recording) servedBy(send int) int {
	if rank := r.Steps[send].Send.Rank; rank != nil {
		return *rank
	}
	if r.Ranks() == 1 {
		return 0
	}
	for _, s := range r.Steps[send+1:] {
		if s.Send != nil {
			break
		}
		if s.Batch != nil {
			return s.Batch.Rank
		}
	}
	return -1
}
