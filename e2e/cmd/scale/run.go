package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"google.golang.org/grpc"

	"github.com/kvscout/kvscout/e2e/loopback"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	grpcPort, adminPort = "25051", "29479"
	// patience bounds every wait.
	patience = 5 * time.Minute
	// streams at least that the picks share.
	streams = 2
	// settle is how long memory is left to settle after the start.
	settle = 3 * time.Second
	// verified is how many requests are compared on all members at the end.
	verified = 100
	// lagMetric is the histogram of the events' lag.
	lagMetric = "kvscout_scheduler_event_lag_seconds"
	// resyncMetric and discardMetric count what is lost, and what for.
	resyncMetric  = "kvscout_scheduler_ingest_resyncs_total"
	discardMetric = "kvscout_scheduler_ingest_messages_discarded_total"
)

// scene is what runs.
type scene struct {
	options
	content    *content
	say        func(format string, args ...any)
	nats       *part
	agents     []*part
	schedulers []*replica
	callers    *callers
}

// replica is a scheduler that runs.
type replica struct {
	*part
	admin  string
	conn   *grpc.ClientConn
	client api.SchedulerClient
}

func run(ctx context.Context, o options, progress io.Writer) (r *result, err error) {
	s := &scene{options: o}
	began := time.Now()
	s.say = func(format string, args ...any) {
		fmt.Fprintf(progress, "%6.1f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	if s.content, err = newContent(o.Members, o.Blocks, o.Holders, o.Shared); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	r = &result{Options: o, Cores: runtime.NumCPU(), Machine: runtime.GOOS + "/" + runtime.GOARCH, Load: loadAverage()}
	for _, step := range []func(context.Context, *result) error{s.fleet, s.start, s.events, s.picks, s.verify} {
		if err := step(ctx, r); err != nil {
			return r, err
		}
	}
	if r.Wrong > 0 {
		return r, fmt.Errorf("%w: %d of %d", errWrong, r.Wrong, r.Checked)
	}
	return r, nil
}

// fleet starts NATS and the agents.
func (s *scene) fleet(_ context.Context, _ *result) error {
	var err error
	if s.nats, err = startPart("nats", ""); err != nil {
		return err
	}
	var server natsAnswer
	if err := s.nats.do(struct{}{}, &server); err != nil {
		return err
	}
	s.say("%d agents start, %d blocks each", s.Members, s.Blocks)
	for i := range s.Processes {
		p, err := startPart("agents", "")
		if err != nil {
			return err
		}
		s.agents = append(s.agents, p)
		order := agentsOrder{Do: "begin", NATS: server.URL, Fleet: s.options, From: i * s.Members / s.Processes, To: (i + 1) * s.Members / s.Processes}
		if err := p.do(order, new(agentsAnswer)); err != nil {
			return err
		}
	}
	number := make(map[string]int)
	for i := range s.Members {
		number[memberID(i)] = i
	}
	s.callers = &callers{content: s.content, rate: s.Picks, began: time.Now(), number: number, period: func(m int) time.Duration { return period(m, s.Rate) }}
	// The agents have nobody to speak to yet; what they say first is said in vain.
	for quiet := time.Now(); time.Since(quiet) < patience; time.Sleep(100 * time.Millisecond) {
		all, err := s.order("stats", 0, 0)
		if err != nil {
			return err
		}
		if all.Heartbeats >= 2*uint64(s.Members) {
			break
		}
	}
	s.say("%d schedulers start", s.Schedulers)
	for i := range s.Schedulers {
		one, err := s.startScheduler(i, server.URL)
		if one != nil {
			s.schedulers = append(s.schedulers, one)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *scene) startScheduler(number int, url string) (*replica, error) {
	host, release, err := loopback.Claim()
	if err != nil {
		return nil, err
	}
	release() // the ports are the scheduler's from here on
	one := &replica{admin: net.JoinHostPort(host, adminPort)}
	address := net.JoinHostPort(host, grpcPort)
	args := []string{"-nats-url", url, "-grpc-address", address, "-admin-address", one.admin, "-index-memory", s.index}
	if s.profile != "" {
		file, err := filepath.Abs(s.profile)
		if err != nil {
			return nil, err
		}
		args = append(args, "-cpuprofile", file)
	}
	name := "scheduler"
	if number > 0 {
		name += "-" + strconv.Itoa(number+1)
	}
	if one.part, err = startPart(name, s.scheduler, args...); err != nil {
		return nil, err
	}
	if one.conn, err = dial(address); err != nil {
		return one, err
	}
	one.client = api.NewSchedulerClient(one.conn)
	return one, nil
}

// order tells all processes of agents something about members, and adds up what
// they answer.
func (s *scene) order(do string, from, to int) (all agentsAnswer, err error) {
	for _, p := range s.agents {
		var one agentsAnswer
		if err := p.do(agentsOrder{Do: do, From: from, To: to}, &one); err != nil {
			return all, err
		}
		add(&all.Stats, one.Stats)
		all.Batches += one.Batches
		all.Wire += one.Wire
		all.Late = max(all.Late, one.Late)
		all.At = append(all.At, one.At...)
	}
	return all, nil
}

// wait gives up when the scheduler has ended or patience has.
func (s *scene) wait(ctx context.Context, what string, every time.Duration, holds func() (bool, error)) error {
	for end := time.Now().Add(patience); ; {
		good, err := holds()
		if good || err != nil {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %s", patience, what)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(every):
		}
	}
}

// start waits until the scheduler believes all members.
func (s *scene) start(ctx context.Context, r *result) error {
	began := time.Now()
	first := time.Duration(0)
	said := time.Now()
	err := s.wait(ctx, "all members are exact", 50*time.Millisecond, func() (bool, error) {
		exact, lost, dropped := float64(s.Members), 0., 0.
		for _, one := range s.schedulers {
			m, err := fetch(ctx, one.admin)
			if err != nil {
				// Not there yet, or not any more: its process says which.
				if !one.alive() {
					return false, errors.New("a scheduler ended")
				}
				return false, nil
			}
			exact = min(exact, m.sum("kvscout_scheduler_members", "trust", "exact"))
			lost, dropped = lost+m.sum(resyncMetric), dropped+m.sum(discardMetric, "reason", "dropped")
		}
		if exact > 0 && first == 0 {
			first = time.Since(began)
		}
		if time.Since(said) > time.Second {
			said = time.Now()
			s.say("%.0f of %d members are exact; %.0f resyncs, %.0f messages dropped", exact, s.Members, lost, dropped)
		}
		return int(exact) == s.Members, nil
	})
	if err != nil {
		return err
	}
	r.Start.Exact, r.Start.First = time.Since(began).Seconds(), first.Seconds()
	used, err := s.usage(s.schedulers[0].part)
	if err != nil {
		return err
	}
	r.Start.Peak, r.Start.CPU = used.Peak, used.CPU.Seconds()
	s.say("all are exact after %.2f s", r.Start.Exact)
	if err := pause(ctx, min(settle, s.For)); err != nil {
		return err
	}
	if used, err = s.usage(s.schedulers[0].part); err != nil {
		return err
	}
	r.Start.After = used.RSS
	return nil
}

// moment is all that is counted, at one time.
type moment struct {
	at      time.Time
	agents  agentsAnswer
	metrics []metrics // of each scheduler
	cpu     map[string]time.Duration
	rss     int64 // of the scheduler
}

func (s *scene) now(ctx context.Context) (m moment, err error) {
	if m.agents, err = s.order("stats", 0, 0); err != nil {
		return m, err
	}
	for _, one := range s.schedulers {
		all, err := fetch(ctx, one.admin)
		if err != nil {
			return m, err
		}
		m.metrics = append(m.metrics, all)
	}
	m.cpu = make(map[string]time.Duration)
	for _, p := range s.parts() {
		u, err := s.usage(p)
		if err != nil {
			return m, err
		}
		m.cpu[p.name] += u.CPU
		if p == s.schedulers[0].part {
			m.rss = u.RSS
		}
	}
	if u, err := usageOf(os.Getpid()); err == nil {
		m.cpu["callers"] = u.CPU
	}
	m.at = time.Now()
	return m, nil
}

func (s *scene) usage(p *part) (usage, error) {
	u, err := usageOf(p.cmd.Process.Pid)
	if err != nil {
		return u, fmt.Errorf("%s: %w: %s", p.name, err, p.stderr.Bytes())
	}
	return u, nil
}

// between fills in what was counted between two moments.
func (s *scene) between(a, b moment) (f flow) {
	span := b.at.Sub(a.at).Seconds()
	for i := range s.Members {
		f.Due += float64(time.Second) / float64(period(i, s.Rate))
	}
	batches := float64(b.agents.Batches - a.agents.Batches)
	f.Batches = batches / span
	// The first scheduler's figures stand for all, but for what any of them lost.
	then, now := a.metrics[0], b.metrics[0]
	grown := func(name string, labels ...string) float64 {
		return now.sum(name, labels...) - then.sum(name, labels...)
	}
	f.Deltas = grown("kvscout_scheduler_ingest_messages_total", "kind", "delta") / span
	f.Told = grown("kvscout_scheduler_peer_messages_total", "outcome", "sent") / span
	f.Heard = grown("kvscout_scheduler_peer_reservations_total", "outcome", "adopted") / span
	f.Sent = float64(b.agents.Deltas-a.agents.Deltas) / span
	// As many are removed as stored.
	f.Stored = float64(b.agents.Keys-a.agents.Keys) / 2 / span
	f.Lag50 = 1000 * now.quantileSince(then, lagMetric, .5)
	f.Lag99 = 1000 * now.quantileSince(then, lagMetric, .99)
	f.WireBytes = float64(b.agents.Wire-a.agents.Wire) / span / f.Stored
	f.Cores = make(map[string]float64)
	for name, used := range b.cpu {
		f.Cores[name] = (used - a.cpu[name]).Seconds() / span
	}
	f.CPUPer1000 = 1000 * f.Cores["scheduler"] / f.Batches * 1000
	for i := range b.metrics {
		f.Resyncs += b.metrics[i].sum(resyncMetric) - a.metrics[i].sum(resyncMetric)
		f.Dropped += b.metrics[i].sum(discardMetric, "reason", "dropped") - a.metrics[i].sum(discardMetric, "reason", "dropped")
	}
	f.Late = 1000 * b.agents.Late.Seconds()
	f.RSS, f.Index = b.rss, int64(now.sum("kvscout_scheduler_index_memory_bytes"))
	f.IndexBlocks = int64(now.sum("kvscout_scheduler_index_blocks"))
	f.Shed = now.sum("kvscout_scheduler_index_entries_shed_total")
	return f
}

// meanwhile is how things stood before and after the time of one measurement.
func (s *scene) meanwhile(ctx context.Context) (a, b moment, err error) {
	if a, err = s.now(ctx); err != nil {
		return a, b, err
	}
	if err = pause(ctx, s.For); err != nil {
		return a, b, err
	}
	b, err = s.now(ctx)
	return a, b, err
}

// events measures them alone.
func (s *scene) events(ctx context.Context, r *result) error {
	s.say("events alone for %v", s.For)
	a, b, err := s.meanwhile(ctx)
	if err != nil {
		return err
	}
	r.Events = s.between(a, b)
	return nil
}

// picks measures them beside events, and breaks the fleet beside both.
func (s *scene) picks(ctx context.Context, r *result) (err error) {
	asking, stop := context.WithCancel(ctx)
	streams := max(streams, len(s.schedulers))
	ended := make(chan error, streams)
	for i := range streams {
		go func() {
			ended <- s.callers.run(asking, s.schedulers[i%len(s.schedulers)].conn.Target(), 1/float64(streams))
		}()
	}
	defer func() {
		stop()
		for range streams {
			err = errors.Join(err, <-ended)
		}
		c := s.callers
		r.Checked, r.Wrong, r.Said = c.checked, c.wrong, c.said
		r.Both.Refused, r.Both.Unsent = c.refused, c.unsent
	}()
	if err := pause(ctx, time.Second); err != nil { // the first ones make what others find
		return err
	}
	s.say("events beside picks for %v", s.For)
	a, b, err := s.meanwhile(ctx)
	if err != nil {
		return err
	}
	r.Both.flow = s.between(a, b)
	r.Both.times(s.callers.between(a.at, b.at), b.at.Sub(a.at))
	if s.Faults {
		for _, f := range []struct {
			name    string
			members int
			within  float64
		}{{"restart", 1, 1}, {"restart", min(50, s.Members/4), 3}, {"outage", min(300, s.Members*3/10), 10}} {
			one, err := s.fault(ctx, f.name, max(1, f.members))
			if err != nil {
				return err
			}
			one.Aim = f.within
			one.Quiet = r.Both.P99
			r.Faults = append(r.Faults, one)
		}
	}
	return nil
}

// fault breaks the last so many members, and waits until they are believed again.
func (s *scene) fault(ctx context.Context, name string, members int) (f fault, err error) {
	f = fault{Name: name, Members: members}
	from := s.Members - members
	var broken []int
	for i := from; i < s.Members; i++ {
		broken = append(broken, i)
	}
	owner, at := broken[0], uint64(0)
	states := func() (map[string]*api.CacheState, error) {
		all, err := s.order("stats", owner, owner+1)
		if err != nil {
			return nil, err
		}
		at = all.At[0]
		request, _ := s.content.requests(at)
		byID := make(map[string]*api.CacheState)
		for _, one := range s.schedulers {
			found, err := s.callers.score(ctx, one.client, owner, request+4, broken)
			if err != nil {
				return nil, err
			}
			for _, c := range found {
				byID[one.name+c.GetMember().GetId()] = c.GetCacheState()
			}
		}
		return byID, nil
	}
	before, err := states()
	if err != nil {
		return f, err
	}
	s.say("%s of %d members", name, members)
	s.callers.disturb()
	began := time.Now()
	heal := began
	if name == "outage" {
		if _, err := s.order("part", from, s.Members); err != nil {
			return f, err
		}
		if err := pause(ctx, s.outage); err != nil {
			return f, err
		}
		heal = time.Now()
		_, err = s.order("mend", from, s.Members)
	} else {
		_, err = s.order("kill", from, s.Members)
	}
	if err != nil {
		return f, err
	}
	err = s.wait(ctx, "all are exact again", 20*time.Millisecond, func() (bool, error) {
		now, err := states()
		if err != nil {
			return false, err
		}
		for _, one := range s.schedulers {
			for _, m := range broken {
				state, was := now[one.name+memberID(m)], before[one.name+memberID(m)]
				if state.GetTrust() != api.Trust_TRUST_EXACT || name == "restart" && state.GetEpoch() <= was.GetEpoch() || state.GetEngineBatches()+slack < was.GetEngineBatches() {
					return false, nil
				}
			}
		}
		return true, nil
	})
	f.True = time.Since(heal).Seconds()
	s.callers.heal()
	if err == nil {
		err = pause(ctx, time.Second)
	}
	window := s.callers.between(began, began.Add(time.Since(began)))
	f.P99, f.Picks = 1000*quantile(window.took, .99).Seconds(), window.picks
	s.say("true again after %.2f s", f.True)
	return f, err
}

// verify compares the fleet with its content while the engines stand still.
func (s *scene) verify(ctx context.Context, r *result) error {
	if _, err := s.order("pause", 0, 0); err != nil {
		return err
	}
	var at []uint64
	s.say("the engines stand still")
	err := s.wait(ctx, "the scheduler has all batches", 100*time.Millisecond, func() (bool, error) {
		all, err := s.order("stats", 0, s.Members)
		if err != nil {
			return false, err
		}
		at = all.At
		for _, one := range s.schedulers {
			found, err := s.callers.score(ctx, one.client, 0, int(at[0])/every, nil)
			if err != nil || len(found) != s.Members {
				return false, err
			}
			for _, c := range found {
				state := c.GetCacheState()
				if state.GetTrust() != api.Trust_TRUST_EXACT || state.GetEngineBatches() != at[s.callers.number[c.GetMember().GetId()]] {
					return false, nil
				}
			}
		}
		return true, nil
	})
	for _, one := range s.schedulers {
		if err == nil {
			err = s.callers.verify(ctx, one.client, at, verified)
		}
	}
	c := s.callers
	r.Checked, r.Wrong, r.Said = c.checked, c.wrong, c.said
	s.say("%d answers about members were checked", c.checked)
	return err
}

// close ends all parts.
func (s *scene) close() error {
	var errs []error
	for _, one := range s.schedulers {
		if one.conn != nil {
			errs = append(errs, one.conn.Close())
		}
	}
	for _, p := range s.parts() {
		errs = append(errs, p.stop())
	}
	return errors.Join(errs...)
}

// parts are all that were started, who needs another before it.
func (s *scene) parts() (all []*part) {
	for _, one := range s.schedulers {
		all = append(all, one.part)
	}
	all = append(all, s.agents...)
	if s.nats != nil {
		all = append(all, s.nats)
	}
	return all
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
