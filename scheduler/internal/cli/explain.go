package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler/internal/chronicle"
)

// maxPrompt is the longest body that schedulers take.
const maxPrompt = 16 << 20

const prompts = `
FILE, or stdin, is the body of a request in OpenAI's form, a JSON list of token
ids, or the text of a prompt, to which a newline at its end does not belong; -as
says which where it cannot be seen.
`

var explain = command{
	name: "explain", does: "where a request would go, or went, and why: every member with every part of its cost",
	operand: "[FILE]",
	more: prompts + `
  kvscout explain body.json
  echo 'The quick brown fox' | kvscout explain -model MODEL
  kvscout explain -request-id ID

`,
	bind: func(fs *flag.FlagSet) func(context.Context, *session) error {
		q := bindQuestion(fs)
		shadow := fs.String("compare", "", "`name` of a policy to compare with; empty: the scheduler's -shadow-policy")
		id := fs.String("request-id", "", "`name` of a request that was picked within ten minutes: what was answered then")
		return func(ctx context.Context, s *session) error {
			if *id != "" {
				return s.decision(ctx, *id, q.tenant)
			}
			request, err := q.request(fs, s)
			if err != nil {
				return err
			}
			ctx, cancel := s.bounded(ctx)
			defer cancel()
			answer, err := s.admin.Explain(ctx, &api.ExplainRequest{Request: request, ShadowPolicy: *shadow})
			switch {
			case err != nil:
				return err
			case s.output == "json":
				return s.json(answer)
			}
			if err := s.ranking(answer.GetRanking()); err != nil {
				return err
			}
			s.compared(answer.GetCounterfactual())
			return nil
		}
	},
}

var score = command{
	name: "score", does: "the best members for a request; for callers who are no operators, too",
	operand: "[FILE]",
	more:    prompts + "\n",
	bind: func(fs *flag.FlagSet) func(context.Context, *session) error {
		q := bindQuestion(fs)
		most := fs.Uint("max", 3, "largest `number` of members to name")
		return func(ctx context.Context, s *session) error {
			request, err := q.request(fs, s)
			if err != nil {
				return err
			}
			request.MaxCandidates = uint32(min(*most, 1<<31))
			ctx, cancel := s.bounded(ctx)
			defer cancel()
			answer, err := s.client.Score(ctx, &api.ScoreRequest{Request: request})
			switch {
			case err != nil:
				return err
			case s.output == "json":
				return s.json(answer)
			}
			return s.ranking(answer.GetRanking())
		}
	},
}

// question is a request as flags and a file say it.
type question struct {
	model, adapter, session, tenant, policy, as string
}

func bindQuestion(fs *flag.FlagSet) *question {
	q := new(question)
	fs.StringVar(&q.model, "model", "", "`name` of the model; empty: the one that the body names")
	fs.StringVar(&q.adapter, "adapter", "", "`name` of the LoRA adapter, where the model's does not say it")
	fs.StringVar(&q.session, "session", "", "`name` of the session")
	fs.StringVar(&q.tenant, "tenant", "", "`name` of the tenant")
	fs.StringVar(&q.policy, "policy", "", "`name` of the policy; empty: the scheduler's")
	fs.StringVar(&q.as, "as", "auto", "`form` of the prompt: body, tokens, text, or auto: an object of JSON is a body, a list of numbers tokens, all else text")
	return q
}

// request reads the prompt.
func (q *question) request(fs *flag.FlagSet, s *session) (*api.Request, error) {
	prompt, err := s.prompt()
	if err != nil {
		return nil, err
	}
	r := &api.Request{Model: q.model, Adapter: q.adapter, SessionId: q.session, Tenant: q.tenant, Policy: q.policy}
	as := q.as
	if as == "auto" {
		as = form(prompt)
	}
	switch as {
	case "body":
		r.Prompt = body(prompt)
	case "text":
		if q.model == "" {
			return nil, wrongFlag(settings.Wrong(fs, "model", "a text names no model"))
		}
		text, err := json.Marshal(map[string]string{"model": q.model, "prompt": strings.TrimSuffix(string(prompt), "\n")})
		if err != nil {
			return nil, err
		}
		r.Prompt = body(text)
	case "tokens":
		ids, err := tokens(prompt)
		if err != nil {
			return nil, err
		}
		if q.model == "" {
			return nil, wrongFlag(settings.Wrong(fs, "model", "token ids name no model"))
		}
		r.Prompt = &api.Prompt{Form: &api.Prompt_Tokens{Tokens: &api.Tokens{Ids: ids}}}
	default:
		return nil, wrongFlag(settings.Wrong(fs, "as", "%q is none of auto, body, tokens, text", q.as))
	}
	return r, nil
}

func body(text []byte) *api.Prompt {
	return &api.Prompt{Form: &api.Prompt_OpenaiBody{OpenaiBody: text}}
}

// form tells what a prompt looks like.
func form(prompt []byte) string {
	trimmed := bytes.TrimSpace(prompt)
	switch {
	case bytes.HasPrefix(trimmed, []byte("{")) && json.Valid(trimmed):
		return "body"
	case bytes.HasPrefix(trimmed, []byte("[")):
		if _, err := tokens(trimmed); err == nil {
			return "tokens"
		}
	}
	return "text"
}

func tokens(prompt []byte) (ids []uint32, err error) {
	if err := json.Unmarshal(prompt, &ids); err != nil {
		return nil, fmt.Errorf("token ids: want a JSON list like [1, 2, 3]: %w", err)
	}
	return ids, nil
}

// prompt reads the file that the arguments name, or stdin.
func (s *session) prompt() ([]byte, error) {
	from := s.In
	switch {
	case len(s.args) > 0 && s.args[0] != "-":
		f, err := os.Open(s.args[0])
		if err != nil {
			return nil, err
		}
		defer f.Close()
		from = f
	case s.Asks && len(s.args) == 0:
		return nil, misused("there is no prompt: name a file, or hand it in on stdin")
	}
	text, err := io.ReadAll(io.LimitReader(from, maxPrompt+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the prompt: %w", err)
	case len(text) > maxPrompt:
		return nil, fmt.Errorf("the prompt has more than %d MiB, which no scheduler takes", maxPrompt>>20)
	case len(bytes.TrimSpace(text)) == 0:
		return nil, errors.New("the prompt is empty")
	}
	return text, nil
}

// decision shows what was answered to a request.
func (s *session) decision(ctx context.Context, id, tenant string) error {
	if len(s.args) > 0 {
		return misused("-request-id and a prompt: one of them")
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	found, err := s.admin.FindDecision(ctx, &api.FindDecisionRequest{RequestId: id, Tenant: tenant})
	switch {
	case err != nil:
		return err
	case s.output == "json":
		return s.json(found)
	}
	fmt.Fprintf(s.Out, "decision %s, %s ago:\n\n", clean(found.GetDecision().GetDecisionId()), chronicle.Age(found.GetAgeMs()))
	return s.ranking(found.GetDecision().GetRanking())
}

// ranking shows the candidates with the parts of their costs.
func (s *session) ranking(r *api.Ranking) error {
	t := &table{columns: []column{
		{title: "#", right: true},
		{title: "MEMBER", least: 10, middle: true},
		{title: "TRUST", spare: 5},
		{title: "CACHED", right: true},
		{title: "GPU", right: true, spare: 7},
		{title: "HOST", right: true, spare: 9},
		{title: "DISK", right: true, spare: 9},
		{title: "PREDICTED", right: true, spare: 8},
		{title: "UNCACHED", right: true, spare: 3},
		{title: "RUN", right: true, spare: 6},
		{title: "WAIT", right: true, spare: 6},
		{title: "COST ms", right: true},
		{title: "= wait", right: true},
		{title: "load", right: true, spare: 2},
		{title: "prefill", right: true},
		{title: "miss", right: true, spare: 1},
		{title: "decode", right: true, spare: 1},
		{title: "evict", right: true, spare: 1},
		{title: "ADDRESS", least: 15, spare: 4},
	}}
	for i, c := range r.GetCandidates() {
		cached := c.GetCachedTokens()
		cost := c.GetCost()
		t.rows = append(t.rows, []cell{
			text(fmt.Sprint(i + 1)), text(c.GetMember().GetId()), trustCell(c.GetCacheState().GetTrust()),
			text(fmt.Sprint(cached.GetGpu() + cached.GetHost() + cached.GetDisk() + cached.GetPredicted())),
			text(fmt.Sprint(cached.GetGpu())), some(cached.GetHost()), some(cached.GetDisk()), text(fmt.Sprint(cached.GetPredicted())),
			text(fmt.Sprint(c.GetUncachedTokens())), text(fmt.Sprint(c.GetRunningRequests())), text(fmt.Sprint(c.GetWaitingRequests())),
			{ms(cost.GetTotalMs()), bold}, text(ms(cost.GetWaitMs())), text(ms(cost.GetLoadMs())), text(ms(cost.GetPrefillMs())),
			text(ms(cost.GetMissMs())), text(ms(cost.GetDecodeMs())), text(ms(cost.GetEvictMs())), text(c.GetMember().GetAddress()),
		})
	}
	if err := t.write(s.Out, s.width(), s.colours); err != nil {
		return err
	}
	length := "a prompt of unknown length"
	if n := r.GetPromptTokens(); n > 0 {
		length = fmt.Sprintf("%d prompt tokens", n)
	}
	fmt.Fprintln(s.Out)
	s.write("%s, policy %s, %d members compared: %s", length, clean(r.GetPolicy()), r.GetEligibleMembers(), clean(r.GetExplanation()))
	for _, f := range r.GetFallbacks() {
		s.write("fallback: %s", clean(f.GetExplanation()))
	}
	for i, c := range r.GetCandidates() {
		if why := c.GetCacheState().GetExplanation(); why != "" {
			s.write("%d is %s: %s", i+1, chronicle.Trust(c.GetCacheState().GetTrust()), clean(why))
		}
		if p := c.GetPull(); p != nil {
			s.write("%d would pull %d tokens from %s in %s ms instead of computing them in %s ms", i+1, p.GetTokens(), clean(p.GetFrom().GetId()),
				ms(p.GetTransferMs()), ms(p.GetPrefillMs()))
		}
	}
	if d := r.GetDecode(); d != nil {
		s.write("decoded on %s", clean(d.GetMember().GetId()))
	}
	if r.GetQueuedMs() >= 1 {
		s.write("it waited %s ms for room", ms(r.GetQueuedMs()))
	}
	return nil
}

// compared says what another policy would have changed.
func (s *session) compared(c *api.Counterfactual) {
	switch {
	case c == nil:
	case c.GetSame():
		s.write("policy %s would choose the same", clean(c.GetPolicy()))
	default:
		s.write("policy %s would choose %s: first token %+.1f ms, whole cost %+.1f ms, cached tokens %+d",
			clean(c.GetPolicy()), clean(c.GetMember().GetId()), c.GetFirstTokenMs(), c.GetTotalMs(), c.GetCachedTokens())
	}
}

// write writes a sentence, within the width of a terminal.
func (s *session) write(format string, v ...any) {
	for _, line := range wrap(fmt.Sprintf(format, v...), s.width()) {
		fmt.Fprintln(s.Out, line)
	}
}

// some is a count that is left out where it is 0.
func some(n uint32) cell {
	if n == 0 {
		return text("")
	}
	return text(fmt.Sprint(n))
}

func ms(v float64) string { return fmt.Sprintf("%.1f", v) }
