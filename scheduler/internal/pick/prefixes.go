package pick

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// SharedPrefix is a beginning that prompts share, and who holds the whole of it,
// by name.
type SharedPrefix struct {
	books.Prefix
	Holders []PrefixHolder
}

// PrefixHolder is a member that is credited with a prefix, and where it lies.
type PrefixHolder struct {
	Member *fleet.Member
	Cached Cached
}

// Prefixes that prompts of a model share, or of all models where it is empty: at most
// so many, the most valuable first.
func (p *Picker) Prefixes(model string, most int, now time.Time) []SharedPrefix {
	found := p.books.Prefixes(model, most)
	list := make([]SharedPrefix, len(found))
	view := p.fleet.View()
	var held index.Answer
	for i, prefix := range found {
		list[i].Prefix = prefix
		depths := make(map[fleet.ID]*[index.Lanes]int)
		p.index.Match(prefix.Keys, &held)
		for m, depth := range held.All() {
			of := depths[fleet.ID(m.Member())]
			if of == nil {
				of = new([index.Lanes]int)
				depths[fleet.ID(m.Member())] = of
			}
			for l := range of {
				if m.On(index.Lane(l)) {
					of[l] = int(depth)
				}
			}
		}
		for id, depth := range depths {
			member := view.Member(id)
			gpu := depth[index.LaneGPU]
			host := max(gpu, depth[index.LaneHost])
			disk := max(host, depth[index.LaneDisk])
			if disk < len(prefix.Keys) || member == nil || view.Believe(member, now).Credit != fleet.Credited {
				continue
			}
			size := prefix.BlockSize
			list[i].Holders = append(list[i].Holders, PrefixHolder{member, Cached{GPU: gpu * size, Host: (host - gpu) * size, Disk: (disk - host) * size}})
		}
		slices.SortFunc(list[i].Holders, func(a, b PrefixHolder) int { return cmp.Compare(a.Member.Info.Name, b.Member.Info.Name) })
	}
	return list
}
