package client

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Placement is where a request goes.
type Placement struct {
	// Address to send it to, by TLS if that is set.
	Address string
	TLS     bool
	// Headers for the engine that belong to the decision, by their names in lower
	// case; those that a client sent under these names are none of them.
	Headers map[string]string
	// Decision of the scheduler; nil: the proxy's own choice stands in for it, and
	// Why says why.
	Decision *api.PickResponse
	Why      error

	scheduler *scheduler
	since     time.Time
	first     atomic.Int64 // time to the first token in ns; 0: there was none
}

func placed(s *scheduler, d *api.PickResponse) *Placement {
	to := target(d.GetRanking())
	return &Placement{Address: to.GetAddress(), TLS: to.GetTls(), Headers: headersOf(d.GetRanking()), Decision: d, scheduler: s, since: time.Now()}
}

// Candidate is the first of the decision; nil: there is none.
func (p *Placement) Candidate() *api.Candidate {
	if list := p.Decision.GetRanking().GetCandidates(); len(list) > 0 {
		return list[0]
	}
	return nil
}

// FirstToken says that the answer has begun: the prompt is computed. Once counts.
func (p *Placement) FirstToken() {
	took := max(1, time.Since(p.since))
	if p.first.CompareAndSwap(0, int64(took)) {
		p.Report(&api.Report{Outcome: api.Outcome_OUTCOME_FIRST_TOKEN})
	}
}

// Report what became of the decision, with the time to the first token, if that
// was said. It does not wait: reports are sent behind the caller's back, and lost
// where no scheduler takes them. Of the proxy's own choices nobody is told.
func (p *Placement) Report(r *api.Report) {
	if p.scheduler == nil {
		return
	}
	r.DecisionId = p.Decision.GetDecisionId()
	if first := p.first.Load(); first != 0 && r.TtftMs == nil && r.Outcome == api.Outcome_OUTCOME_FINISHED {
		r.TtftMs = proto.Float64(float64(first) / float64(time.Millisecond))
	}
	p.scheduler.report(r)
}

// end reports how send ended.
func (p *Placement) end(ctx context.Context, r *api.Report, err error) {
	if r == nil {
		r = &api.Report{}
	}
	if r.Outcome == api.Outcome_OUTCOME_UNSPECIFIED {
		switch {
		case err == nil:
			r.Outcome = api.Outcome_OUTCOME_FINISHED
		case ctx.Err() != nil || errors.Is(err, context.Canceled):
			r.Outcome = api.Outcome_OUTCOME_CANCELLED
		default:
			r.Outcome = api.Outcome_OUTCOME_FAILED
		}
	}
	p.Report(r)
}
