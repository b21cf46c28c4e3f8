package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvscout/kvscout/protocol/blockkey"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// patience bounds every wait.
const patience = 20 * time.Second

// latencyCase is a rate of events, of which every probe-th is looked for. While
// they are rarer than the agent's ticks each is published at once, else most wait
// for the end of a tick.
type latencyCase struct {
	name  string
	rate  int // events a second
	probe int
}

var latencyCases = []latencyCase{
	{name: "200 events/s", rate: 200, probe: 1},
	{name: "1,000 events/s", rate: 1000, probe: 5},
}

var latencyShape = shape{name: "4-64 blocks", least: 4, most: 64}

// latency is one run, in milliseconds.
type latency struct {
	Events int       `json:"events"`
	Total  quantiles `json:"total_ms"` // written -> an answer of Score has it
	Bus    quantiles `json:"bus_ms"`   // written -> the delta is with a NATS subscriber
	Call   quantiles `json:"call_ms"`  // one call of Score
}

func (l latency) String() string {
	return fmt.Sprintf("p50 %.2f ms  p99 %.2f ms  of %d events", l.Total.P50, l.Total.P99, l.Events)
}

type quantiles struct {
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

func quantilesOf(all []time.Duration) quantiles {
	slices.Sort(all)
	at := func(q float64) float64 {
		return float64(all[int(q*float64(len(all)-1))]) / float64(time.Millisecond)
	}
	return quantiles{P50: at(0.5), P90: at(0.9), P99: at(0.99), Max: at(1)}
}

// probe is an event that is looked for.
type probe struct {
	written time.Time
	batch   uint64
	keys    []uint64
}

func measureLatency(ctx context.Context, o options, c latencyCase) (latency, error) {
	s, err := startSystem(ctx, o, "scheduler", 0)
	if err != nil {
		return latency{}, err
	}
	defer s.stop()
	s.bus.mu.Lock()
	s.bus.arrived = []time.Time{}
	s.bus.mu.Unlock()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	probes := make(chan probe) // those that come while one is looked for are passed over
	fed := make(chan error, 1)
	go func() {
		defer close(probes)
		fed <- feed(ctx, s.engine, c, o.span, probes)
	}()
	var total, bus, call []time.Duration
	for p := range probes {
		seen, calls, err := s.look(ctx, p)
		if err != nil {
			cancel()
			return latency{}, errors.Join(err, <-fed)
		}
		total = append(total, seen.Sub(p.written))
		call = append(call, calls...)
		if at := s.bus.arrival(p.batch); !at.IsZero() {
			bus = append(bus, at.Sub(p.written))
		}
	}
	if err := <-fed; err != nil {
		return latency{}, err
	}
	if len(total) == 0 || len(bus) == 0 {
		return latency{}, errors.New("no event was seen")
	}
	s.bus.mu.Lock()
	err = s.bus.err
	s.bus.mu.Unlock()
	return latency{Events: len(total), Total: quantilesOf(total), Bus: quantilesOf(bus), Call: quantilesOf(call)}, errors.Join(err, s.end())
}

// feed writes events at an even rate.
func feed(ctx context.Context, e *engine, c latencyCase, span time.Duration, probes chan<- probe) error {
	t := newStream(latencyShape)
	every := time.Second / time.Duration(c.rate)
	due := time.Now()
	for end := due.Add(span); due.Before(end); due = due.Add(every) {
		time.Sleep(time.Until(due))
		if time.Since(due) > every {
			due = time.Now() // a late event does not make a burst
		}
		batch := t.batches
		payload, keys := t.next()
		ask := untyped(keys)
		written := time.Now()
		if err := e.publish(ctx, payload); err != nil {
			return err
		}
		if batch%uint64(c.probe) != 0 {
			continue
		}
		select {
		case probes <- probe{written: written, batch: batch, keys: ask}:
		default:
		}
	}
	return nil
}

func untyped(keys []blockkey.Key) []uint64 {
	out := make([]uint64, len(keys))
	for i, k := range keys {
		out[i] = uint64(k)
	}
	return out
}

// look asks again and again until an answer counts all blocks of a probe, and
// says when it came.
func (s *system) look(ctx context.Context, p probe) (seen time.Time, calls []time.Duration, err error) {
	want := uint32(len(p.keys) * blockSize)
	request := &api.ScoreRequest{Request: &api.Request{Model: model, Prompt: &api.Prompt{Form: &api.Prompt_BlockKeys{BlockKeys: &api.BlockKeys{
		Keys: p.keys, BlockSizeTokens: blockSize, PromptTokens: want + 1,
	}}}}}
	for {
		asked := time.Now()
		answer, err := s.client.Score(ctx, request)
		if err != nil {
			return seen, nil, err
		}
		seen = time.Now()
		calls = append(calls, seen.Sub(asked))
		for _, candidate := range answer.GetRanking().GetCandidates() {
			if candidate.GetCachedTokens().GetGpu() == want {
				return seen, calls, nil
			}
		}
		if seen.Sub(p.written) > time.Second {
			return seen, nil, fmt.Errorf("batch %d is not visible after a second: %v", p.batch, answer)
		}
	}
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}
