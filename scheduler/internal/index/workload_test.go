package index

import (
	"fmt"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// The workloads W1 to W7 and their constants are described in docs/INDEX.md.

// subject is what the workloads run on: an Index, or the naive map.
type subject interface {
	Store(m Member, l Lane, before []blockkey.Key, position uint32, keys []blockkey.Key)
	Remove(m Member, l Lane, before []blockkey.Key, position uint32, keys []blockkey.Key)
	Forget(m Member)
	Match(keys []blockkey.Key, a *Answer)
}

var subjects = []struct {
	suffix string
	make   func() subject
}{
	{"", func() subject { return New(Config{}) }},
	{"/naive", func() subject { return newNaive() }},
}

func mix(x uint64) uint64 {
	z := x + 0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// content is the key of block p of chain c.
func content(c, p uint64) blockkey.Key { return blockkey.Key(mix(mix(c+1) + p)) }

// draw is a sequence of random numbers.
type draw uint64

func (d *draw) next() uint64 {
	v := mix(uint64(*d))
	*d += 0x9E3779B97F4A7C15
	return v
}

const (
	w1Chains = 1953
	w1Length = 512
)

func w1Holder(c uint64, j int) Member {
	return Member((mix(0x5EED+c)%128 + 37*uint64(j)) % 128)
}

func contents(c uint64, n int) []blockkey.Key {
	keys := make([]blockkey.Key, n)
	for p := range keys {
		keys[p] = content(c, uint64(p))
	}
	return keys
}

// staggered fills x with chains that 8 members hold to 1/8, 2/8 ... of their
// length, in events of length/8 blocks. It is the state of W1 for 1,953
// chains of 512.
func staggered(x subject, chains, length int) [][]blockkey.Key {
	all := make([][]blockkey.Key, chains)
	for c := range all {
		all[c] = contents(uint64(c), length)
	}
	event := length / 8
	for k := range 8 {
		for c, keys := range all {
			j := (3*k + c) % 8
			for e := range j + 1 {
				storeEvent(x, w1Holder(uint64(c), j), keys, e*event, event)
			}
		}
	}
	return all
}

// storeEvent stores n blocks of a chain from position on.
func storeEvent(x subject, m Member, keys []blockkey.Key, position, n int) {
	x.Store(m, LaneGPU, blockkey.Before(keys, position), uint32(position), keys[position:position+n])
}

// held stores a chain in events of 64 blocks.
func held(x subject, m Member, keys []blockkey.Key) {
	for at := 0; at < len(keys); at += 64 {
		storeEvent(x, m, keys, at, min(64, len(keys)-at))
	}
}

// checkStaggered is W1's check of one answer.
func checkStaggered(a *Answer, length int) error {
	n, sum := 0, 0
	for _, depth := range a.All() {
		n++
		sum += int(depth)
	}
	if n != 8 || sum != length/8*36 {
		return fmt.Errorf("%d members, %d blocks: %v", n, sum, a)
	}
	return nil
}

// depths is an answer by member.
type depths map[Member][Lanes]uint32

func depthsOf(a *Answer) depths {
	out := make(depths)
	for h, depth := range a.All() {
		d := out[h.Member()]
		for l := range Lane(Lanes) {
			if h.On(l) {
				if d[l] != 0 {
					panic(fmt.Sprintf("member %d twice on lane %d", h.Member(), l))
				}
				d[l] = depth
			}
		}
		out[h.Member()] = d
	}
	return out
}

func ask(x subject, keys []blockkey.Key) depths {
	var a Answer
	x.Match(keys, &a)
	return depthsOf(&a)
}

// holes takes 2 % of the blocks out of W1's state, one event each, and
// returns the depths that are left, by chain and holder.
func holes(x subject, chains [][]blockkey.Key) [][8]uint32 {
	left := make([][8]uint32, len(chains))
	for c := range chains {
		for j := range 8 {
			left[c][j] = uint32(64 * (j + 1))
			for p := range uint64(64 * (j + 1)) {
				if mix(8192*uint64(c)+1024*uint64(j)+p)%50 == 0 {
					x.Remove(w1Holder(uint64(c), j), LaneGPU, blockkey.Before(chains[c], int(p)), uint32(p), chains[c][p:p+1])
					left[c][j] = min(left[c][j], uint32(p))
				}
			}
		}
	}
	return left
}
