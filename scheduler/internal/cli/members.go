package cli

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler/internal/chronicle"
)

var members = command{
	name: "members", does: "who is there, how far each cache's state is believed and why not further, and how loaded",
	more: `
  kvscout members -model MODEL -sort load

`,
	bind: func(fs *flag.FlagSet) func(context.Context, *session) error {
		model := modelFlag(fs)
		order := sortFlag(fs)
		return func(ctx context.Context, s *session) error {
			by, err := orderOf(fs, *order)
			if err != nil {
				return err
			}
			fleet, err := s.list(ctx, *model)
			if err != nil {
				return err
			}
			slices.SortStableFunc(fleet.Members, by)
			if s.output == "json" {
				return s.json(fleet)
			}
			if len(fleet.GetMembers()) == 0 {
				fmt.Fprintf(s.Err, "no members%s: kvscout doctor says what to look at\n", ofModel(*model))
				return nil
			}
			t := memberTable(fleet, 0)
			return t.write(s.Out, s.width(), s.colours)
		}
	},
}

func modelFlag(fs *flag.FlagSet) *string {
	return fs.String("model", "", "`name` of the model or adapter whose members are shown; empty: all")
}

func ofModel(name string) string {
	if name == "" {
		return ""
	}
	return fmt.Sprintf(" of model %q", name)
}

// orders of members by what they are called in -sort.
var orders = map[string]func(a, b *api.MemberState) int{
	"id": func(a, b *api.MemberState) int { return cmp.Compare(a.GetMember().GetId(), b.GetMember().GetId()) },
	"load": func(a, b *api.MemberState) int {
		return cmp.Or(cmp.Compare(b.GetWaitingRequests(), a.GetWaitingRequests()), cmp.Compare(b.GetRunningRequests(), a.GetRunningRequests()))
	},
	"kv": func(a, b *api.MemberState) int { return cmp.Compare(b.GetKvUsage(), a.GetKvUsage()) },
	"trust": func(a, b *api.MemberState) int {
		return cmp.Compare(a.GetCacheState().GetTrust(), b.GetCacheState().GetTrust())
	},
}

func sortFlag(fs *flag.FlagSet) *string {
	return fs.String("sort", "id", "`order`: id, load (most first), kv (fullest first) or trust (least first)")
}

func orderOf(fs *flag.FlagSet, name string) (func(a, b *api.MemberState) int, error) {
	if by := orders[name]; by != nil {
		return by, nil
	}
	return nil, wrongFlag(settings.Wrong(fs, "sort", "%q is none of id, load, kv, trust", name))
}

// memberTable shows a fleet that was told so long ago.
func memberTable(fleet *api.ListMembersResponse, ago time.Duration) *table {
	t := &table{columns: []column{
		{title: "MEMBER", least: 12, middle: true},
		{title: "MODEL", least: 8, spare: 3},
		{title: "POOL", spare: 6},
		{title: "ENGINE", spare: 5},
		{title: "AGENT", least: 8, spare: 7},
		{title: "TRUST"},
		{title: "RUN", right: true},
		{title: "WAIT", right: true},
		{title: "KV", right: true},
		{title: "RESERVED", right: true, spare: 2},
		{title: "AGE", right: true, spare: 4},
		{title: "ADDRESS", least: 15, spare: 1},
		{title: "WHY", least: 30},
	}}
	told := false
	for _, m := range fleet.GetMembers() {
		why := chronicle.Reason(m)
		told = told || why != ""
		t.rows = append(t.rows, []cell{
			text(m.GetMember().GetId()), text(strings.Join(m.GetModels(), ",")), text(fleet.GetScheduler().GetPool()),
			text(m.GetEngineVersion()), text(m.GetAgentRelease()), trustCell(m.GetCacheState().GetTrust()),
			text(gauge(m.RunningRequests)), text(gauge(m.WaitingRequests)), usage(m.KvUsage),
			text(fmt.Sprint(m.GetReservedTokens())), text(chronicle.Age(m.GetCacheState().GetAgeMs() + float64(ago.Milliseconds()))),
			text(m.GetMember().GetAddress()), {why, yellow},
		})
	}
	if !told {
		t.columns[len(t.columns)-1].spare = 9
	}
	return t
}

func trustCell(t api.Trust) cell {
	c := red
	switch t {
	case api.Trust_TRUST_EXACT:
		c = green
	case api.Trust_TRUST_APPROXIMATE:
		c = cyan
	case api.Trust_TRUST_SYNCING:
		c = yellow
	}
	return cell{chronicle.Trust(t), c}
}

// gauge is a number that may be unknown.
func gauge(n *uint32) string {
	if n == nil {
		return "?"
	}
	return fmt.Sprint(*n)
}

func usage(part *float64) cell {
	switch {
	case part == nil:
		return text("?")
	case *part >= 0.9:
		return cell{percent(*part), red}
	}
	return text(percent(*part))
}

func percent(part float64) string { return fmt.Sprintf("%.0f%%", 100*part) }
