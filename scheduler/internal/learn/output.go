package learn

import (
	"math/bits"
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
// both rounded in log2. The zero value knows nothing. It has no lock.
type Outputs struct {
	groups map[group]*lengths
}

type group struct{ model, tenant string }

// lengths are the histograms of one group by slot of time.
type lengths struct {
	first int64 // slot number of the newest entry of ring
	ring  [slots]map[pair]uint32
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
		l = &lengths{first: number(now)}
		o.groups[g] = l
	}
	l.turn(number(now))
	at := &l.ring[l.first%slots]
	if *at == nil {
		*at = make(map[pair]uint32)
	}
	(*at)[pair{class(prompt), class(output)}]++
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

// Predict draws a length of the output for a prompt: 2^k with the frequency
// that it had lately, of the tenant's requests, else of all the model's.
// random decides, so that a request whose number is kept has one prediction.
// It returns 0 where too little is known.
func (o *Outputs) Predict(model, tenant string, prompt int, random uint64, now time.Time) int {
	if len(o.groups) == 0 {
		return 0
	}
	if tenant != "" {
		if n := o.groups[group{model, tenant}].draw(class(prompt), random, now); n > 0 {
			return n
		}
	}
	return o.groups[group{model, ""}].draw(class(prompt), random, now)
}

func (l *lengths) draw(prompt uint8, random uint64, now time.Time) int {
	if l == nil {
		return 0
	}
	var counts [classes]uint64
	total := uint64(0)
	oldest := number(now) - slots + 1
	for i := range l.ring {
		// ring[first] is the newest, and the one after it the oldest.
		if age := (l.first - int64(i)%slots + slots) % slots; l.first-age < oldest {
			continue
		}
		for p, n := range l.ring[i] {
			if p.prompt == prompt {
				counts[p.output] += uint64(n)
				total += uint64(n)
			}
		}
	}
	if total < few {
		return 0
	}
	random %= total
	for k, n := range counts {
		if random < n {
			return 1 << k
		}
		random -= n
	}
	return 0
}

// turn empties the slots between the newest entry and now.
func (l *lengths) turn(now int64) {
	for ; l.first < now && now-l.first < slots; l.first++ {
		clear(l.ring[(l.first+1)%slots])
	}
	if l.first < now {
		l.ring, l.first = [slots]map[pair]uint32{}, now
	}
}

func number(now time.Time) int64 { return now.UnixNano() / int64(slot) }

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
