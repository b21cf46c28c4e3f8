package realvllm_test

import (
	"sync"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/realvllm"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// served is one request on its way through the engine.
type served struct {
	sent  time.Time
	done  chan struct{} // closed when it was answered
	took  time.Duration // after done, as err
	err   error
	order int64 // the priority of its decision
}

// send picks and lets the engine serve the request with the priority that the
// answer carries.
func (r *run) send(tokens []uint32) *served {
	r.t.Helper()
	answer, err := r.stage.Client.Pick(r.t.Context(), &api.PickRequest{Request: &api.Request{
		Model: realvllm.Model, Prompt: api.TokenIDs(tokens),
	}})
	if err != nil {
		r.t.Error(err)
		return nil
	}
	s := &served{sent: time.Now(), done: make(chan struct{}), order: answer.GetRanking().GetEnginePriority()}
	go func() {
		defer close(s.done)
		_, s.err = r.engine.Complete(r.t.Context(), realvllm.Request{Tokens: tokens, MaxTokens: 2, Priority: s.order})
		s.took = time.Since(s.sent)
	}()
	return s
}

func (s *served) answered() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// TestShortRequestsOvertakeAndLongOnesAreServed shows the engine priority at
// work: behind a backlog of long prompts a short request is answered before
// them, and a long prompt is answered while short ones keep coming.
func TestShortRequestsOvertakeAndLongOnesAreServed(t *testing.T) {
	t.Parallel()
	// One request at a time and short steps, so that a few prompts make a queue.
	r := open(t, "", realvllm.Config{Args: []string{
		"--scheduling-policy", "priority", "--max-num-seqs", "1", "--max-num-batched-tokens", "256",
	}})
	r.startAgent()

	var longs []*served
	for range 8 {
		longs = append(longs, r.send(r.tokens(3000)))
	}
	short := r.send(r.tokens(40))
	<-short.done
	before := 0
	for _, l := range longs {
		if l.answered() {
			before++
		}
	}
	for _, s := range append(longs, short) {
		if <-s.done; s.err != nil {
			t.Fatal(s.err)
		}
	}
	t.Logf("a short request behind 8 long ones: answered after %v, after %d of them; the last of them took %v",
		short.took.Round(time.Millisecond), before, longs[7].took.Round(time.Millisecond))
	if before > 3 { // the one being served, and what ended while it was sent
		t.Errorf("%d long prompts were answered first", before)
	}

	// Four clients always have a short request waiting. A long prompt that they
	// could overtake for ever would never be answered.
	prompts := make(chan []uint32, 1)
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for tokens := range prompts {
				if s := r.send(tokens); s != nil {
					<-s.done
				}
			}
		})
	}
	overtook := 0
	feed := func(until *served, limit time.Duration) bool {
		end := time.After(limit)
		for {
			select {
			case <-until.done:
				return true
			case <-end:
				return false
			case prompts <- r.tokens(40):
				overtook++
			}
		}
	}
	feed(&served{done: make(chan struct{})}, time.Second) // a queue before it comes
	overtook = 0
	long := r.send(r.tokens(3000))
	served := feed(long, time.Minute)
	close(prompts)
	clients.Wait()
	if !served {
		t.Fatalf("a long prompt starved behind %d short ones", overtook)
	}
	if long.err != nil {
		t.Fatal(long.err)
	}
	t.Logf("a long prompt among short ones: answered after %v, %d of them went before", long.took.Round(time.Millisecond), overtook)
	if overtook < 4 {
		t.Errorf("%d short requests came meanwhile: there was no queue", overtook)
	}
}
