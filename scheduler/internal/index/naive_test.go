package index

import (
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

func newNaive() *naive {
	return &naive{
		holders: make(map[blockkey.Key][]uint16),
		depths:  sync.Pool{New: func() any { return new([4096 * Lanes]uint32) }},
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

func (n *naive) Match(keys []blockkey.Key, a *Answer) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	a.reset()
	if len(keys) == 0 {
		return
	}
	depths := n.depths.Get().(*[4096 * Lanes]uint32)
	first := n.holders[keys[0]]
	for _, h := range first {
		depths[h] = 1
	}
	for i := 1; i < len(keys); i++ {
		alive := false
		for _, h := range n.holders[keys[i]] {
			if depths[h] == uint32(i) {
				depths[h]++
				alive = true
			}
		}
		if !alive {
			break
		}
	}
	for _, h := range first {
		a.addOne(uint32(h)/Lanes<<laneBits|1<<(h%Lanes), depths[h])
		depths[h] = 0
	}
	n.depths.Put(depths)
}

func (n *naive) Count(m Member, l Lane) int {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.count[uint16(m)*Lanes+uint16(l)]
}
