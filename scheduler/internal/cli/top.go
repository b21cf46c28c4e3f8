package cli

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler/internal/chronicle"
)

// What top says to a terminal: a screen of its own without a cursor, which is
// taken back in the end; the beginning of the screen; the rest of a line, or of
// the screen, is empty.
const (
	enter   = "\x1b[?1049h\x1b[?25l"
	leave   = "\x1b[?25h\x1b[?1049l"
	home    = "\x1b[H"
	endLine = "\x1b[K"
	endPage = "\x1b[J"
)

var top = command{
	name: "top", does: "the members as they are now, on the whole terminal, until Ctrl-C",
	more: `
  kvscout top -sort load

`,
	bind: func(fs *flag.FlagSet) func(context.Context, *session) error {
		model := modelFlag(fs)
		order := sortFlag(fs)
		interval := fs.Duration("interval", time.Second, "`time` between two looks, 100ms at least")
		return func(ctx context.Context, s *session) error {
			by, err := orderOf(fs, *order)
			switch {
			case err != nil:
				return err
			case *interval < 100*time.Millisecond:
				return wrongFlag(settings.Wrong(fs, "interval", "%v is less than 100ms", *interval))
			case s.Size == nil || s.output == "json":
				return misused("top needs a terminal; kvscout members -o json and kvscout watch -o json are for programs")
			}
			return s.top(ctx, *model, by, *interval)
		}
	},
}

// top draws the fleet again and again. It asks each time instead of watching:
// a watch is silent while nothing but ages changes.
func (s *session) top(ctx context.Context, model string, by func(a, b *api.MemberState) int, interval time.Duration) error {
	first, err := s.list(ctx, model)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprint(s.Out, enter); err != nil {
		return err
	}
	defer fmt.Fprint(s.Out, leave)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	p := page{fleet: first, at: time.Now()}
	for {
		slices.SortStableFunc(p.fleet.Members, by)
		width, height := s.Size()
		if _, err := s.Out.Write(p.draw(time.Now(), width, height, s.colours)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		fleet, err := s.list(ctx, model)
		now := time.Now()
		switch {
		case err == nil:
			if decided := fleet.GetDecisions(); decided >= p.fleet.GetDecisions() {
				p.rate = float64(decided-p.fleet.GetDecisions()) / now.Sub(p.at).Seconds()
			}
			p.fleet, p.at, p.lost = fleet, now, ""
		case ctx.Err() != nil:
			return nil
		case !passing(err):
			return err
		default:
			p.lost = status.Convert(err).Message()
		}
	}
}

// page is what top knows.
type page struct {
	fleet *api.ListMembersResponse
	at    time.Time // of the answer
	rate  float64   // of decisions a second
	lost  string    // why there is no newer answer
}

// draw fills a terminal.
func (p *page) draw(now time.Time, width, height int, colours bool) []byte {
	counts := make(map[api.Trust]int)
	var running, waiting uint32
	for _, m := range p.fleet.GetMembers() {
		counts[m.GetCacheState().GetTrust()]++
		running += m.GetRunningRequests()
		waiting += m.GetWaitingRequests()
	}
	trust := make([]string, 0, 5)
	for _, t := range []api.Trust{api.Trust_TRUST_EXACT, api.Trust_TRUST_APPROXIMATE, api.Trust_TRUST_SYNCING, api.Trust_TRUST_UNKNOWN} {
		if counts[t] > 0 {
			trust = append(trust, fmt.Sprintf("%d %s", counts[t], chronicle.Trust(t)))
		}
	}
	about := p.fleet.GetScheduler()
	state, shade := about.GetReadiness(), plain
	if p.lost != "" {
		state, shade = "no answer for "+chronicle.Age(float64(now.Sub(p.at).Milliseconds()))+": "+p.lost, red
	}
	lines := []string{
		cut(clean(fmt.Sprintf("%s  %s %s, pool %s: %s", now.Format("15:04:05"), about.GetName(), about.GetRelease(), about.GetPool(), state)), width, false),
		cut(fmt.Sprintf("%d members: %s; %d running, %d waiting; %d decisions, %.1f/s", len(p.fleet.GetMembers()), strings.Join(trust, ", "),
			running, waiting, p.fleet.GetDecisions(), p.rate), width, false),
		"",
	}
	lines[0] = paint(lines[0], shade, colours)
	t := memberTable(p.fleet, now.Sub(p.at))
	if room := height - len(lines) - 2; len(t.rows) > room {
		more := len(t.rows) - max(room, 0)
		t.rows = t.rows[:max(room, 0)]
		lines[2] = fmt.Sprintf("%d more than fit; -model and -sort choose", more)
	}
	var rows, out bytes.Buffer
	_ = t.write(&rows, width, colours) // a buffer takes all
	lines = append(lines, strings.Split(strings.TrimSuffix(rows.String(), "\n"), "\n")...)
	out.WriteString(home)
	for i, line := range lines[:min(len(lines), max(height, 1))] {
		if i > 0 {
			out.WriteString("\r\n")
		}
		out.WriteString(line + endLine)
	}
	out.WriteString(endPage)
	return out.Bytes()
}
