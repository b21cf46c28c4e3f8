package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// verdict is what one look at the whole index found.
type verdict struct {
	// believed is the number of answers that promise more than there is,
	// exact those that are wrong either way and called themselves EXACT.
	believed, exact int
	// rest says that a member is not there or not yet in step.
	rest int
	note string // of the first thing found
}

func (v verdict) good() bool { return v.believed == 0 && v.exact == 0 && v.rest == 0 }

func (v *verdict) say(format string, args ...any) {
	if v.note == "" {
		v.note = fmt.Sprintf(format, args...)
	}
}

// look asks the scheduler for every prompt and compares what it says of every
// member with the engine's own pool, then the number of blocks. Nothing may run.
func (f *fleet) look(ctx context.Context) (verdict, error) {
	var v verdict
	held := make(map[string]map[int]bool, len(f.members)) // the prefixes that each engine holds
	for _, m := range f.members {
		held[m.id] = make(map[int]bool)
	}
	wrong := make(map[string]bool)
	for i := range f.prompts {
		q := &f.prompts[i]
		for _, m := range f.members {
			for _, n := range q.prefixes[:m.engine.Load().Depth(0, q.tokens, "", "")] {
				held[m.id][n] = true
			}
		}
		answer, err := f.stage.Client.Score(ctx, &api.ScoreRequest{Request: &api.Request{
			Model: model, Prompt: api.TokenIDs(q.tokens), MaxCandidates: uint32(len(f.members)),
		}}, grpc.WaitForReady(true))
		if status.Code(err) == codes.Unavailable { // nobody to choose from, so nothing is believed
			v.rest += len(f.members)
			v.say("prompt %d: %v", i, err)
			continue
		}
		if err != nil {
			return v, err
		}
		for _, c := range answer.GetRanking().GetCandidates() {
			m := f.named(c.GetMember().GetId())
			if m == nil {
				return v, fmt.Errorf("unknown member %q", c.GetMember().GetId())
			}
			said := int(c.GetCachedTokens().GetGpu() + c.GetCachedTokens().GetHost() + c.GetCachedTokens().GetDisk())
			there := m.engine.Load().Hit(0, q.tokens, "", "")
			trust := c.GetCacheState().GetTrust()
			if said > there {
				v.believed++
				v.say("%s prompt %d: %d cached tokens believed, %d held, %s", m.name, i, said, there, nameOf(trust))
			}
			if trust == api.Trust_TRUST_EXACT && said != there {
				v.exact++
				wrong[m.id] = true
				v.say("%s prompt %d: %d cached tokens EXACT, %d held", m.name, i, said, there)
			}
		}
	}
	state, err := f.stage.Operator.ListMembers(ctx, &api.ListMembersRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return v, err
	}
	seen := 0
	for _, s := range state.GetMembers() {
		m := f.named(s.GetMember().GetId())
		if m == nil {
			return v, fmt.Errorf("unknown member %q", s.GetMember().GetId())
		}
		seen++
		trust, blocks := s.GetCacheState().GetTrust(), len(held[m.id])
		switch {
		case s.GetIneligible() != 0:
			v.rest++
			v.say("%s is not chosen", m.name)
		case trust == api.Trust_TRUST_EXACT && int(s.GetHeldGpuBlocks()) != blocks:
			if !wrong[m.id] {
				v.exact++
			}
			v.say("%s: %d blocks EXACT, %d held", m.name, s.GetHeldGpuBlocks(), blocks)
		case trust == api.Trust_TRUST_APPROXIMATE && int(s.GetHeldGpuBlocks()) > blocks:
			v.believed++
			v.say("%s: %d blocks APPROXIMATE, %d held", m.name, s.GetHeldGpuBlocks(), blocks)
		case trust != api.Trust_TRUST_EXACT && trust != api.Trust_TRUST_APPROXIMATE:
			v.rest++
			v.say("%s is %s: %s", m.name, nameOf(trust), s.GetCacheState().GetExplanation())
		}
	}
	if seen < len(f.members) {
		v.rest += len(f.members) - seen
		v.say("%d members instead of %d", seen, len(f.members))
	}
	return v, nil
}

func (f *fleet) named(id string) *member {
	for _, m := range f.members {
		if m.id == id {
			return m
		}
	}
	return nil
}

func nameOf(t api.Trust) string { return strings.TrimPrefix(t.String(), "TRUST_") }

// untilTrue waits for the whole fleet, without load.
func (f *fleet) untilTrue(patience time.Duration) error {
	ctx, cancel := context.WithTimeout(f.ctx, patience)
	defer cancel()
	last := ""
	for {
		v, err := f.look(ctx)
		if err == nil && v.good() {
			return nil
		}
		if err == nil {
			last = v.note
		} else if ctx.Err() == nil {
			last = err.Error()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the fleet is not in step after %v: %s", patience, last)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
