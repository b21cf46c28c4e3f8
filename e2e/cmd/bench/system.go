package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/kvscout/kvscout/e2e/broker"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
)

// system is all that one run needs: engine, NATS, agent, and a scheduler or
// none. It is ready when it has been started.
type system struct {
	engine    *engine
	nats      *broker.Broker // nil: the scheduler's
	scheduler *part          // nil: none
	agent     *part
	bus       *bus
	conn      *grpc.ClientConn
	client    api.SchedulerClient
	admin     api.AdminClient

	agentCPU, schedulerCPU time.Duration // known once ended
}

// startSystem starts it with a scheduler or, into an agent, without. The agent
// gets so many cores.
func startSystem(ctx context.Context, o options, into string, cores int) (s *system, err error) {
	s = &system{}
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	if s.engine, err = startEngine(ctx); err != nil {
		return s, err
	}
	var url string
	if into == "scheduler" {
		if s.scheduler, err = startPart(ctx, "scheduler", 0, order{}); err != nil {
			return s, err
		}
		url = s.scheduler.NATS
		if s.conn, err = dial(s.scheduler.GRPC); err != nil {
			return s, err
		}
		s.client, s.admin = api.NewSchedulerClient(s.conn), api.NewAdminClient(s.conn)
	} else {
		if s.nats, err = broker.Open(); err != nil {
			return s, err
		}
		url = s.nats.URL()
	}
	if s.bus, err = listen(url); err != nil {
		return s, err
	}
	if s.agent, err = startPart(ctx, "agent", cores, order{NATS: url, Engine: s.engine.address, Profile: o.profile}); err != nil {
		return s, err
	}
	exact := func() bool { return s.bus.trust == pb.Trust_TRUST_EXACT }
	if err = s.bus.until(ctx, patience, "the agent follows the engine", exact); err != nil {
		return s, err
	}
	if s.client != nil {
		_, err = s.untilMember(ctx, "the scheduler follows the agent", func(m *api.MemberState) bool {
			return m.GetCacheState().GetTrust() == api.Trust_TRUST_EXACT && m.GetIneligible() == 0
		})
	}
	return s, err
}

// untilMember waits until the scheduler's view of the member fulfils a
// condition, and says when it was seen to.
func (s *system) untilMember(ctx context.Context, what string, holds func(*api.MemberState) bool) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		fleet, err := s.admin.ListMembers(ctx, &api.ListMembersRequest{}, grpc.WaitForReady(true))
		if err != nil {
			return time.Time{}, fmt.Errorf("%s: %w", what, err)
		}
		now := time.Now()
		for _, m := range fleet.GetMembers() {
			if m.GetMember().GetId() == member && holds(m) {
				return now, nil
			}
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// end stops the processes in order and reads their CPU times.
func (s *system) end() error {
	var err error
	if s.agent != nil {
		var e error
		s.agentCPU, e = s.agent.stop()
		err = errors.Join(err, e)
		s.agent = nil
	}
	if s.scheduler != nil {
		var e error
		s.schedulerCPU, e = s.scheduler.stop()
		err = errors.Join(err, e)
		s.scheduler = nil
	}
	return err
}

// stop ends everything.
func (s *system) stop() {
	_ = s.end()
	if s.conn != nil {
		s.conn.Close()
	}
	if s.bus != nil {
		s.bus.conn.Close()
	}
	if s.nats != nil {
		s.nats.Close()
	}
	if s.engine != nil {
		s.engine.stop()
	}
}
