package index

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// change is one call of a writer.
type change struct {
	forget   bool
	remove   bool
	member   Member
	lane     Lane
	before   []blockkey.Key
	position uint32
	keys     []blockkey.Key
}

// history is a sequence of changes and the true depths between them.
type history struct {
	chains  [][]blockkey.Key
	members int
	changes []change
	depths  [][]depths // by state, by chain
}

// newHistory draws changes by members that keep their lanes closed.
func newHistory(r *rand.Rand, members, steps int) *history {
	h := &history{members: members}
	for c := range 5 {
		var keys []blockkey.Key
		k := blockkey.Key(r.Uint64())
		if c > 0 && r.IntN(3) > 0 {
			from := h.chains[r.IntN(c)]
			if keys = append(keys, from[:r.IntN(len(from))]...); len(keys) > 0 {
				k = keys[len(keys)-1]
			}
		}
		for i := range 1 + r.IntN(200) {
			k = blockkey.Chain(k, uint64(c)<<32+uint64(i))
			keys = append(keys, k)
		}
		h.chains = append(h.chains, keys)
	}
	model := newNaive()
	h.record(model)
	for range steps {
		c := h.chains[r.IntN(len(h.chains))]
		m, l := Member(r.IntN(members)), Lane(r.IntN(2))
		held := ask(model, c)[m][l]
		var ch change
		switch op := r.IntN(20); {
		case op == 0:
			ch = change{forget: true, member: m}
			model.Forget(m)
		case op < 11 && int(held) < len(c):
			to := int(held) + 1 + r.IntN(len(c)-int(held))
			ch = change{member: m, lane: l, before: blockkey.Before(c, int(held)), position: held, keys: c[held:to]}
			model.Store(m, l, nil, 0, ch.keys)
		case held > 0:
			// All that m holds behind the cut goes, on every chain.
			from := r.IntN(int(held))
			gone := c[from:held]
			ch = change{remove: true, member: m, lane: l, before: blockkey.Before(c, from), position: uint32(from), keys: gone}
			model.Remove(m, l, nil, 0, gone)
		default:
			continue
		}
		h.changes = append(h.changes, ch)
		h.record(model)
	}
	return h
}

func (h *history) record(model *naive) {
	state := make([]depths, len(h.chains))
	for i, c := range h.chains {
		state[i] = ask(model, c)
	}
	h.depths = append(h.depths, state)
}

// allowed checks an answer for chain c that was given between the states from
// and to: each block is seen as in one of them.
func (h *history) allowed(c, from, to int, answer *Answer) error {
	seen := depthsOf(answer)
	for m := range Member(h.members) {
		for l := range Lanes {
			low, high := ^uint32(0), uint32(0)
			for s := from; s <= to; s++ {
				d := h.depths[s][c][m][l]
				low, high = min(low, d), max(high, d)
			}
			if d := seen[m][l]; d < low || d > high {
				return fmt.Errorf("chain %d, member %d, lane %d: depth %d, was %d to %d in states %d to %d", c, m, l, d, low, high, from, to)
			}
		}
	}
	return nil
}

func (x *Index) apply(c change) {
	switch {
	case c.forget:
		x.Forget(c.member)
	case c.remove:
		x.Remove(c.member, c.lane, c.before, c.position, c.keys)
	default:
		x.Store(c.member, c.lane, c.before, c.position, c.keys)
	}
}

// TestReadersSeeStatesBesideAWriter holds every answer against the states
// that the index was in while it was given.
func TestReadersSeeStatesBesideAWriter(t *testing.T) {
	rounds, steps := 8, 1000
	if testing.Short() {
		rounds = 3
	}
	for seed := range rounds {
		if err := observe(uint64(seed), []int{1, 3, 8, 40}[seed%4], steps); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func observe(seed uint64, members, steps int) error {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	h := newHistory(rand.New(rand.NewPCG(seed, 1)), members, steps)
	x := New(Config{})
	var begun, ended atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	errs := make(chan error, 2)
	for reader := range 2 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(100+reader)))
			var a Answer
			for !stop.Load() {
				c := r.IntN(len(h.chains))
				from := ended.Load()
				x.Match(h.chains[c], &a)
				to := begun.Load()
				if err := h.allowed(c, int(from), int(to), &a); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	var err error
	for i, c := range h.changes {
		begun.Store(int64(i + 1))
		x.apply(c)
		ended.Store(int64(i + 1))
		if i%8 == 0 {
			runtime.Gosched()
		}
		if len(errs) > 0 {
			break
		}
	}
	stop.Store(true)
	wg.Wait()
	select {
	case err = <-errs:
	default:
	}
	if err == nil {
		err = x.verify()
	}
	for m := range Member(members) {
		x.Forget(m)
	}
	if err == nil {
		err = x.empty()
	}
	return err
}
