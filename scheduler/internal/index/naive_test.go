package index

import (
	"sort"
	"sync"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// naive is the model of an Index: a map from key to holders under a lock.
type naive struct {
	mu      sync.RWMutex
	holders map[blockkey.Key][]uint16 // member*Lanes + lane
	count   [4096 * Lanes]int
	depths  sync.Pool
}

type naiveScratch struct {
	depth [4096 * Lanes]uint32
	place [4096]int
}

func newNaive() *naive {
	return &naive{
		holders: make(map[blockkey.Key][]uint16),
		depths:  sync.Pool{New: func() any { return new(naiveScratch) }},
	}
}

func (n *naive) Store(m Member, l Lane, _ []blockkey.Key, _ uint32, keys []blockkey.Key) {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := uint16(m)*Lanes + uint16(l)
next:
	for _, k := range keys {
		for _, o := range n.holders[k] {
			if o == h {
				continue next
			}
		}
		n.holders[k] = append(n.holders[k], h)
		n.count[h]++
	}
}

func (n *naive) Remove(m Member, l Lane, _ []blockkey.Key, _ uint32, keys []blockkey.Key) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, k := range keys {
		n.remove(k, uint16(m)*Lanes+uint16(l))
	}
}

func (n *naive) remove(k blockkey.Key, h uint16) {
	hs := n.holders[k]
	for i, o := range hs {
		if o != h {
			continue
		}
		n.count[h]--
		hs[i] = hs[len(hs)-1]
		if hs = hs[:len(hs)-1]; len(hs) == 0 {
			delete(n.holders, k)
		} else {
			n.holders[k] = hs
		}
		return
	}
}

func (n *naive) Forget(m Member) {
	for l := range Lane(Lanes) {
		n.ForgetLane(m, l)
	}
}

func (n *naive) ForgetLane(m Member, l Lane) {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := uint16(m)*Lanes + uint16(l)
	if n.count[h] == 0 {
		return
	}
	for k := range n.holders {
		n.remove(k, h)
	}
}

func (n *naive) Match(keys []blockkey.Key, dst []Depths) []Depths {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if len(keys) == 0 {
		return dst
	}
	depths := n.depths.Get().(*naiveScratch)
	first := n.holders[keys[0]]
	for _, h := range first {
		depths.depth[h] = 1
	}
	for i := 1; i < len(keys); i++ {
		alive := false
		for _, h := range n.holders[keys[i]] {
			if depths.depth[h] == uint32(i) {
				depths.depth[h]++
				alive = true
			}
		}
		if !alive {
			break
		}
	}
	base := len(dst)
	for _, h := range first {
		m := h / Lanes
		p := depths.place[m]
		if p == 0 {
			dst = append(dst, Depths{Member: Member(m)})
			p = len(dst) - base
			depths.place[m] = p
		}
		dst[base+p-1].Depth[h%Lanes] = depths.depth[h]
		depths.depth[h] = 0
	}
	for _, h := range first {
		depths.place[h/Lanes] = 0
	}
	n.depths.Put(depths)
	return dst
}

func (n *naive) Count(m Member, l Lane) int {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.count[uint16(m)*Lanes+uint16(l)]
}

func sorted(d []Depths) []Depths {
	sort.Slice(d, func(i, j int) bool { return d[i].Member < d[j].Member })
	return d
}
