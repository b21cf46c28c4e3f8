package pick

import (
	"strconv"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// Report is what a caller tells of a decision.
type Report struct {
	Decision string
	Outcome  fleet.Outcome
	// Member that served the request; empty: the one that was picked.
	Member string
	// PromptTokens and CachedTokens by the engine's own count; nil: not told.
	PromptTokens, CachedTokens *uint64
	// OutputTokens by the engine's own count; 0: not told.
	OutputTokens uint64
	// TTFTMS is the time to the first token as the caller measured it; 0: not
	// told.
	TTFTMS float64
}

// Report tells what became of a decision. It returns false if the decision is
// not, or no longer, known.
func (p *Picker) Report(r Report, now time.Time) bool {
	id, err := strconv.ParseUint(r.Decision, 16, 64)
	if err != nil {
		return false
	}
	report := fleet.Report{
		Decision: fleet.Decision(id),
		Outcome:  r.Outcome,
		Member:   r.Member,
	}
	if r.PromptTokens != nil && r.CachedTokens != nil {
		report.Counts, report.PromptTokens, report.Cached = true, *r.PromptTokens, *r.CachedTokens
	}
	asked, known := p.fleet.Report(report, now)
	if asked.GivenUp {
		p.predicted.Withdraw(id)
	}
	if known {
		if p.books != nil && asked.Counted {
			p.books.Book(books.Report{Decision: id, Prompt: report.PromptTokens, Cached: report.Cached, Moved: asked.Moved})
		}
		if p.outbox != nil {
			p.outbox.End(&report)
		}
		p.learn(&r, &asked, now)
	}
	return known
}

// learn takes the time to the first token that a caller saw, if the member that
// was picked served the request to its end, or to that token, and the length of
// the output.
func (p *Picker) learn(r *Report, asked *fleet.Asked, now time.Time) {
	f := &asked.Forecast
	if r.TTFTMS != 0 && f.Name != "" && (r.Member == "" || r.Member == f.Name) &&
		(r.Outcome == fleet.FirstToken || r.Outcome == fleet.Finished) {
		p.estimates.Speeds.Served(f, r.TTFTMS)
	}
	if r.OutputTokens > 0 && r.Outcome == fleet.Finished {
		p.estimates.Outputs.Observe(asked, r.OutputTokens, now)
	}
}
