package cli

import (
	"context"
	"flag"
	"fmt"
	"strings"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler/internal/chronicle"
)

// mostPrefixes that a scheduler follows.
const mostPrefixes = 64

var prefixes = command{
	name: "prefixes", does: "the beginnings that prompts share, the most valuable first, and who holds them",
	more: `
A prefix is named by the key of its last block. Its value is the tokens that need
not have been computed again: its length times the prompts that began with it.

  kvscout prefixes -model MODEL -max 10

`,
	bind: func(fs *flag.FlagSet) func(context.Context, *session) error {
		model := fs.String("model", "", "`name` of the model or adapter, as requests have it, whose prefixes are shown; empty: all")
		most := fs.Uint("max", 20, "`number` of prefixes, 64 at most")
		return func(ctx context.Context, s *session) error {
			if *most == 0 || *most > mostPrefixes {
				return wrongFlag(settings.Wrong(fs, "max", "%d: want 1 to %d", *most, mostPrefixes))
			}
			ctx, cancel := s.bounded(ctx)
			defer cancel()
			found, err := s.admin.ListPrefixes(ctx, &api.ListPrefixesRequest{Model: *model, MaxPrefixes: uint32(*most)})
			if err != nil {
				return err
			}
			if s.output == "json" {
				return s.json(found)
			}
			if len(found.GetPrefixes()) == 0 {
				fmt.Fprintf(s.Err, "no shared prefixes%s: no two prompts went on differently behind an equal beginning that was seen before\n", ofModel(*model))
				return nil
			}
			t := prefixTable(found)
			return t.write(s.Out, s.width(), s.colours)
		}
	},
}

func prefixTable(found *api.ListPrefixesResponse) *table {
	t := &table{columns: []column{
		{title: "PREFIX"},
		{title: "MODEL", least: 8, spare: 3},
		{title: "TOKENS", right: true},
		{title: "HITS", right: true},
		{title: "PARTED", right: true, spare: 4},
		{title: "VALUE", right: true, spare: 2},
		{title: "USED", right: true, spare: 1},
		{title: "HOLDERS", right: true},
		{title: "MEMBERS", least: 12},
	}}
	for _, p := range found.GetPrefixes() {
		holders := text(fmt.Sprint(p.GetHolderCount()))
		if p.GetHolderCount() == 0 {
			holders.colour = yellow
		}
		t.rows = append(t.rows, []cell{
			text(fmt.Sprintf("%016x", p.GetKey())), text(p.GetModel()), text(fmt.Sprint(p.GetTokens())), text(fmt.Sprint(p.GetHits())),
			text(fmt.Sprint(p.GetParted())), text(fmt.Sprint(uint64(p.GetTokens()) * uint64(p.GetHits()))), text(chronicle.Age(p.GetUsedAgeMs())), holders, text(holderNames(p)),
		})
	}
	return t
}

// holderNames are the members that hold a prefix, each with the tier that the
// last of it lies in where that is not the GPU.
func holderNames(p *api.Prefix) string {
	var names []string
	for _, h := range p.GetHolders() {
		name := h.GetMember().GetPod()
		if h.GetMember().GetRank() > 0 {
			name = fmt.Sprintf("%s/%d", name, h.GetMember().GetRank())
		}
		switch c := h.GetCachedTokens(); {
		case c.GetDisk() > 0:
			name += " (disk)"
		case c.GetHost() > 0:
			name += " (host)"
		}
		names = append(names, name)
	}
	if more := int(p.GetHolderCount()) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}
