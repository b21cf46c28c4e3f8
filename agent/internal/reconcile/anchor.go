package reconcile

import "time"

// anchor is a moment from which growth is measured. The zero value with set is
// the beginning of the engine's process and of its stream.
type anchor struct {
	set      bool
	at       time.Time
	counters Counters
	// most was announced by then at least, fresh at most.
	most, fresh float64
	// busy: what was in flight may have been announced before and counted after.
	busy bool
	// admitted before, and may be announced after.
	admitted float64
	// unlooked: prompts are computed that are never looked up.
	unlooked bool
	// pressed: the pool was so full that requests may have been preempted.
	pressed bool
}

// anchorAt measures from an observation on.
func anchorAt(o *observation, quiet bool) anchor {
	a := anchor{set: true, at: o.at, counters: o.counters, most: o.after.Most, fresh: o.after.Fresh}
	if quiet {
		return a
	}
	c := &o.counters
	a.most = o.before.Most
	a.busy = true
	a.admitted = max(0, c.Admitted-c.Prompt) + c.Running*o.blockSize()
	return a
}

// note remembers what later observations do not show.
func (a *anchor) note(o *observation) {
	c := &o.counters
	a.pressed = a.pressed || c.Usage >= crowded || c.Resets > a.counters.Resets
	if c.Looked && c.Admitted-a.counters.Admitted < c.Prompt-a.counters.Prompt-a.admitted-o.margin() {
		a.unlooked = true
	}
}

// partial is what requests may hold in blocks that are not whole.
func (a *anchor) partial(o *observation) float64 {
	return max(0, o.counters.Requests-a.counters.Requests+a.counters.Running) * o.blockSize()
}

// missing are the tokens beyond any doubt that were computed and not announced.
func (a *anchor) missing(o *observation) float64 {
	computed := o.counters.computed() - a.counters.computed()
	if a.busy {
		computed -= o.inFlight(&a.counters)
	}
	return computed - (o.after.Most - a.most) - a.partial(o) - o.margin()
}

// foreign are the tokens beyond any doubt that were announced and that the
// engine has not computed.
func (a *anchor) foreign(o *observation) float64 {
	c := &o.counters
	allowed := c.Prompt - a.counters.Prompt + c.External - a.counters.External
	if c.Looked && !a.unlooked {
		allowed = max(allowed, c.Admitted-a.counters.Admitted)
		if a.pressed {
			allowed += c.InUse
		}
	} else {
		// What is in flight counts when it got its first token, and what is
		// aborted before never does.
		allowed += c.InUse + c.MaxRequest
	}
	allowed += a.admitted + c.Generated - a.counters.Generated
	if preempted := c.Preempted - a.counters.Preempted; preempted > 0 {
		if c.MaxRequest == 0 {
			return 0
		}
		allowed += preempted * c.MaxRequest
	}
	return o.before.Fresh - a.fresh - allowed - o.margin()
}
