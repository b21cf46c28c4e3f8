package pick

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// speeds brings the fleet's load samples to learn and keeps what it makes of
// them for readers without a lock.
type speeds struct {
	prior  learn.Speed
	fitted atomic.Pointer[table]

	mu     sync.Mutex // guards what follows
	curves learn.Curves
	names  []string // of whom curves knows, by number
}

// table is one fit. Hashes of names tell whether a number still is the same
// member's.
type table struct {
	speeds []learn.Speed
	hashes []uint64
}

func (s *speeds) learn(view *fleet.View, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := make([]string, len(s.names))
	for _, m := range view.Members {
		for int(m.ID) >= len(names) {
			names = append(names, "")
		}
		names[m.ID] = m.Info.Name
	}
	for i, name := range s.names {
		if name != names[i] {
			s.curves.Forget(uint32(i))
		}
	}
	s.names = names
	hashes := make([]uint64, len(names))
	for _, m := range view.Members {
		hashes[m.ID] = m.Hash
		t := &m.Load.Totals
		running := math.NaN()
		if m.Load.Running >= 0 {
			running = float64(m.Load.Running)
		}
		s.curves.Observe(uint32(m.ID), m.Info.Model(), m.Load.At, learn.Totals{
			Begun:   learn.Begun{PromptTokens: t.PromptTokens, CachedTokens: t.CachedTokens},
			Stepped: learn.Stepped{InterTokenSeconds: t.InterTokenSeconds, InterTokenCount: t.InterTokenCount},
			Ended: learn.Ended{
				Requests: t.PrefillRequests, PrefillSeconds: t.PrefillSeconds, ComputedTokens: t.PrefillComputedTokens,
				PromptLength: t.RequestPromptTokens, OutputLength: t.RequestGenerationTokens,
			},
			Running: running,
		})
	}
	s.fitted.Store(&table{speeds: s.curves.Fit(now), hashes: hashes})
}

// served takes the time to the first token that a caller reported, if the
// member that was picked served the request to its end, or to that token.
func (s *speeds) served(r *Report, f *fleet.Forecast) {
	if r.TTFTMS == 0 || f.Name == "" || r.Member != "" && r.Member != f.Name ||
		r.Outcome != fleet.FirstToken && r.Outcome != fleet.Finished {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if int(f.Member) >= len(s.names) || s.names[f.Member] != f.Name {
		return
	}
	s.curves.Report(uint32(f.Member), learn.Served{
		TTFTMS: r.TTFTMS, WaitMS: f.WaitMS, PrefillMS: f.PrefillMS, Host: float64(f.Host), Disk: float64(f.Disk),
	})
}

// of returns the speed of a member; it is not to be changed.
func (s *speeds) of(m *fleet.Member) *learn.Speed { return s.in(s.fitted.Load(), m.ID, m.Hash) }

// in looks a member up in one fit; nil: there was none.
func (s *speeds) in(t *table, id fleet.ID, hash uint64) *learn.Speed {
	if t == nil || int(id) >= len(t.speeds) || t.hashes[id] != hash {
		return &s.prior
	}
	return &t.speeds[id]
}

// Speed is what decisions reckon with for a member.
func (p *Picker) Speed(m *fleet.Member) learn.Speed { return *p.speeds.of(m) }
