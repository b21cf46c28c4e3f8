package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

const (
	// calm is the load between two faults.
	calm = 60 * time.Millisecond
	// probe is the time between two looks of an agent at its engine's metrics.
	probe = time.Second
	// step is the time in which everybody must be in step again. Who is not
	// says so and is credited with nothing, but that is no state to stay in: a
	// lost answer to a snapshot request costs 3 s.
	step = 5 * time.Second
	// hopeless bounds the wait for the truth: then the run ends.
	hopeless = 15 * time.Second
)

// lie is how long answers were wrong and called themselves EXACT without a break.
type lie struct {
	since   time.Time
	longest time.Duration
	note    string
}

func (l *lie) see(v verdict, now time.Time) {
	if v.exact == 0 {
		l.since = time.Time{}
		return
	}
	if l.since.IsZero() {
		l.since = now
	}
	if d := now.Sub(l.since); d >= l.longest {
		l.longest, l.note = d, v.note
	}
}

func (l *lie) end() { l.since = time.Time{} }

// sequence is where all faults come from.
func (f *fleet) sequence() *rand.Rand { return rand.New(rand.NewPCG(f.o.seed, 2)) }

// draw takes the next fault from the seed's sequence.
func (f *fleet) draw(r *rand.Rand, list []*fault) *strike {
	s := &strike{f: f, fault: list[r.IntN(len(list))], r: rand.New(rand.NewPCG(r.Uint64(), r.Uint64()))}
	who := r.IntN(1 << 20)
	if s.fault.fits == nil {
		return s
	}
	var able []*member
	for _, m := range f.members {
		if s.fault.fits(m) {
			able = append(able, m)
		}
	}
	s.m = able[who%len(able)]
	return s
}

// possible are the faults that some member of the fleet can have.
func (f *fleet) possible() (list []*fault) {
	for i := range faults {
		k := &faults[i]
		chosen := f.o.only == ""
		for word := range strings.SplitSeq(f.o.only, ",") {
			chosen = chosen || word != "" && strings.Contains(k.name, word)
		}
		if chosen && (k.fits == nil || slices.ContainsFunc(f.members, k.fits)) {
			list = append(list, k)
		}
	}
	return list
}

// play lets one fault follow the other.
func (f *fleet) play(rep *report) error {
	list := f.possible()
	if len(list) == 0 {
		return fmt.Errorf("-only %q names no fault", f.o.only)
	}
	r := f.sequence()
	rep.begin(f)
	defer rep.end(f)
	for n := range f.o.faults {
		pause(f.ctx, calm)
		s := f.draw(r, list)
		got, err := f.strike(s)
		if f.ctx.Err() != nil {
			return f.ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("fault %d, %s: %w", n+1, s, err)
		}
		rep.add(n, s, got)
		if !got.ended {
			return nil // the rest would say nothing more
		}
		if err := f.stage.Err(); err != nil {
			return err
		}
	}
	return nil
}

func (s *strike) String() string {
	if s.m == nil {
		return s.fault.name
	}
	return s.fault.name + " (" + s.m.name + ")"
}

// result is what became of a fault.
type result struct {
	truth time.Duration // from the fault's end to the truth
	limit time.Duration
	lie   time.Duration // the longest wrong answer that called itself EXACT
	wrong int           // answers that were wrong when the limit was over
	late  bool          // not everybody was in step in good time
	ended bool          // it came to the truth at all
	note  string
}

func (g result) bad() bool { return g.wrong > 0 || g.late || !g.ended }

// strike does the fault and then looks until everything is true.
func (f *fleet) strike(s *strike) (result, error) {
	limit := within
	if s.fault.silence || s.fault.verified {
		limit += f.o.heartbeat + settling
	}
	if s.fault.probed {
		limit += probe + settling
	}
	g := result{limit: f.o.limit(limit)}
	if err := s.fault.do(s); err != nil {
		return g, err
	}
	ended := time.Now()
	f.load.pause()
	defer f.load.resume()
	ctx, cancel := context.WithTimeout(f.ctx, f.o.limit(hopeless))
	defer cancel()
	for {
		at := time.Now()
		v, err := f.look(ctx)
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			return g, err
		}
		s.lie.see(v, time.Now())
		g.truth = time.Since(ended)
		if v.good() {
			g.ended = true
			break
		}
		g.note = v.note
		if at.Sub(ended) > g.limit {
			g.wrong = max(g.wrong, v.believed+v.exact)
		}
		pause(ctx, 5*time.Millisecond)
	}
	g.late = g.truth > f.o.limit(step)
	g.lie = s.lie.longest
	return g, nil
}
