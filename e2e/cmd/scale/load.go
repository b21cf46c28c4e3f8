package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvscout/kvscout/protocol/buffers"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// tail is how many blocks of a prompt nobody has.
	tail = 16
	// candidates of each answer, which are all checked.
	candidates = 4
	// slack is by how many batches index and cache state may differ in an answer
	// while events are applied.
	slack = 256
	// reportAfter a pick its request is reported as finished.
	reportAfter = time.Second
	// examples of wrong answers are kept.
	examples = 5
)

// callers ask for picks at a constant rate, report them, and check every answer.
type callers struct {
	content *content
	rate    float64
	began   time.Time // of the engines' steps, about
	period  func(member int) time.Duration
	number  map[string]int // of a member's id

	mu      sync.Mutex // guards all below
	answers []answered
	checked int
	wrong   int
	said    []string
	refused int // picks that got an error
	unsent  int // picks that were not sent: too many had no answer
	// broken is when members were last restarted or away, and healed when all were
	// believed again; zero: they are not yet.
	broken, healed time.Time
}

// disturb notes that members break, and heal that all are believed again.
func (c *callers) disturb() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.broken, c.healed = time.Now(), time.Time{}
}

func (c *callers) heal() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.healed = time.Now()
}

// answered is one pick: when it was due, and how long after that, and after it was
// sent, the answer came.
type answered struct {
	due        time.Time
	late, took time.Duration
}

func dial(address string) (*grpc.ClientConn, error) {
	const largest = 64 << 20
	return grpc.NewClient(address, append(buffers.Client(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(largest)))...)
}

// question is a pick under way.
type question struct {
	owner, request int
	due, sent      time.Time
}

// run asks on one stream at its share of the rate until the context ends.
func (c *callers) run(ctx context.Context, address string, share float64) error {
	conn, err := dial(address)
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := api.NewSchedulerClient(conn).PickStream(ctx, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	var mu sync.Mutex // guards both
	open := make(map[uint64]question)
	type decision struct {
		id string
		at time.Time
	}
	var decided []decision
	group, working := errgroup.WithContext(ctx)
	group.Go(func() error {
		random := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
		every := time.Duration(float64(time.Second) / (c.rate * share))
		most := max(64, int(c.rate*share))
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		reported := time.Now()
		due := time.Now()
		for id := uint64(1); ; {
			select {
			case <-working.Done():
				return nil
			case <-tick.C:
			}
			for now := time.Now(); due.Before(now); due = due.Add(every) {
				q := c.question(random, due)
				mu.Lock()
				full := len(open) >= most
				if !full {
					q.sent = time.Now()
					open[id] = q
				}
				mu.Unlock()
				if full {
					c.mu.Lock()
					c.unsent++
					c.mu.Unlock()
					continue
				}
				call := &api.PickRequest{Request: &api.Request{
					Model: modelName, MaxCandidates: candidates, ExpectedOutputTokens: output * blockSize,
					Prompt: c.prompt(q.owner, q.request, id),
				}}
				if stream.Send(&api.PickStreamRequest{Id: id, Call: &api.PickStreamRequest_Pick{Pick: call}}) != nil {
					return nil // Recv says why
				}
				id++
			}
			if now := time.Now(); now.Sub(reported) > 50*time.Millisecond {
				reported = now
				report := &api.ReportRequest{}
				mu.Lock()
				n := 0
				for n < len(decided) && now.Sub(decided[n].at) > reportAfter {
					report.Reports = append(report.Reports, &api.Report{DecisionId: decided[n].id, Outcome: api.Outcome_OUTCOME_FINISHED})
					n++
				}
				decided = slices.Delete(decided, 0, n)
				mu.Unlock()
				if n > 0 {
					if stream.Send(&api.PickStreamRequest{Id: id, Call: &api.PickStreamRequest_Report{Report: report}}) != nil {
						return nil
					}
					id++
				}
			}
		}
	})
	group.Go(func() error {
		for {
			got, err := stream.Recv()
			if err != nil {
				if context.Cause(ctx) != nil {
					err = nil // asked to stop
				} else {
					err = fmt.Errorf("picks: %w", err)
				}
				return err
			}
			now := time.Now()
			mu.Lock()
			q, pick := open[got.GetId()]
			delete(open, got.GetId())
			if pick && got.GetPick() != nil {
				decided = append(decided, decision{got.GetPick().GetDecisionId(), now})
			}
			mu.Unlock()
			if pick {
				c.take(q, got, now)
			}
		}
	})
	return group.Wait()
}

// question is about a request of some member that is in its cache about now.
func (c *callers) question(random *rand.Rand, now time.Time) question {
	owner := random.IntN(c.content.members)
	n := c.content.first(owner) + uint64(max(0, now.Sub(c.began)/c.period(owner)))
	from, to := c.content.requests(n)
	return question{owner: owner, request: from + random.IntN(to-from), due: now}
}

func (c *callers) prompt(owner, request int, asked uint64) *api.Prompt {
	keys := c.content.prompt(owner, request, tail, asked)
	return &api.Prompt{Form: &api.Prompt_BlockKeys{BlockKeys: &api.BlockKeys{
		Keys: keys, BlockSizeTokens: blockSize, PromptTokens: uint32(len(keys)*blockSize + 1),
	}}}
}

// take notes an answer and checks it.
func (c *callers) take(q question, got *api.PickStreamResponse, now time.Time) {
	ranking := got.GetPick().GetRanking()
	c.mu.Lock()
	defer c.mu.Unlock()
	disturbed := !c.broken.IsZero() && now.After(c.broken) && (c.healed.IsZero() || q.sent.Before(c.healed))
	wrong := c.check(q.owner, q.request, ranking.GetCandidates(), slack, disturbed)
	if got.GetError() != nil {
		c.refused++
		c.sayLocked("a pick failed: " + got.GetError().GetMessage())
		return
	}
	c.answers = append(c.answers, answered{q.due, now.Sub(q.due), now.Sub(q.sent)})
	c.checked += len(ranking.GetCandidates())
	for _, w := range wrong {
		c.wrong++
		c.sayLocked(w)
	}
}

func (c *callers) sayLocked(what string) {
	if len(c.said) < examples {
		c.said = append(c.said, what)
	}
}

// check compares candidates with what the members hold, as of so many batches
// before or after the one that each cache state stands on. While some are
// disturbed less may be said than is held: a cache state that is forgotten takes
// its blocks with it a moment before that shows in what is said of it. More never.
func (c *callers) check(owner, request int, candidates []*api.Candidate, slack int, disturbed bool) (wrong []string) {
	for _, candidate := range candidates {
		id := candidate.GetMember().GetId()
		member, known := c.number[id]
		if !known {
			wrong = append(wrong, "an unknown member: "+id)
			continue
		}
		state := candidate.GetCacheState()
		depth := int(candidate.GetCachedTokens().GetGpu()) / blockSize
		n := int(state.GetEngineBatches())
		if held := c.content.held(member, owner, request, uint64(n)); held == depth {
			continue
		}
		least, most := trunk+prompt+output, 0
		for k := n - slack; k <= n+slack; k += max(1, slack/32) {
			held := c.content.held(member, owner, request, uint64(max(k, 0)))
			least, most = min(least, held), max(most, held)
		}
		exact := state.GetTrust() == api.Trust_TRUST_EXACT && !disturbed
		if depth > most || exact && depth < least {
			wrong = append(wrong, fmt.Sprintf("request %d of member %d at member %d: %d blocks, %d to %d are held about batch %d; %v %s, sequence %d",
				request, owner, member, depth, least, most, n, state.GetTrust(), state.GetExplanation(), state.GetSequence()))
		}
	}
	return wrong
}

// span is what happened between two times.
type span struct {
	picks      int
	late, took []time.Duration // sorted
}

// between gives the picks that were due in a span of time.
func (c *callers) between(from, to time.Time) span {
	c.mu.Lock()
	defer c.mu.Unlock()
	var s span
	for _, a := range c.answers {
		if a.due.Before(from) || !a.due.Before(to) {
			continue
		}
		s.picks++
		s.late, s.took = append(s.late, a.late), append(s.took, a.took)
	}
	slices.Sort(s.late)
	slices.Sort(s.took)
	return s
}

// quantile of sorted times; 0 of none.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// score asks about members, all of them where there are none named, with a
// request of one of them.
func (c *callers) score(ctx context.Context, client api.SchedulerClient, owner, request int, members []int) ([]*api.Candidate, error) {
	ask := &api.Request{Model: modelName, Prompt: c.prompt(owner, request, 0), MaxCandidates: uint32(c.content.members)}
	for _, m := range members {
		ask.Candidates = append(ask.Candidates, &api.MemberRef{Ref: &api.MemberRef_MemberId{MemberId: memberID(m)}})
	}
	got, err := client.Score(ctx, &api.ScoreRequest{Request: ask}, grpc.WaitForReady(true))
	return got.GetRanking().GetCandidates(), err
}

// errWrong is an answer that is not what the members hold.
var errWrong = errors.New("wrong answers")

// verify compares the whole fleet with its content while the engines stand still: so
// many requests of random members, each with all members.
func (c *callers) verify(ctx context.Context, client api.SchedulerClient, at []uint64, requests int) error {
	random := rand.New(rand.NewPCG(1, 2))
	for range requests {
		owner := random.IntN(c.content.members)
		from, to := c.content.requests(at[owner])
		request := from + random.IntN(to-from)
		all, err := c.score(ctx, client, owner, request, nil)
		if err != nil {
			return err
		}
		if len(all) != c.content.members {
			return fmt.Errorf("%w: %d of %d members", errWrong, len(all), c.content.members)
		}
		for _, candidate := range all {
			m, state := c.number[candidate.GetMember().GetId()], candidate.GetCacheState()
			if state.GetEngineBatches() != at[m] || state.GetTrust() != api.Trust_TRUST_EXACT {
				return fmt.Errorf("%w: member %d is at batch %d, not %d, and %v: %s", errWrong, m, state.GetEngineBatches(), at[m], state.GetTrust(), state.GetExplanation())
			}
		}
		wrong := c.check(owner, request, all, 0, false)
		c.mu.Lock()
		c.checked += len(all)
		c.wrong += len(wrong)
		for _, w := range wrong {
			c.sayLocked(w)
		}
		c.mu.Unlock()
	}
	return nil
}
