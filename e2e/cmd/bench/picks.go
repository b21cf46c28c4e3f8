package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvscout/kvscout/e2e/members"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/buffers"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// pickTokens of the prompt, of which each of pickMembers holds a little more
	// than the one before.
	pickTokens  = 8192
	pickMembers = 64
)

// pickCase is a constant rate of picks on one stream, of a prompt in one form.
type pickCase struct {
	name   string
	rate   int // picks a second
	prompt func(ids []uint32, keys []uint64) *api.Prompt
}

// The rates are half of those that a stream should reach.
var pickCases = []pickCase{
	{"512 keys", 20_000, func(_ []uint32, keys []uint64) *api.Prompt { return api.Keys(keys, blockSize) }},
	{"8,192 ids", 10_000, func(ids []uint32, _ []uint64) *api.Prompt { return api.TokenIDs(ids) }},
}

// picks is one run, in milliseconds from when a call was due, whatever came before
// it: a caller that is held up does not make the scheduler look better.
type picks struct {
	Picks int       `json:"picks"`
	Due   quantiles `json:"due_ms"`  // due -> answered
	Sent  quantiles `json:"sent_ms"` // taken by gRPC -> answered
	CPU   float64   `json:"scheduler_cpu_us"`
}

func (p picks) String() string {
	return fmt.Sprintf("p50 %.2f ms  p99 %.2f ms  of %d picks", p.Due.P50, p.Due.P99, p.Picks)
}

func measurePicks(ctx context.Context, o options, c pickCase) (out picks, err error) {
	s, err := startPart(ctx, "scheduler", 0, order{Profile: o.profile})
	if err != nil {
		return out, err
	}
	defer func() { _, stopped := s.stop(); err = errors.Join(err, stopped) }()
	ids := make([]uint32, pickTokens)
	for i := range ids {
		ids[i] = uint32(i*7919) % vocabulary
	}
	keys := untyped(blockkey.AppendTokens(nil, blockkey.Scope{Model: model, BlockSize: blockSize}.Root(), ids, blockSize, nil))
	ctx, cancel := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	defer func() { cancel(); err = errors.Join(err, group.Wait()) }()
	if err := holders(ctx, group, s.NATS, keys); err != nil {
		return out, err
	}
	conn, err := grpc.NewClient(s.GRPC, append(buffers.Client(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		return out, err
	}
	defer conn.Close()
	request := &api.Request{Model: model, Prompt: c.prompt(ids, keys)}
	if err := ready(ctx, api.NewSchedulerClient(conn), request); err != nil {
		return out, err
	}
	stream, err := api.NewSchedulerClient(conn).PickStream(ctx)
	if err != nil {
		return out, err
	}
	n := int(o.span.Seconds() * float64(c.rate))
	// A second more goes before, and counts for nothing.
	skip := c.rate
	due, sent := make([]time.Duration, 0, n), make([]time.Duration, 0, n)
	every := time.Second / time.Duration(c.rate)
	began := time.Now()
	sendings := make([]atomic.Int64, skip+n)
	sending := make(chan error, 1)
	go func() {
		call := &api.PickStreamRequest{Call: &api.PickStreamRequest_Pick{Pick: &api.PickRequest{Request: request}}}
		for i := range sendings {
			pause(time.Until(began.Add(time.Duration(i) * every)))
			call.Id = uint64(i)
			sendings[i].Store(int64(time.Since(began)))
			if err := stream.Send(call); err != nil {
				sending <- err
				return
			}
		}
		sending <- stream.CloseSend()
	}()
	for range sendings {
		answer, err := stream.Recv()
		if err == nil && answer.GetError() != nil {
			err = errors.New(answer.GetError().GetMessage())
		}
		if err != nil {
			cancel()
			return out, errors.Join(err, <-sending)
		}
		at, i := time.Since(began), int(answer.GetId())
		if i >= skip {
			due = append(due, at-time.Duration(i)*every)
			sent = append(sent, at-time.Duration(sendings[i].Load()))
		}
	}
	if err := <-sending; err != nil {
		return out, err
	}
	cpu, err := s.stop()
	return picks{Picks: n, Due: quantilesOf(due), Sent: quantilesOf(sent), CPU: float64(cpu.Microseconds()) / float64(len(sendings))}, err
}

// holders are the members: each holds a little more of the prompt than the one
// before.
func holders(ctx context.Context, group *errgroup.Group, url string, keys []uint64) error {
	subjects, err := protocol.NewSubjects(pool)
	if err != nil {
		return err
	}
	conn, err := nats.Connect(url)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, conn.Close)
	for i := range pickMembers {
		m, err := members.New(fmt.Sprintf("m%02d", i), model, blockSize, protocol.HeartbeatEvery, [][]uint64{keys[:i*len(keys)/pickMembers]})
		if err != nil {
			return err
		}
		group.Go(func() error { return m.Run(ctx, conn, subjects) })
	}
	return nil
}

// ready waits until a decision is among all members and lacks nothing.
func ready(ctx context.Context, client api.SchedulerClient, request *api.Request) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		answer, err := client.Score(ctx, &api.ScoreRequest{Request: &api.Request{Model: request.Model, Prompt: request.Prompt, MaxCandidates: 2 * pickMembers}}, grpc.WaitForReady(true))
		if ranking := answer.GetRanking(); err == nil && len(ranking.GetCandidates()) == pickMembers && ranking.Lacks() == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not all members are exact within %v: %v, %w", patience, answer.GetRanking().Lacks(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
