package approx

import (
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

const (
	// settled is how many prompts of the window a member must have had, on
	// average, before anything is moved.
	settled = 50
	// uneven is the ratio of the dearest member to the cheapest from which on
	// pieces are moved, hotter that of the times to the first token in the two
	// halves of the window from which on a piece is copied.
	uneven, hotter = 1.5, 2
	// maxOwners of a piece that is copied, the first one apart.
	maxOwners = 2
)

// Balance evens out what members of one kind were sent lately: it gives pieces
// of the dearest to the cheapest until that turns the order, the cheapest such
// piece first, and only those that are longer than what lies before them and
// that more than one prompt wanted. Where nothing can be moved because one
// piece is all the heat, and prompts wait ever longer for it, it is copied.
// Nothing is sent: the next prompts with that prefix go there.
func (x *Mirror) Balance(members []index.Member, curves []learn.Curve, now time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.expireLocked(now)
	prompts := 0
	costs := make([]float64, len(members))
	for i, id := range members {
		if m := x.members[id]; m != nil {
			prompts += m.prompts
			costs[i] = curves[i].Time(positive(m.lately))
		}
	}
	if len(members) < 2 || prompts < settled*len(members) {
		return
	}
	for {
		high, low := 0, 0
		for i := range costs {
			if costs[i] > costs[high] {
				high = i
			}
			if costs[i] < costs[low] {
				low = i
			}
		}
		m := x.members[members[high]]
		if m == nil || costs[high] <= 0 || costs[high] < uneven*costs[low] {
			return
		}
		best, cheapest, hottest, most := int32(0), 0.0, int32(0), 0.0
		for id := range m.at {
			n := &x.nodes[id]
			if n.count < 2 || len(n.keys) <= int(n.start) || slices.Contains(n.owners, members[low]) {
				continue
			}
			c := curves[high].Time(n.share)
			if c <= 0 {
				continue
			}
			if n.owners == nil && (best == 0 || c < cheapest || c == cheapest && id < best) {
				best, cheapest = id, c
			}
			if c > most || c == most && id < hottest {
				hottest, most = id, c
			}
		}
		if best != 0 {
			gain := curves[low].Time(x.nodes[best].share)
			if costs[high]-cheapest >= costs[low]+gain {
				n := &x.nodes[best]
				n.owners, n.moved = []index.Member{members[low]}, true
				costs[high] -= cheapest
				costs[low] += gain
				x.stats.Moved++
				continue
			}
		}
		if n := &x.nodes[hottest]; hottest != 0 && !n.moved && len(n.owners) < maxOwners && x.heats(hottest, now) {
			n.owners = append(n.owners, members[low])
			x.stats.Copied++
		}
		return
	}
}

// heats tells whether prompts through a node waited much longer for their first
// token in the second half of the window than in the first.
func (x *Mirror) heats(id int32, now time.Time) bool {
	var sum, count [2]float64
	middle := now.Add(-Window / 2)
	for _, h := range x.hits[x.first:] {
		through := h.node
		for through != 0 && through != id {
			through = x.nodes[through].parent
		}
		if through == 0 {
			continue
		}
		half := 0
		if h.at.After(middle) {
			half = 1
		}
		sum[half] += h.firstTokenMS
		count[half]++
	}
	return count[0] > 0 && count[1] > 0 && sum[1]/count[1] >= hotter*sum[0]/count[0]
}
