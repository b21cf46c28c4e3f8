package fleet

import (
	"fmt"
	"slices"
)

const (
	// biasWindow is how many requests on a member, the last ones, are looked at.
	// If biased of them found less in the cache than was promised, the promises
	// are wrong in the same way: chance, which takes blocks away between a promise
	// and its request, spares most of them. If no more than unbiased did, it is
	// over.
	biasWindow, biased, unbiased = 32, 30, 24
)

// Bias is how the promises of a member differ from what its engine finds.
type Bias struct {
	// Tokens that are taken off promises: so much, or less, nine of ten of the
	// last requests found less than was promised. 0: nothing is known against
	// them.
	Tokens int
	Reason string // in a few words, when Tokens is not 0
	// Mean is promised minus found in tokens, over the last requests.
	Mean float64

	epoch uint64 // of the engine that it was seen of
}

var unseen Bias

// observed is what the last requests on a member found beside what was promised,
// without its own correction.
type observed struct {
	off    [biasWindow]int // promised minus found, a ring
	number int
}

// observe takes another request, and says what the last ones show. before is what
// they showed without it; another incarnation of the engine starts afresh.
func (o *observed) observe(epoch, promised, found uint64, before *Bias) *Bias {
	if epoch != before.epoch {
		*o, before = observed{}, &unseen
	}
	o.off[o.number%biasWindow] = int(promised) - int(found)
	o.number++
	sorted := o.off
	last := sorted[:min(o.number, biasWindow)]
	slices.Sort(last)
	short, sum := 0, 0
	for _, off := range last {
		if sum += off; off > 0 {
			short++
		}
	}
	after := &Bias{Mean: float64(sum) / float64(len(last)), epoch: epoch}
	if short >= biased || before.Tokens > 0 && short > unbiased {
		after.Tokens = last[len(last)*9/10]
		after.Reason = fmt.Sprintf("%d of the last %d requests found less in the engine's cache than was promised: the promise is less by %d tokens", short, len(last), after.Tokens)
	}
	return after
}
