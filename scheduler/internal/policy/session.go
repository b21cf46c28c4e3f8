package policy

import "math"

// Left says why a session left its last member.
type Left uint8

const (
	// Stayed: it did not, or had none.
	Stayed Left = iota
	// Gone: the member is not among the candidates: it is silent, asleep or
	// excluded, or no longer there.
	Gone
	// Full: its cache is in use by requests.
	Full
	// Slow: it would take much longer than another.
	Slow
	// Crowded: it has more than its share of the requests.
	Crowded

	LeftReasons = 5
)

func (l Left) String() string {
	return [...]string{"stayed", "gone", "full", "slow", "crowded"}[l]
}

// session keeps a session where it was: its requests go to its last member
// unless that one is full, much slower than another, or has more than its
// share. A new session goes to the first in line by its key, so that all
// schedulers agree; one that left goes where its first token comes soonest.
//
// Much slower is by more than gap ms and more than ratio times. Full is a KV
// usage of full, while another one's is below floor: where all are full,
// leaving costs a prefill and gains nothing. The share is factor times the mean
// of the candidates' requests, or margin more than it.
type session struct{ gap, ratio, full, floor, factor, margin float64 }

func newSession() *session {
	return &session{gap: 500, ratio: 1.5, full: 0.95, floor: 0.6, factor: 1.5, margin: 8}
}

func (s *session) parameters() []parameter {
	return []parameter{
		{"gap", &s.gap, 0, 1e9}, {"ratio", &s.ratio, 1, 1e9}, {"full", &s.full, 0, 1.01}, {"floor", &s.floor, 0, 1},
		{"factor", &s.factor, 1, 1e9}, {"margin", &s.margin, 1, 1e9},
	}
}

func (s *session) score(r *Round, scores []float64) {
	limit := bound(r.Candidates, s.factor, s.margin)
	soonest, full := math.Inf(1), math.Inf(1)
	for i := range r.Candidates {
		if r.Candidates[i].Load.KVUsage < s.floor {
			full = s.full
		}
	}
	for i := range r.Costs {
		if !(r.Candidates[i].Load.KVUsage >= full) {
			soonest = min(soonest, r.Costs[i].FirstToken())
		}
	}
	stays := false
	if r.Owner >= 0 {
		r.Left = s.left(r, r.Owner, full, soonest, limit)
		stays = r.Left == Stayed
	}
	for i := range scores {
		switch {
		case stays && i == r.Owner:
			scores[i] = 0
			continue
		case r.Left != Stayed:
			scores[i] = 1 + share(r.Costs[i].FirstToken())
		default:
			scores[i] = 1 + line(r.Candidates[i].Draw)
		}
		if s.left(r, i, full, soonest, limit) != Stayed {
			scores[i]++
		}
	}
}

// left says why a candidate is not to be kept to.
func (s *session) left(r *Round, i int, full, soonest, limit float64) Left {
	c, ms := &r.Candidates[i], r.Costs[i].FirstToken()
	switch {
	case c.Load.KVUsage >= full:
		return Full
	case ms-soonest > s.gap && ms > s.ratio*soonest:
		return Slow
	case c.Load.Requests+1 > limit:
		return Crowded
	}
	return Stayed
}

// bound is how many requests a member may have with this one: factor x the
// mean, or margin above it. A factor alone measures noise where the mean is
// small. With a margin of at least one, somebody always is within it.
func bound(list []Candidate, factor, margin float64) float64 {
	total := 1.0
	for i := range list {
		total += list[i].Load.Requests
	}
	mean := total / float64(len(list))
	return max(factor*mean, mean+margin)
}

// line is the place in line of a draw, from 0 to 1, the highest first.
func line(draw uint64) float64 { return 1 - float64(draw>>11)/(1<<53) }

// share maps times from 0 on to 0 to 1, in the same order.
func share(ms float64) float64 { return ms / (ms + 1000) }
