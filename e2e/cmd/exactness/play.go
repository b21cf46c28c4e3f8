package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvscout/kvscout/e2e/recording"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// patience bounds every wait for the cache state to catch up.
const patience = time.Minute

// tally counts answers. Isolated = Exact + Over + Under + Blind.
type tally struct{ Isolated, Exact, Over, Under, Blind int }

func (t *tally) add(other tally) {
	t.Isolated += other.Isolated
	t.Exact += other.Exact
	t.Over += other.Over
	t.Under += other.Under
	t.Blind += other.Blind
}

func (t *tally) String() string {
	return fmt.Sprintf("isolated=%d exact=%d over=%d under=%d blind=%d", t.Isolated, t.Exact, t.Over, t.Under, t.Blind)
}

// player plays one recording to one agent and asks the scheduler.
type player struct {
	rec     *recording.Recording
	engine  *engine
	stage   *stage.Stage
	members []string // member ids by rank
	verbose bool

	sent      []uint64 // by rank: one more than the newest sequence sent in this life; 0: none
	lives     []uint64 // by rank: epoch of the life before the last restart
	restarted bool
	busy      bool // events came since the last action, before it took effect
	blind     bool // the last action may or may not have emptied the cache
}

func (p *player) play(ctx context.Context) (tally, error) {
	p.sent = make([]uint64, len(p.members))
	p.lives = make([]uint64, len(p.members))
	questions := map[int]recording.Question{}
	for _, q := range p.rec.Questions() {
		questions[q.Step] = q
	}
	var t tally
	for i, s := range p.rec.Steps {
		switch {
		case s.Batch != nil:
			if p.restarted {
				p.engine.up() // who sends events lives
			}
			p.engine.publishers[s.Batch.Rank].PublishFrames(s.Batch.Topic, s.Batch.Sequence, s.Batch.Payload)
			p.sent[s.Batch.Rank] = s.Batch.Sequence + 1
			p.busy, p.blind = true, false
		case s.Metrics != "":
			p.engine.setMetrics(s.Metrics)
		case s.Action != "":
			if err := p.act(ctx, s.Action); err != nil {
				return t, fmt.Errorf("step %d: %w", i, err)
			}
		case s.Result != "":
			p.engine.up()
			if err := p.took(ctx, s.Result); err != nil {
				return t, fmt.Errorf("step %d: %w", i, err)
			}
		}
		q, asked := questions[i]
		if !asked {
			continue
		}
		if q.Blind && p.blind {
			t.Isolated++
			t.Blind++
			continue
		}
		if err := p.settle(ctx); err != nil {
			return t, fmt.Errorf("step %d: %w", i, err)
		}
		if err := p.ask(ctx, q, &t); err != nil {
			return t, fmt.Errorf("step %d: %w", i, err)
		}
	}
	return t, nil
}

// act repeats an action and waits until the agent can know of it.
func (p *player) act(ctx context.Context, action string) error {
	p.busy = false
	for rank, id := range p.members {
		member, err := p.stage.Member(ctx, id)
		if err != nil {
			return err
		}
		p.lives[rank] = member.GetCacheState().GetEpoch()
	}
	if p.engine.act(action) {
		p.restarted = true
		clear(p.sent)
		return nil
	}
	want := p.engine.adapters()
	return p.stage.Until(ctx, patience, p.members[0], "see the adapters change", func(m *api.MemberState) bool {
		if len(m.GetAdapters()) != len(want) {
			return false
		}
		for _, name := range m.GetAdapters() {
			if !want[name] {
				return false
			}
		}
		return true
	})
}

// took repeats what an action that has taken effect left behind, and waits until
// the agent can know of it. A reset fails while a request runs, and no page of
// that moment was recorded, nor does an engine of the time tell how it went.
func (p *player) took(ctx context.Context, action string) error {
	if action != reset {
		return nil
	}
	if p.blind = p.busy; p.blind {
		return nil
	}
	p.engine.emptied()
	for _, id := range p.members {
		err := p.stage.Until(ctx, patience, id, "see the cache emptied", func(m *api.MemberState) bool {
			return m.GetHeldGpuBlocks() == 0
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// settle waits until the scheduler's cache state stands on every batch sent.
func (p *player) settle(ctx context.Context) error {
	for rank, id := range p.members {
		if p.sent[rank] == 0 && !p.restarted {
			continue
		}
		what := fmt.Sprintf("stand on %d batches", p.sent[rank])
		err := p.stage.Until(ctx, patience, id, what, func(m *api.MemberState) bool {
			state := m.GetCacheState()
			known := state.GetEngineBatches() == p.sent[rank]
			settled := state.GetTrust() == api.Trust_TRUST_EXACT || state.GetTrust() == api.Trust_TRUST_APPROXIMATE ||
				state.GetTrust() == api.Trust_TRUST_UNKNOWN
			return known && settled && (!p.restarted || state.GetEpoch() != p.lives[rank])
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *player) ask(ctx context.Context, q recording.Question, t *tally) error {
	send := p.rec.Steps[q.Step].Send
	request := &api.Request{
		Model:            p.rec.Meta.ServedName,
		SkipsPrefixCache: send.SkipsCache,
		Prompt:           api.TokenIDs(send.Tokens),
	}
	request.Prompt.GetTokens().CacheSalt = send.Salt
	request.MaxCandidates = uint32(len(p.members))
	if send.Adapter != "" {
		request.Model = send.Adapter
	}
	if q.Rank >= 0 {
		request.Candidates = []*api.MemberRef{{Ref: &api.MemberRef_MemberId{MemberId: p.members[q.Rank]}}}
	}
	answer, err := p.stage.Client.Score(ctx, &api.ScoreRequest{Request: request})
	if err != nil {
		return err
	}
	candidates := answer.GetRanking().GetCandidates()
	if len(candidates) == 0 {
		return errors.New("no candidate in the answer")
	}
	// Where nothing tells which rank served the request, the promise is the
	// nearest that any rank made.
	actual := q.Done.CachedTokens
	predicted := held(candidates[0])
	for _, c := range candidates[1:] {
		if abs(held(c)-actual) < abs(predicted-actual) {
			predicted = held(c)
		}
	}
	t.Isolated++
	switch {
	case predicted == actual:
		t.Exact++
	case predicted > actual:
		t.Over++
	default:
		t.Under++
	}
	if p.verbose && predicted != actual {
		fmt.Printf("  t=%.3f request %d (%d tokens, salt %q, model %q): predicted %d, engine %d; %s\n",
			p.rec.Steps[q.Step].At, send.Number, len(send.Tokens), send.Salt, send.Adapter, predicted, actual, candidates[0].GetCacheState())
	}
	return nil
}

// held is the prefix that events promise, over all tiers.
func held(c *api.Candidate) int {
	cached := c.GetCachedTokens()
	return int(cached.GetGpu() + cached.GetHost() + cached.GetDisk())
}

func abs(x int) int { return max(x, -x) }
