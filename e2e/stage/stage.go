// Package stage sets up a whole kvscout in this process: a scheduler with its
// own NATS server and agents beside given engines, with real sockets between
// them, on addresses of its own. Tests and tools play on it.
package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/protocol/client"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/tlsclient"
	"github.com/kvscout/kvscout/scheduler"
)

const (
	local = "127.0.0.1:0"
	// Where the scheduler and its NATS server are, on a host of the stage's own:
	// they come back there.
	grpcPort, httpPort, adminPort, natsPort = "25051", "25080", "29479", "24222"
	// probe is short, so that what is waited for is soon known.
	probe = 50 * time.Millisecond
	// pollEvery is the time between two questions while waiting.
	pollEvery = 2 * time.Millisecond
	// again is the time between two attempts of Client to reach the scheduler.
	again = 5 * time.Millisecond
	// maxMessage admits prompts of two million tokens.
	maxMessage = 32 << 20
)

// Options of a Stage.
type Options struct {
	NATS string       // URL of a server that runs elsewhere; empty: the scheduler's own
	Log  *slog.Logger // nil: silent
	// Change what the scheduler is configured with; nil: nothing.
	Change func(*scheduler.Config)
}

// Stage is a running scheduler with what was started beside it.
type Stage struct {
	opt     Options
	ctx     context.Context
	cancel  context.CancelFunc
	group   sync.WaitGroup
	host    string
	release func() // the host

	// NATS is the URL of the server.
	NATS string
	// GRPC and HTTP are host:port of the API.
	GRPC, HTTP string
	// Admin is host:port of the scheduler's probes and metrics.
	Admin string

	scheduler Part
	conn      *grpc.ClientConn
	// Client of the scheduler as a proxy has it, Operator as people do: of the next
	// one too when it restarts.
	Client   api.SchedulerClient
	Operator api.AdminClient

	mu   sync.Mutex // guards errs
	errs []error
}

// Part is a piece that can be stopped alone. The zero Part has never run.
type Part struct {
	stop func()
	done <-chan struct{}
}

// Stop ends the part and waits for its end.
func (p Part) Stop() {
	if p.stop != nil {
		p.stop()
		<-p.done
	}
}

// New starts a scheduler and waits until it serves.
func New(ctx context.Context, opt Options) (*Stage, error) {
	s := &Stage{opt: opt, NATS: opt.NATS}
	var err error
	if s.host, s.release, err = loopback.Claim(); err != nil {
		return nil, err
	}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.GRPC = net.JoinHostPort(s.host, grpcPort)
	s.HTTP = net.JoinHostPort(s.host, httpPort)
	s.Admin = net.JoinHostPort(s.host, adminPort)
	if s.NATS == "" {
		s.NATS = "nats://" + net.JoinHostPort(s.host, natsPort)
	}
	s.conn, err = grpc.NewClient(s.GRPC, dial()...)
	if err == nil {
		s.Client, s.Operator = api.NewSchedulerClient(s.conn), api.NewAdminClient(s.conn)
		err = s.StartScheduler()
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// dial is how the scheduler is reached.
func dial() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(maxMessage), grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: again, Multiplier: 1, MaxDelay: again}, MinConnectTimeout: 20 * time.Second}),
	}
}

// Proxy is the client of a proxy of the stage, which waits so long for an answer.
func (s *Stage) Proxy(timeout time.Duration) (*client.Client, error) {
	return client.New(client.Config{Schedulers: []string{s.GRPC}, Timeout: timeout, Dial: dial()})
}

// StartScheduler starts the scheduler that StopScheduler stopped, at the same
// addresses, and waits until it serves.
func (s *Stage) StartScheduler() error {
	cfg := scheduler.Config{
		GRPCAddress: s.GRPC, HTTPAddress: s.HTTP, AdminAddress: s.Admin, NATSURL: s.opt.NATS, NATSAddress: net.JoinHostPort(s.host, natsPort),
		StopWait: time.Second, Log: s.opt.Log,
	}
	if s.opt.Change != nil {
		s.opt.Change(&cfg)
	}
	sched, err := scheduler.New(cfg)
	if err != nil {
		return err
	}
	s.scheduler = s.Go(sched.Run)
	select {
	case <-sched.Started():
	case <-s.scheduler.done:
		return errors.Join(errors.New("the scheduler did not start"), s.Err())
	}
	// Who asks from here on is not told that the one before is gone.
	_, err = s.Operator.ListMembers(s.ctx, &api.ListMembersRequest{}, grpc.WaitForReady(true))
	return err
}

// StopScheduler ends the scheduler and its NATS server.
func (s *Stage) StopScheduler() { s.scheduler.Stop() }

// RestartScheduler is StopScheduler and StartScheduler.
func (s *Stage) RestartScheduler() error {
	s.StopScheduler()
	return s.StartScheduler()
}

// AgentOptions say beside which engine an agent stands.
type AgentOptions struct {
	Engine string // URL of its HTTP side
	Trust  tlsclient.Trust
	NATS   string // URL; empty: the stage's
	Pool   string
	Pod    string // names the member
	Ranks  int    // 0: 1
	Events string // empty: what the engine says
	Replay string
	State  string        // folder of the state file; empty: none
	Audit  time.Duration // between two audits; 0: none
	// Speculative, AttentionChunk and Groups as in agent.Config.
	Speculative    string
	AttentionChunk int
	Groups         string
	// Heartbeat and Probe are the times between two of them; 0: the agent's own,
	// and a short one.
	Heartbeat, Probe time.Duration
}

// Agent is a running agent.
type Agent struct {
	Part
	agent *agent.Agent
	// Members are the member ids by rank.
	Members []string
}

// Admin is host:port of the agent's probes and metrics; empty before it runs.
func (a *Agent) Admin() string { return a.agent.AdminAddr() }

// Agent starts an agent beside an engine.
func (s *Stage) Agent(opt AgentOptions) (*Agent, error) {
	a, err := agent.New(agent.Config{
		NATSURL: cmp.Or(opt.NATS, s.NATS), Engine: opt.Engine, EngineTLS: opt.Trust, Pool: opt.Pool, Pod: opt.Pod,
		Events: opt.Events, Replay: opt.Replay, StateDir: opt.State, Audit: opt.Audit,
		Speculative: opt.Speculative, AttentionChunk: opt.AttentionChunk, Groups: opt.Groups,
		AdminAddress: local, Heartbeat: opt.Heartbeat, Probe: cmp.Or(opt.Probe, probe), Log: s.opt.Log,
	})
	if err != nil {
		return nil, err
	}
	running := &Agent{Part: s.Go(a.Run), agent: a}
	for rank := range max(opt.Ranks, 1) {
		running.Members = append(running.Members, fmt.Sprintf("default_%s_%d", opt.Pod, rank))
	}
	return running, nil
}

// Go runs something until it is stopped or the stage closes.
func (s *Stage) Go(run func(context.Context) error) Part {
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan struct{})
	s.group.Add(1)
	go func() {
		defer s.group.Done()
		defer close(done)
		defer cancel()
		if err := run(ctx); err != nil && ctx.Err() == nil {
			s.Fail(err)
		}
	}()
	return Part{stop: cancel, done: done}
}

// Fail notes what went wrong, for Err and Close.
func (s *Stage) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errs = append(s.errs, err)
}

// Err is what failed so far.
func (s *Stage) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.errs...)
}

// Close stops everything and gives what failed while it ran.
func (s *Stage) Close() error {
	if s.conn != nil {
		_ = s.conn.Close()
	}
	s.cancel()
	s.group.Wait()
	s.release()
	return s.Err()
}

// Member gives the scheduler's view of a member, nil when it knows none.
func (s *Stage) Member(ctx context.Context, id string) (*api.MemberState, error) {
	fleet, err := s.Operator.ListMembers(ctx, &api.ListMembersRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	for _, m := range fleet.GetMembers() {
		if m.GetMember().GetId() == id {
			return m, nil
		}
	}
	return nil, nil
}

// Until waits until the scheduler's view of a member fulfils a condition. The
// condition is asked with nil while the member is unknown.
func (s *Stage) Until(ctx context.Context, patience time.Duration, id, what string, holds func(*api.MemberState) bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var last *api.MemberState
	for {
		m, err := s.Member(ctx, id)
		if err == nil && holds(m) {
			return nil
		}
		if err != nil && status.Code(err) != codes.Unavailable && ctx.Err() == nil {
			return err
		}
		last = cmp.Or(m, last)
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("member %s did not %s within %v; last seen %v", id, what, patience, last), s.Err())
		case <-time.After(pollEvery):
		}
	}
}

// Exact is the condition that the member's cache state is proven.
func Exact(m *api.MemberState) bool {
	return m.GetCacheState().GetTrust() == api.Trust_TRUST_EXACT
}

// Trusted says that a candidate's cache state is proven.
func Trusted(c *api.Candidate) bool {
	return c.GetCacheState().GetTrust() == api.Trust_TRUST_EXACT
}

// Settled is the condition that the member is known and not syncing.
func Settled(m *api.MemberState) bool {
	return m != nil && m.GetCacheState().GetTrust() != api.Trust_TRUST_SYNCING
}
