package watch

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/agent/internal/rank"
	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// audits counts how they ended.
type audits struct {
	held, missing, skipped, failed atomic.Uint64
}

// AuditStats counts audits by how they ended.
type AuditStats struct{ Held, Missing, Skipped, Failed uint64 }

// Audits counts those so far.
func (w *Watch) Audits() AuditStats {
	a := &w.audits
	return AuditStats{Held: a.held.Load(), Missing: a.missing.Load(), Skipped: a.skipped.Load(), Failed: a.failed.Load()}
}

// auditAll asks the idle engine now and then, until ctx ends, whether it holds
// what is believed held.
func (w *Watch) auditAll(ctx context.Context) {
	for {
		select {
		case <-time.After(w.cfg.Audit*9/10 + rand.N(w.cfg.Audit/5)):
		case <-ctx.Done():
			return
		}
		list := w.Ranks()
		for _, r := range list {
			w.auditRank(ctx, r, len(list) > 1)
		}
	}
}

func (w *Watch) auditRank(ctx context.Context, r *rank.Rank, steer bool) {
	tokens, at := r.Question()
	if tokens == nil {
		w.audits.skipped.Add(1)
		return
	}
	models, err := w.cfg.Engine.Models(ctx)
	var page vllm.Page
	if err == nil {
		page, err = w.cfg.Engine.Metrics(ctx)
	}
	if err != nil {
		w.audits.failed.Add(1)
		return
	}
	load := page.Load(r.Number())
	if load == nil || !load.Idle() || load.Sleeping != nil && *load.Sleeping || r.Position() != at {
		w.audits.skipped.Add(1)
		return
	}
	cached, err := w.cfg.Engine.Cached(ctx, vllm.Question{Model: models.Names[0], Rank: r.Number(), Steer: steer, Tokens: tokens}, load)
	switch {
	case err != nil:
		if ctx.Err() == nil {
			w.cfg.Log.Info("audit is undecided", "member", r.Member(), "error", err)
		}
		w.audits.failed.Add(1)
	case cached > 0:
		w.audits.held.Add(1)
	default:
		w.audits.missing.Add(1)
		r.Disprove(at)
	}
}
