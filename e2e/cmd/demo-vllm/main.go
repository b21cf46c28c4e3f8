// Command demo-vllm schedules conversations over two real vLLM engines on CPU
// and shows, request by request, how many cached tokens were promised and how
// many the engine then found. The same conversations go round robin first.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/e2e/realvllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	engines = 2
	// startTime bounds the start of both engines, patience any other wait.
	startTime = 6 * time.Minute
	patience  = 30 * time.Second
	// systemTokens are shared by all conversations, turnTokens are new each turn.
	systemTokens, turnTokens, answerTokens = 640, 120, 24
)

func main() {
	home := flag.String("home", "", "folder with a real vLLM, made by e2e/realvllm/install.sh")
	chats := flag.Int("chats", 6, "conversations")
	turns := flag.Int("turns", 5, "turns of each conversation")
	seed := flag.Uint64("seed", 1, "seed of the conversations")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, *home, *chats, *turns, *seed)
	interrupted := ctx.Err() != nil
	stop()
	if err != nil && !interrupted {
		fmt.Fprintln(os.Stderr, "demo-vllm:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, home string, chats, turns int, seed uint64) (err error) {
	logFile := filepath.Join(os.TempDir(), fmt.Sprintf("demo-vllm-%d.log", os.Getpid()))
	log, err := os.Create(logFile)
	if err != nil {
		return err
	}
	defer func() {
		log.Close()
		if err == nil {
			os.Remove(logFile)
		} else {
			err = fmt.Errorf("%w (the engines' log: %s)", err, logFile)
		}
	}()
	fleet, err := startEngines(ctx, out, home, log)
	for _, e := range fleet {
		defer e.Kill()
	}
	if err != nil {
		return err
	}
	s, err := stage.New(ctx, stage.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	byAddress := map[string]*realvllm.Engine{}
	names := map[string]string{}
	for i, e := range fleet {
		name := fmt.Sprintf("vllm-%d", i)
		byAddress[e.Address()], names[e.Address()] = e, name
		a, err := s.Agent(stage.AgentOptions{Engine: e.URL(), Pod: name})
		if err != nil {
			return err
		}
		if err := s.Until(ctx, patience, a.Members[0], "be settled", stage.Settled); err != nil {
			return err
		}
	}

	// Two sets of conversations of one shape: neither run profits from the other.
	fmt.Fprintf(out, "\n%d conversations of %d turns, the engines in turn\n", chats, turns)
	next := 0
	plain, err := converse(ctx, out, chats, turns, rand.New(rand.NewPCG(seed, 1)), func(prompt []uint32) (served, error) {
		e := fleet[next%len(fleet)]
		next++
		usage, err := e.Complete(ctx, realvllm.Request{Tokens: prompt, MaxTokens: answerTokens})
		return served{name: names[e.Address()], predicted: -1, usage: usage}, err
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%d conversations of %d turns, each request where kvscout says\n", chats, turns)
	scouted, err := converse(ctx, out, chats, turns, rand.New(rand.NewPCG(seed, 2)), func(prompt []uint32) (served, error) {
		return pick(ctx, s.Client, byAddress, names, prompt)
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%-14s %8s %14s %14s %9s %10s\n", "", "requests", "prompt tokens", "cached tokens", "hit rate", "mean time")
	plain.row(out, "in turn")
	scouted.row(out, "kvscout")
	fmt.Fprintf(out, "\npredicted exactly: %d of %d requests; |predicted - actual| = %d of %d prompt tokens\n",
		scouted.exact, scouted.requests, scouted.off, scouted.prompt)
	return nil
}

func startEngines(ctx context.Context, out io.Writer, home string, log io.Writer) ([]*realvllm.Engine, error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	var fleet []*realvllm.Engine
	var group errgroup.Group
	for range engines {
		e, err := realvllm.New(realvllm.Config{Home: home, Blocks: 512, Log: log})
		if err != nil {
			return fleet, err
		}
		fleet = append(fleet, e)
		if err := e.Launch(); err != nil {
			return fleet, err
		}
		group.Go(func() error { return e.Ready(ctx) })
	}
	began, done := time.Now(), make(chan error, 1)
	go func() { done <- group.Wait() }()
	for {
		fmt.Fprintf(out, "\rstarting %d vLLM engines on CPU, about two minutes: %3.0f s ", engines, time.Since(began).Seconds())
		select {
		case err := <-done:
			fmt.Fprintln(out)
			return fleet, err
		case <-time.After(time.Second):
		}
	}
}

// served is one request with what was promised and what came of it.
type served struct {
	name      string
	predicted int // -1: nothing was promised
	reason    string
	usage     realvllm.Usage
	took      time.Duration
}

func pick(ctx context.Context, client api.SchedulerClient, fleet map[string]*realvllm.Engine, names map[string]string, prompt []uint32) (served, error) {
	answer, err := client.Pick(ctx, &api.PickRequest{Request: &api.Request{
		Model:                realvllm.Model,
		Prompt:               api.TokenIDs(prompt),
		ExpectedOutputTokens: answerTokens,
	}})
	if err != nil {
		return served{}, err
	}
	best := answer.GetRanking().GetCandidates()[0]
	e := fleet[best.GetMember().GetAddress()]
	if e == nil {
		return served{}, fmt.Errorf("picked %s, which is no engine of ours", best.GetMember())
	}
	usage, err := e.Complete(ctx, realvllm.Request{Tokens: prompt, MaxTokens: answerTokens})
	report := &api.Report{DecisionId: answer.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FINISHED}
	if err != nil {
		report.Outcome = api.Outcome_OUTCOME_FAILED
	} else {
		promptTokens, cachedTokens := uint32(usage.PromptTokens), uint32(usage.CachedTokens)
		report.PromptTokens, report.CachedTokens = &promptTokens, &cachedTokens
	}
	if _, reportErr := client.Report(ctx, &api.ReportRequest{Reports: []*api.Report{report}}); err == nil {
		err = reportErr
	}
	return served{
		name: names[e.Address()], predicted: int(best.GetCachedTokens().GetGpu()),
		reason: answer.GetRanking().GetExplanation(), usage: usage,
	}, err
}

// tally sums up one run.
type tally struct {
	requests, prompt, cached, exact, off int
	took                                 time.Duration
}

func (t *tally) row(out io.Writer, name string) {
	fmt.Fprintf(out, "%-14s %8d %14d %14d %8.1f%% %10v\n", name, t.requests, t.prompt, t.cached,
		100*float64(t.cached)/float64(max(t.prompt, 1)), (t.took / time.Duration(max(t.requests, 1))).Round(time.Millisecond))
}

// converse holds the conversations, turn by turn in a shuffled order, and
// prints a line a request.
func converse(ctx context.Context, out io.Writer, chats, turns int, rng *rand.Rand, send func([]uint32) (served, error)) (tally, error) {
	var t tally
	system := tokens(rng, systemTokens)
	histories := make([][]uint32, chats)
	for i := range histories {
		histories[i] = slices.Clone(system)
	}
	for turn := range turns {
		for _, chat := range rng.Perm(chats) {
			if ctx.Err() != nil {
				return t, ctx.Err()
			}
			histories[chat] = append(histories[chat], tokens(rng, turnTokens)...)
			began := time.Now()
			s, err := send(histories[chat])
			if err != nil {
				return t, err
			}
			s.took = time.Since(began)
			histories[chat] = append(histories[chat], s.usage.Output...)
			t.requests++
			t.prompt += s.usage.PromptTokens
			t.cached += s.usage.CachedTokens
			t.took += s.took
			fmt.Fprintln(out, line(chat, turn, s))
			if s.predicted >= 0 {
				t.off += max(s.predicted-s.usage.CachedTokens, s.usage.CachedTokens-s.predicted)
				if s.predicted == s.usage.CachedTokens {
					t.exact++
				}
			}
		}
	}
	return t, nil
}

func line(chat, turn int, s served) string {
	promise := ""
	if s.predicted >= 0 {
		promise = fmt.Sprintf("  predicted %4d", s.predicted)
		if s.predicted == s.usage.CachedTokens {
			promise += " ="
		} else {
			promise += " ≠"
		}
	}
	bar := strings.Repeat("█", 20*s.usage.CachedTokens/max(s.usage.PromptTokens, 1))
	return strings.TrimRight(fmt.Sprintf("  chat %d turn %d  %s  %4d tokens%s  cached %4d  %-20s %6v  %s",
		chat, turn, s.name, s.usage.PromptTokens, promise, s.usage.CachedTokens, bar, s.took.Round(time.Millisecond), s.reason), " ")
}

func tokens(rng *rand.Rand, n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = 3 + rng.Uint32N(3900)
	}
	return ids
}
