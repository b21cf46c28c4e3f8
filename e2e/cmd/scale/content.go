package main

import (
	"errors"
	"fmt"

	"github.com/kvscout/kvscout/agent/synthetic"
	"github.com/kvscout/kvscout/protocol/blockkey"
)

const (
	blockSize = 16
	// trunk is the blocks of a shared chain: what many prompts begin with.
	trunk = 512
	// A request goes on behind a shared chain with so many blocks of its own: its
	// prompt, computed in one batch, and its output, a block every pace batches, which
	// is a token a step.
	prompt, output = 64, 64
	pace           = blockSize
	// every so many batches a member gets another request, so that 32 run at a
	// time: 4 blocks a batch, half of them alone. At 30 batches a second that is
	// 1,920 tokens a second.
	every = pace * output / 32
	// evict is how many blocks of the oldest request a batch takes away.
	evict = (prompt + output) / every
)

// content is what all caches of a fleet hold, as a function of the member and of
// the number of its engine's last batch. Nothing is remembered.
type content struct {
	members int
	own     int // shared chains that one member holds
	chains  int // shared chains in all
	retain  int // batches from a request's first to the eviction of its last block
}

// newContent shares so many blocks out among members: the shared part of them in
// chains that at least holders of them have.
func newContent(members, blocks, holders int, shared float64) (*content, error) {
	f := &content{members: members}
	f.own = int(float64(blocks) * shared / trunk)
	f.chains = members * f.own / max(holders, 1)
	// 4 blocks a batch, less what running requests have yet to store, more what is
	// left of the one that goes.
	f.retain = (blocks - f.own*trunk + 960) / evict
	var errs []error
	if f.own < 1 || f.chains < f.own {
		errs = append(errs, fmt.Errorf("%d members x %d blocks, %g of them shared by %d: not a chain of %d blocks each", members, blocks, shared, holders, trunk))
	}
	if f.retain < every+pace*output {
		errs = append(errs, fmt.Errorf("%d blocks, %g of them shared, have no room for the requests that run", blocks, shared))
	}
	return f, errors.Join(errs...)
}

// first is the batch that a member's engine has published before all else: by
// then its cache is full. Members are not in step.
func (f *content) first(member int) uint64 {
	return uint64(f.retain + 2*every + int(mix(uint64(member))%(pace*output)))
}

// trunkOf is the j-th shared chain of a member. Neighbours have neighbouring chains,
// so each has as many holders as the next.
func (f *content) trunkOf(member, j int) int { return (member*f.own + j) % f.chains }

// shares says whether a member holds a shared chain, which it does for good.
func (f *content) shares(member, chain int) bool {
	behind := (chain - member*f.own) % f.chains
	if behind < 0 {
		behind += f.chains
	}
	return behind < f.own
}

// start is the batch that computes a request's prompt. The outputs of those that
// run grow in different batches.
func start(request int) int { return every*request + request*7%pace }

// length is how many blocks of its own a request has in the cache, so many batches
// after its first.
func (f *content) length(age int) int {
	switch {
	case age < 0:
		return 0
	case age < f.retain:
		return prompt + min(output, age/pace)
	}
	return max(0, prompt+output-evict*(age-f.retain+1))
}

// under is the shared chain that a request of a member goes on behind.
func (f *content) under(member, request int) int {
	return f.trunkOf(member, int(mix(uint64(member)<<32|uint64(request))%uint64(f.own)))
}

// held is how many blocks of a request a member holds after batch n: those of the
// chain before it, and its own.
func (f *content) held(member, owner, request int, n uint64) int {
	if !f.shares(member, f.under(owner, request)) {
		return 0
	}
	if member != owner {
		return trunk
	}
	return trunk + f.length(int(n)-start(request))
}

// requests that have blocks after batch n, or had before it.
func (f *content) requests(n uint64) (from, to int) {
	return max(0, (int(n)-f.retain)/every-3), int(n)/every + 1
}

// cache is the content of one member.
type cache struct {
	*content
	member int
}

func (c cache) Batch(n uint64, runs []synthetic.Run) []synthetic.Run {
	from, to := c.requests(n)
	stores := len(runs)
	for q := from; q < to; q++ {
		age := int(n) - start(q)
		now, before := c.length(age), c.length(age-1)
		switch {
		case now > before:
			runs = append(runs, c.run(q, before, now))
		case now < before:
			gone := c.run(q, now, before)
			gone.Remove = true
			// Requests go in the order in which they came, so removes are found first.
			runs = append(runs, gone)
			last := len(runs) - 1
			runs[stores], runs[last] = runs[last], runs[stores]
			stores++
		}
	}
	return runs
}

func (c cache) All(n uint64, runs []synthetic.Run) []synthetic.Run {
	for j := range c.own {
		runs = append(runs, synthetic.Run{Keys: sharedKeys(c.trunkOf(c.member, j), 0, trunk)})
	}
	from, to := c.requests(n)
	for q := from; q < to; q++ {
		if length := c.length(int(n) - start(q)); length > 0 {
			runs = append(runs, c.run(q, 0, length))
		}
	}
	return runs
}

// run is some of a request's own blocks.
func (c cache) run(request, from, to int) synthetic.Run {
	r := synthetic.Run{Position: uint32(trunk + from), Keys: ownKeys(c.member, request, from, to)}
	if lead := from - blockkey.Lead; lead >= 0 {
		r.Before = ownKeys(c.member, request, lead, from)
	} else {
		r.Before = append(sharedKeys(c.under(c.member, request), trunk+lead, trunk), ownKeys(c.member, request, 0, from)...)
	}
	return r
}

// prompt is what a request of a member asks for: its chain and a tail that nobody
// has, as numbers of the API.
func (f *content) prompt(owner, request, tail int, asked uint64) []uint64 {
	keys := append(sharedKeys(f.under(owner, request), 0, trunk), ownKeys(owner, request, 0, prompt+output)...)
	all := make([]uint64, 0, len(keys)+tail)
	for _, k := range keys {
		all = append(all, uint64(k))
	}
	for i := range tail {
		all = append(all, key(3, asked, i))
	}
	return all
}

func sharedKeys(chain, from, to int) []blockkey.Key { return keys(1, uint64(chain), from, to) }

func ownKeys(member, request, from, to int) []blockkey.Key {
	return keys(2, uint64(member)<<32|uint64(request), from, to)
}

func keys(kind, chain uint64, from, to int) []blockkey.Key {
	all := make([]blockkey.Key, 0, max(0, to-from))
	for p := from; p < to; p++ {
		all = append(all, blockkey.Key(key(kind, chain, p)))
	}
	return all
}

// key of a block; never 0.
func key(kind, chain uint64, position int) uint64 {
	return max(1, mix(mix(chain<<2|kind)+uint64(position)))
}

// mix is the finaliser of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}
