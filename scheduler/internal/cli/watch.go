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
	"github.com/kvscout/kvscout/scheduler/internal/chronicle"
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

// changes from one answer to the next; of the first answer, who is there.
func changes(last, now *api.ListMembersResponse) (list []change) {
	for _, c := range chronicle.Between(last, now) {
		list = append(list, change{Member: c.GetMemberId(), What: c.GetWhat(), From: c.GetFrom(), To: c.GetTo(), Why: c.GetWhy()})
	}
	return list
}
