package learn

import (
	"math"
	"slices"
)

const (
	// keptServed reports are remembered of a member, and fewer than enoughServed say nothing.
	keptServed, enoughServed = 64, 8
	// leastLoaded is the number of tokens from host or disk from which on a
	// report tells how long loading them took.
	leastLoaded = 256
	// longestServed bounds what a report may say, in ms.
	longestServed = 600_000
)

// Served is one request whose first token was reported.
type Served struct {
	// TTFTMS as the caller measured it; WaitMS and PrefillMS as predicted.
	TTFTMS, WaitMS, PrefillMS float64
	// Host and Disk tokens that were to be loaded, as predicted.
	Host, Disk float64
}

// served is what reports tell of a member beyond the engine's totals. Medians
// are taken: a caller's time has the network in it, and every other request.
type served struct {
	overhead, host, disk recent
}

// recent keeps the newest values.
type recent struct {
	values [keptServed]float64
	n      int
}

func (r *recent) add(v float64) {
	r.values[r.n%keptServed] = v
	r.n++
}

func (r *recent) or(prior float64) float64 {
	if r.n < enoughServed {
		return prior
	}
	v := slices.Clone(r.values[:min(r.n, keptServed)])
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// Report takes what a caller measured. Values that cannot be teach nothing, and
// a request that loads from two places does not tell them apart.
func (c *Curves) Report(member uint32, s Served) {
	if int(member) >= len(c.members) {
		return
	}
	for _, v := range []float64{s.TTFTMS, s.WaitMS, s.PrefillMS, s.Host, s.Disk} {
		if !(v >= 0 && v <= longestServed) {
			return
		}
	}
	if s.TTFTMS == 0 {
		return
	}
	f := &c.members[member].served
	rest := s.TTFTMS - s.WaitMS - s.PrefillMS
	switch {
	case s.Host == 0 && s.Disk == 0:
		f.overhead.add(rest)
	case s.Disk == 0 && s.Host >= leastLoaded:
		f.host.add(max(0, rest-math.Max(0, f.overhead.or(0))) / s.Host)
	case s.Host == 0 && s.Disk >= leastLoaded:
		f.disk.add(max(0, rest-math.Max(0, f.overhead.or(0))) / s.Disk)
	}
}
