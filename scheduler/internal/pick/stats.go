package pick

import (
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/approx"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// Stats counts what happened since New.
type Stats struct {
	// Unmeasured counts the candidates whose profile says nothing of the
	// request's lengths.
	Unmeasured uint64
	// Left counts the decisions that left the session's last member, or what a
	// policy takes for that, by reason; at 0 all others.
	Left [policy.LeftReasons]uint64
	// Confirm is how long after its first token is due what was just sent is
	// believed without an event.
	Confirm time.Duration
	// Sent is what was noted of prompts for members without an exact cache state,
	// and for policies that go by it.
	Sent approx.Stats
	// HitTokens of the requests that were picked.
	HitTokens HitTokens
}

// HitTokens is how much of prompts was found cached, in tokens.
type HitTokens struct {
	// Prompt tokens; Ideal, the longest prefixes that any member had; Feasible,
	// the longest that a candidate had; Routed, those of the members chosen.
	Prompt, Ideal, Feasible, Routed uint64
	// LeastLoad are those of the members with the fewest requests at that moment,
	// where a balancer that knows load alone would have gone. Their caches are as the
	// policy that decides has filled them.
	LeastLoad uint64
}

// hitTokens are HitTokens that still grow.
type hitTokens struct{ prompt, ideal, feasible, routed, leastLoad atomic.Uint64 }

// Stats returns the counts.
func (p *Picker) Stats() Stats {
	s := Stats{Unmeasured: p.unmeasured.Load(), Confirm: p.predicted.Stats().Confirm, Sent: p.sent.Stats()}
	for i := range p.left {
		s.Left[i] = p.left[i].Load()
	}
	s.HitTokens = HitTokens{
		Prompt: p.hits.prompt.Load(), Ideal: p.hits.ideal.Load(),
		Feasible: p.hits.feasible.Load(), Routed: p.hits.routed.Load(),
		LeastLoad: p.hits.leastLoad.Load(),
	}
	return s
}
