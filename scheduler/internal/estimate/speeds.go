package estimate

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// Speeds brings the fleet's load samples to learn and keeps what it makes of
// them for readers without a lock.
type Speeds struct {
	Prior  learn.Speed // of members of which nothing is known
	fitted atomic.Pointer[Fit]

	mu     sync.Mutex // guards what follows
	curves learn.Curves
	names  []string // of whom curves knows, by number
}

// repriced is the change of a speed from which on what is reserved follows it.
const repriced = 0.02

// learn takes the samples that have come, and tells whose prefills are believed to
// take so many times as long from here on.
func (s *Speeds) learn(view *fleet.View, now time.Time, reprice func(id fleet.ID, by float64)) {
	was := s.Fitted()
	s.observe(view, now)
	is := s.Fitted()
	for _, m := range view.Members {
		before, after := was.Of(m.ID, m.Hash), is.Of(m.ID, m.Hash)
		by := after.Prefill(after.PromptTokens, 0) / before.Prefill(after.PromptTokens, 0)
		if math.Abs(by-1) > repriced {
			reprice(m.ID, by)
		}
	}
}

func (s *Speeds) observe(view *fleet.View, now time.Time) {
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
	s.fitted.Store(&Fit{prior: &s.Prior, speeds: s.curves.Fit(now), hashes: hashes})
}

// Served takes what a caller saw of a request, beside what was predicted for
// the member that served it.
func (s *Speeds) Served(f *fleet.Forecast, ttftMS float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if int(f.Member) >= len(s.names) || s.names[f.Member] != f.Name {
		return
	}
	s.curves.Report(uint32(f.Member), learn.Served{
		TTFTMS: ttftMS, WaitMS: f.WaitMS, PrefillMS: f.PrefillMS, Host: float64(f.Host), Disk: float64(f.Disk),
	})
}

// Of returns the speed of a member; it is not to be changed.
func (s *Speeds) Of(m *fleet.Member) *learn.Speed { return s.Fitted().Of(m.ID, m.Hash) }

// Fitted is the last fit.
func (s *Speeds) Fitted() *Fit { return s.fitted.Load() }

// Fit says how fast members were believed to be at one moment. Hashes of names
// tell whether a number still is the same member's.
type Fit struct {
	prior  *learn.Speed
	speeds []learn.Speed
	hashes []uint64
}

// Of returns the speed of a member; it is not to be changed.
func (f *Fit) Of(id fleet.ID, hash uint64) *learn.Speed {
	if int(id) >= len(f.speeds) || f.hashes[id] != hash {
		return f.prior
	}
	return &f.speeds[id]
}
