package learn

import (
	"math/bits"
	"sync/atomic"
	"time"
)

const (
	// slot and slots: what is predicted stands on the last four minutes, which
	// leave ten seconds at a time.
	slot  = 10 * time.Second
	slots = 24
	// classes of lengths: class k holds those that round to 2^k.
	classes = 24
	// maxGroups of a model and a tenant that are remembered.
	maxGroups = 1024
	// few lengths say nothing.
	few = 5
)

// Outputs learns how long outputs are, from the requests that ended: for each
// model and tenant a histogram of output lengths for each length of prompt,
// both rounded in log2. The zero value knows nothing. Observe and Publish have
// one caller at a time; Predict may run beside them, and goes by what was
// published last.
type Outputs struct {
	origin    time.Time // of the slots; when the first request was observed
	groups    map[group]*lengths
	changed   bool // since the last Publish, not counting what has aged
	published atomic.Pointer[map[group]*histogram]
}

type group struct{ model, tenant string }

// histogram of one group: how often which class of output came of which class
// of prompt. It is never changed.
type histogram [classes][classes]uint32

// lengths are the histograms of one group by slot of time, and their sum.
type lengths struct {
	first int64 // slot number of the newest entry of ring
	ring  [slots]map[pair]uint32
	sum   histogram
	known *histogram // sum as published; nil: it has changed since
}

// pair of classes.
type pair struct{ prompt, output uint8 }

// Observe takes the lengths of a request that ended. Lengths that cannot be
// teach nothing.
func (o *Outputs) Observe(model, tenant string, prompt, output int, now time.Time) {
	if prompt < 0 || output <= 0 || output >= 1<<classes {
		return
	}
	if o.groups == nil {
		o.groups = make(map[group]*lengths)
		// Slots begin at round times, but differences alone number them: they
		// stay in order where a clock is set back that times have besides.
		o.origin = now.Add(-time.Duration(now.UnixNano() % int64(slot)))
	}
	o.add(group{model, ""}, prompt, output, now)
	if tenant != "" {
		o.add(group{model, tenant}, prompt, output, now)
	}
}

func (o *Outputs) add(g group, prompt, output int, now time.Time) {
	l, ok := o.groups[g]
	if !ok {
		if len(o.groups) >= maxGroups {
			o.forget()
		}
		l = &lengths{first: o.number(now)}
		o.groups[g] = l
	}
	l.turn(o.number(now))
	at := &l.ring[l.first%slots]
	if *at == nil {
		*at = make(map[pair]uint32)
	}
	p := pair{class(prompt), class(output)}
	(*at)[p]++
	l.sum[p.prompt][p.output]++
	l.known, o.changed = nil, true
}

// forget drops the group that was silent for longest.
func (o *Outputs) forget() {
	var oldest group
	first := int64(1<<63 - 1)
	for g, l := range o.groups {
		if l.first < first || l.first == first && (g.model+"\x00"+g.tenant < oldest.model+"\x00"+oldest.tenant) {
			oldest, first = g, l.first
		}
	}
	delete(o.groups, oldest)
}

// Publish lets Predict know what was observed, and forget what is too old.
func (o *Outputs) Publish(now time.Time) {
	for g, l := range o.groups {
		l.turn(o.number(now))
		if l.sum == (histogram{}) {
			delete(o.groups, g)
			o.changed = true
		}
		o.changed = o.changed || l.known == nil
	}
	if !o.changed {
		return
	}
	o.changed = false
	table := make(map[group]*histogram, len(o.groups))
	for g, l := range o.groups {
		if l.known == nil {
			known := l.sum
			l.known = &known
		}
		table[g] = l.known
	}
	o.published.Store(&table)
}

// Predict draws a length of the output for a prompt: 2^k with the frequency
// that it had lately, of the tenant's requests, else of all the model's.
// random decides, so that a request whose number is kept has one prediction.
// It returns 0 where too little is known. It takes no lock.
func (o *Outputs) Predict(model, tenant string, prompt int, random uint64) int {
	table := o.published.Load()
	if table == nil {
		return 0
	}
	if tenant != "" {
		if n := (*table)[group{model, tenant}].draw(class(prompt), random); n > 0 {
			return n
		}
	}
	return (*table)[group{model, ""}].draw(class(prompt), random)
}

func (h *histogram) draw(prompt uint8, random uint64) int {
	if h == nil {
		return 0
	}
	counts, total := &h[prompt], uint64(0)
	for _, n := range counts {
		total += uint64(n)
	}
	if total < few {
		return 0
	}
	random %= total
	for k, n := range counts {
		if random < uint64(n) {
			return 1 << k
		}
		random -= uint64(n)
	}
	return 0
}

// turn moves the newest slot to now, and takes out what leaves.
func (l *lengths) turn(now int64) {
	for ; l.first < now && l.sum != (histogram{}); l.first++ {
		left := l.ring[(l.first+1)%slots]
		for p, n := range left {
			l.sum[p.prompt][p.output] -= n
			l.known = nil
		}
		clear(left)
	}
	l.first = max(l.first, now)
}

// number of the slot of a time.
func (o *Outputs) number(now time.Time) int64 { return int64(max(0, now.Sub(o.origin)) / slot) }

// class is log2 of a length, rounded; 0 and 1 are one class.
func class(n int) uint8 {
	if n <= 1 {
		return 0
	}
	k := bits.Len(uint(n)) - 1
	// n is nearer to 2^(k+1) from sqrt(2)*2^k on.
	if float64(n) >= 1.41421356237*float64(uint(1)<<k) {
		k++
	}
	return uint8(min(k, classes-1))
}
