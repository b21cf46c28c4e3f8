package books

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// MaxPrefixes are followed at a time, with all of their keys.
const MaxPrefixes = 64

// Prefix is a beginning that prompts share. Its length is short of where they part by
// 1/16 at most.
type Prefix struct {
	// Model as the request named it that made it known.
	Model string
	// Keys of its blocks; not to be changed.
	Keys      []blockkey.Key
	BlockSize int
	// Hits are the prompts that began with it and were not the first, Parted those
	// of them that had no more in common with any prompt before. LastUsed is when one
	// was placed last.
	Hits, Parted uint32
	LastUsed     time.Time
}

// Tokens of the prefix.
func (p *Prefix) Tokens() int { return len(p.Keys) * p.BlockSize }

// Value is the tokens that need not have been computed again.
func (p *Prefix) Value() uint64 { return uint64(p.Hits) * uint64(p.Tokens()) }

// prefixes are the most valuable of those at which prompts parted twice.
type prefixes struct {
	list  []Prefix
	floor uint64 // the least value is at least this, once the list is full
}

// offer a prefix of n blocks at which a prompt has just parted from those before.
func (f *prefixes) offer(s *seen, e *entry, p *Placement, n int) {
	if e.parted < 2 {
		return
	}
	value := uint64(e.hits) * uint64(n*p.BlockSize)
	if len(f.list) == MaxPrefixes && value <= f.floor {
		return
	}
	for i := range f.list {
		if keys := f.list[i].Keys; keys[len(keys)-1] == e.key {
			return
		}
	}
	found := Prefix{Model: strings.Clone(p.Model), Keys: slices.Clone(p.Keys[:n]), BlockSize: p.BlockSize}
	if len(f.list) < MaxPrefixes {
		f.list = append(f.list, found)
		return
	}
	least := 0
	for i := range f.list {
		s.refresh(&f.list[i])
		if f.list[i].Value() < f.list[least].Value() {
			least = i
		}
	}
	if f.floor = f.list[least].Value(); value > f.floor {
		f.list[least] = found
	}
}

// refresh brings the counts of a prefix up to date; one that was forgotten has
// none.
func (s *seen) refresh(p *Prefix) {
	p.Hits, p.Parted = 0, 0
	key := p.Keys[len(p.Keys)-1]
	bucket := s.bucket(key)
	for i := range bucket {
		if e := &bucket[i]; e.key == key {
			p.Hits, p.Parted = e.hits, e.parted
			p.LastUsed = s.origin.Add(time.Duration(e.last) * tick)
		}
	}
}

// Prefixes of a model, or of all, at most so many, the most valuable first.
func (b *Books) Prefixes(model string, most int) []Prefix {
	b.mu.Lock()
	defer b.mu.Unlock()
	var list []Prefix
	for i := range b.prefixes.list {
		p := &b.prefixes.list[i]
		if b.seen.refresh(p); p.Hits > 0 && (model == "" || p.Model == model) {
			list = append(list, *p)
		}
	}
	slices.SortFunc(list, func(x, y Prefix) int {
		return cmp.Or(cmp.Compare(y.Value(), x.Value()), cmp.Compare(x.Keys[len(x.Keys)-1], y.Keys[len(y.Keys)-1]))
	})
	return list[:min(max(most, 0), len(list))]
}
