package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// again is the time between two attempts to reach a scheduler that went away.
const again = time.Second

var watch = command{
	name: "watch", does: "what changes: who comes and goes, trust, engines, readiness; a line each",
	more: `
Members that are there from the start come first. Where the scheduler goes away
it is asked again until it is back. With -o json each line is an object.

`,
	bind: func(fs *flag.FlagSet) func(context.Context, *session) error {
		model := modelFlag(fs)
		return func(ctx context.Context, s *session) error {
			var last *api.ListMembersResponse
			for {
				err := s.watch(ctx, *model, &last)
				switch {
				case ctx.Err() != nil:
					return nil
				case last == nil || !passing(err):
					return err
				}
				if err := s.tell(change{What: "scheduler", From: "there", To: "away", Why: clean(status.Convert(err).Message())}); err != nil {
					return err
				}
				for passing(err) {
					select {
					case <-ctx.Done():
						return nil
					case <-time.After(again):
					}
					_, err = s.list(ctx, *model)
				}
				if err != nil && ctx.Err() == nil {
					return err
				}
				if err := s.tell(change{What: "scheduler", From: "away", To: "there"}); err != nil {
					return err
				}
			}
		}
	},
}

// passing tells whether the same scheduler, or the one in its place, may answer
// a little later.
func passing(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		return true
	}
	return errors.Is(err, io.EOF)
}

// watch tells changes from what was told last until the stream ends.
func (s *session) watch(ctx context.Context, model string, last **api.ListMembersResponse) error {
	stream, err := s.admin.WatchMembers(ctx, &api.WatchMembersRequest{Model: model, IntervalMs: 200})
	if err != nil {
		return err
	}
	for {
		answer, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, c := range changes(*last, answer.GetFleet()) {
			if err := s.tell(c); err != nil {
				return err
			}
		}
		*last = answer.GetFleet()
	}
}

// change is one line.
type change struct {
	Time   time.Time `json:"time"`
	Member string    `json:"member,omitempty"` // empty: the scheduler
	What   string    `json:"what"`
	From   string    `json:"from,omitempty"`
	To     string    `json:"to,omitempty"`
	Why    string    `json:"why,omitempty"`
}

func (s *session) tell(c change) error {
	c.Time = time.Now()
	if s.output == "json" {
		c.Time = c.Time.UTC()
		return json.NewEncoder(s.Out).Encode(c)
	}
	_, err := fmt.Fprintln(s.Out, c.line(s.colours))
	return err
}

func (c *change) line(colours bool) string {
	who := c.Member
	if who == "" {
		who = "-"
	}
	text := paint(c.Time.Format("15:04:05.000"), dim, colours) + "  " + clean(who) + "  " + paint(c.What, bold, colours)
	if c.From != "" || c.To != "" {
		text += "  " + strings.TrimSpace(clean(c.From)+" -> "+clean(c.To))
	}
	if c.Why != "" {
		text += "  (" + clean(c.Why) + ")"
	}
	return text
}

// changes from one answer to the next, in the order of members; of the first
// answer, who is there.
func changes(last, now *api.ListMembersResponse) (list []change) {
	before := make(map[string]*api.MemberState)
	for _, m := range last.GetMembers() {
		before[m.GetMember().GetId()] = m
	}
	for _, m := range now.GetMembers() {
		id := m.GetMember().GetId()
		was := before[id]
		delete(before, id)
		if was == nil {
			what := "joined"
			if last == nil {
				what = "there"
			}
			list = append(list, change{Member: id, What: what, To: trustName(m.GetCacheState().GetTrust()), Why: reason(m)})
			continue
		}
		list = append(list, different(id, was, m)...)
	}
	for _, m := range last.GetMembers() {
		if id := m.GetMember().GetId(); before[id] != nil {
			list = append(list, change{Member: id, What: "left"})
		}
	}
	if was, is := last.GetScheduler().GetReadiness(), now.GetScheduler().GetReadiness(); was != is {
		list = append(list, change{What: "scheduler", From: was, To: is})
	}
	return list
}

// different is what changed of one member.
func different(id string, was, is *api.MemberState) (list []change) {
	add := func(what, from, to, why string) {
		if from != to {
			list = append(list, change{Member: id, What: what, From: from, To: to, Why: why})
		}
	}
	if a, b := was.GetCacheState().GetEpoch(), is.GetCacheState().GetEpoch(); a != b && a != 0 && b != 0 {
		add("incarnation", since(a), since(b), "another process of the engine, or its cache was dropped")
	}
	trust := len(list)
	add("trust", trustName(was.GetCacheState().GetTrust()), trustName(is.GetCacheState().GetTrust()), is.GetCacheState().GetExplanation())
	if trust == len(list) {
		add("reason", was.GetCacheState().GetExplanation(), is.GetCacheState().GetExplanation(), "")
	}
	add("eligible", ineligible(was), ineligible(is), "")
	add("warning", was.GetWarning(), is.GetWarning(), "")
	add("address", was.GetMember().GetAddress(), is.GetMember().GetAddress(), "")
	add("models", strings.Join(was.GetModels(), ","), strings.Join(is.GetModels(), ","), "")
	add("adapters", strings.Join(was.GetAdapters(), ","), strings.Join(is.GetAdapters(), ","), "")
	add("engine", was.GetEngineVersion(), is.GetEngineVersion(), "")
	add("agent", was.GetAgentRelease(), is.GetAgentRelease(), "")
	return list
}

func ineligible(m *api.MemberState) string {
	if m.GetIneligible() == api.Ineligible_INELIGIBLE_UNSPECIFIED {
		return "yes"
	}
	return strings.ToLower(strings.TrimPrefix(m.GetIneligible().String(), "INELIGIBLE_"))
}

// since is when an incarnation began.
func since(epoch uint64) string {
	return time.Unix(0, int64(epoch)).Format("15:04:05.000")
}
