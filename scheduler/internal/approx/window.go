package approx

import (
	"slices"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// countLocked takes a prompt into the window.
func (x *Mirror) countLocked(m *member, deepest int32, p *Prompt, now time.Time) {
	m.prompts++
	h := hit{at: now, node: deepest, member: m, asked: len(p.Keys), cached: min(max(p.Cached, 0), len(p.Keys)), firstTokenMS: p.FirstTokenMS}
	for id := deepest; id != 0; id = x.nodes[id].parent {
		n := &x.nodes[id]
		n.count++
		n.asked += h.asked
		n.hit += h.cached
		x.charge(id)
	}
	x.hits = append(x.hits, h)
	for len(x.hits)-x.first > maxHits {
		x.leaveLocked()
	}
}

// Expire lets prompts leave the window.
func (x *Mirror) Expire(now time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.expireLocked(now)
}

func (x *Mirror) expireLocked(now time.Time) {
	for x.first < len(x.hits) && now.Sub(x.hits[x.first].at) >= Window {
		x.leaveLocked()
	}
}

// leaveLocked takes the oldest prompt out of the window.
func (x *Mirror) leaveLocked() {
	h := x.hits[x.first]
	x.hits[x.first] = hit{} // it may be the last to know its member
	h.member.prompts--
	if x.first++; x.first > len(x.hits)/2 {
		x.hits = slices.Delete(x.hits, 0, x.first)
		x.first = 0
	}
	for id := h.node; id != 0; {
		n := &x.nodes[id]
		n.count--
		n.asked -= h.asked
		n.hit -= h.cached
		if n.count == 0 {
			n.owners, n.moved = nil, false
		}
		x.charge(id)
		up := n.parent
		if n.count == 0 {
			x.release(id)
		}
		id = up
	}
}

// again is how many of the window's prompts had to compute a node, going by
// how much of them was cached.
func (n *node) again() float64 {
	if n.asked == 0 {
		return 0
	}
	return float64(n.count) * (1 - float64(n.hit)/float64(n.asked))
}

// work is the prefill of blocks [from, to) of a node, so many times.
func (n *node) work(from, to uint32, times float64) learn.Work {
	size := float64(n.size)
	fresh, before := float64(to-from)*size, float64(n.start+from)*size
	return learn.Work{Requests: times, Tokens: times * fresh, Pairs: times * fresh * (before + fresh/2)}
}

// charge lets every member that holds a node bear its share of what is
// computed of it again and again.
func (x *Mirror) charge(id int32) {
	n := &x.nodes[id]
	share := learn.Work{}
	if len(n.places) > 0 && n.count > 0 {
		share = n.work(0, uint32(len(n.keys)), n.again()/float64(len(n.places)))
	}
	if share == n.share {
		return
	}
	for _, i := range n.places {
		m := x.places[i].member
		m.lately = plus(plus(m.lately, n.share, -1), share, 1)
	}
	n.share = share
}

func plus(a, b learn.Work, sign float64) learn.Work {
	a.Requests += sign * b.Requests
	a.Tokens += sign * b.Tokens
	a.Pairs += sign * b.Pairs
	return a
}

// History is what a member was sent lately, see learn.Work.
type History struct {
	// Lately is what may have to be computed again of what the member holds,
	// Victims that of the blocks that would have to leave.
	Lately, Victims learn.Work
}

// Owners of the prefix that most of a prompt consists of, if it was moved or
// copied: moved: it belongs to them alone.
func (x *Mirror) Owners(keys []blockkey.Key, dst []index.Member) (owners []index.Member, moved bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	deepest, at := int32(0), 0
	for at < len(keys) {
		n := x.heads[keys[at]]
		if n == 0 || x.nodes[n].parent != deepest || x.nodes[n].start != uint32(at) {
			break
		}
		deepest = n
		same := common(x.nodes[n].keys, keys[at:])
		if at += same; same < len(x.nodes[n].keys) {
			break
		}
	}
	if 2*at <= len(keys) {
		return dst, false
	}
	n := &x.nodes[deepest]
	return append(dst, n.owners...), n.moved
}

// Histories calls each with the history of every member that is followed;
// blocks(member) tells how many it would have to take in. Neither may call the
// Mirror. Prompts leave the window by Add and Expire alone.
func (x *Mirror) Histories(blocks func(index.Member) int, each func(index.Member, History)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for id, m := range x.members {
		h := History{Lately: positive(m.lately)}
		need := m.held + blocks(id) - x.shareOf(m)
		for i := m.oldest; i != 0 && need > 0; i = x.places[i].prev {
			p := &x.places[i]
			n := &x.nodes[p.node]
			out := uint32(min(need, int(p.cut)))
			need -= int(out)
			if n.count > 0 {
				h.Victims = plus(h.Victims, n.work(p.cut-out, p.cut, n.again()), 1)
			}
		}
		each(id, h)
	}
}

// positive is without what rounding may leave below zero.
func positive(w learn.Work) learn.Work {
	return learn.Work{Requests: max(w.Requests, 0), Tokens: max(w.Tokens, 0), Pairs: max(w.Pairs, 0)}
}
