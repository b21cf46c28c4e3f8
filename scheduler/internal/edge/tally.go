package edge

import (
	"iter"
	"sync/atomic"
)

// Outcome of a request.
type Outcome uint8

const (
	// Forwarded: it was sent where it was picked for, whatever the engine answers.
	Forwarded Outcome = iota
	// Refused by an answer of our own.
	Refused
	// Abandoned by the client, or answered by the data plane, before that.
	Abandoned
	// Broken: the data plane did not keep to the protocol, or the engine's answer
	// broke off.
	Broken
	outcomes
)

func (o Outcome) String() string {
	return [...]string{"forwarded", "refused", "abandoned", "broken"}[o]
}

// Stats of a server.
type Stats struct {
	// Open requests, and the Bytes of bodies that have not gone on yet.
	Open, Bytes int64
	ended       [outcomes]uint64
}

// Ended requests by their outcome, each of which comes once.
func (s Stats) Ended() iter.Seq2[Outcome, uint64] {
	return func(yield func(Outcome, uint64) bool) {
		for o, n := range s.ended {
			if !yield(Outcome(o), n) {
				return
			}
		}
	}
}

// Tally is what a server of requests counts.
type Tally struct {
	Bodies Budget
	Open   atomic.Int64
	ended  [outcomes]atomic.Uint64
}

// End counts a request that has ended.
func (t *Tally) End(o Outcome) { t.ended[o].Add(1) }

// Stats returns the counts.
func (t *Tally) Stats() Stats {
	st := Stats{Open: t.Open.Load(), Bytes: t.Bodies.Held()}
	for o := range outcomes {
		st.ended[o] = t.ended[o].Load()
	}
	return st
}
