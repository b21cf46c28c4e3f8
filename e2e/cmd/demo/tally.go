package main

import (
	"math"
	"slices"
	"sync"
	"time"
)

// tally is what became of one fleet's requests.
type tally struct {
	mu sync.Mutex // guards what follows
	sum
	ttft durations // wall time
}

// sum is the part of a tally that is plain numbers.
type sum struct {
	sent, open       int
	done, failed     int
	unfinished       int // cut off at the end
	prompt, cached   int // tokens of the requests that are done
	predicted, error int // tokens
	lastError        string
}

// empty tells whether nothing was sent yet.
func (t *tally) empty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.sent == 0
}

func (t *tally) begin() {
	t.mu.Lock()
	t.sent++
	t.open++
	t.mu.Unlock()
}

func (t *tally) first(after time.Duration) {
	t.mu.Lock()
	t.ttft = append(t.ttft, after)
	t.mu.Unlock()
}

func (t *tally) finish(r result, predicted int) {
	t.mu.Lock()
	t.open--
	t.done++
	t.prompt += r.prompt
	t.cached += r.cached
	t.predicted += predicted
	t.error += max(predicted-r.cached, r.cached-predicted)
	t.mu.Unlock()
}

func (t *tally) fail(err error) {
	t.mu.Lock()
	t.open--
	t.failed++
	t.lastError = err.Error()
	t.mu.Unlock()
}

// cut counts a request that was still open at the end. Without a first token
// its TTFT is at least what it waited.
func (t *tally) cut(waited time.Duration, started bool) {
	t.mu.Lock()
	t.open--
	t.unfinished++
	if !started {
		t.ttft = append(t.ttft, waited)
	}
	t.mu.Unlock()
}

// quantiles of many durations, and their mean.
type quantiles struct {
	mean, p50, p90, p99 time.Duration
}

// read returns the numbers as they are now.
func (t *tally) read() (sum, quantiles) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.sum, t.ttft.quantiles()
}

// durations in no order.
type durations []time.Duration

func (d durations) quantiles() quantiles {
	sorted := slices.Sorted(slices.Values(d))
	at := func(q float64) time.Duration {
		if len(sorted) == 0 {
			return 0
		}
		return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
	}
	var total time.Duration
	for _, v := range sorted {
		total += v
	}
	return quantiles{total / time.Duration(max(1, len(sorted))), at(.50), at(.90), at(.99)}
}

func (s sum) hitRate() float64 { return share(s.cached, s.prompt) }

func share(part, whole int) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// scaled is the same in another time.
func (q quantiles) scaled(by float64) quantiles {
	f := func(d time.Duration) time.Duration { return time.Duration(float64(d) * by) }
	return quantiles{f(q.mean), f(q.p50), f(q.p90), f(q.p99)}
}
