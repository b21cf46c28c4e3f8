package main

import (
	"context"
	"fmt"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

var throughputShapes = []shape{
	{name: "64 blocks an event", least: 64, most: 64, chain: 64},
	{name: "1-4 blocks an event", least: 1, most: 4, chain: 64, beside: 16},
}

// throughput is one run. A block is stored once and, apart from the first
// poolBlocks, another is removed for it.
type throughput struct {
	Batches uint64 `json:"batches"`
	Blocks  uint64 `json:"blocks"`
	Deltas  uint64 `json:"deltas"`
	// Keys that came over NATS as stored: those of all blocks but the ones that
	// were evicted before they could be told.
	Keys     uint64  `json:"keys"`
	BusBytes float64 `json:"bus_bytes_per_block"`
	PerWall  float64 `json:"blocks_per_second"`
	PerAgent float64 `json:"blocks_per_agent_cpu_second"`
	// PerScheduler is 0 where there is none.
	PerScheduler float64 `json:"blocks_per_scheduler_cpu_second,omitempty"`
}

func (t throughput) String() string {
	return fmt.Sprintf("%.0f blocks/s  %.0f per CPU second of the agent", t.PerWall, t.PerAgent)
}

// measureThroughput writes as fast as the agent takes it.
func measureThroughput(ctx context.Context, o options, sh shape, into string) (throughput, error) {
	t := newStream(sh)
	s, err := startSystem(ctx, o, into, 1)
	if err != nil {
		return throughput{}, err
	}
	defer s.stop()
	began := time.Now()
	for time.Since(began) < o.span {
		for range 16 {
			payload, _ := t.next()
			if err := s.engine.publish(ctx, payload); err != nil {
				return throughput{}, err
			}
		}
	}
	if err := s.bus.until(ctx, patience, "the last batch is on the bus", func() bool { return s.bus.batches == t.batches }); err != nil {
		return throughput{}, err
	}
	ended := time.Now()
	if err := s.bus.proves(t); err != nil {
		return throughput{}, err
	}
	if s.client != nil {
		var last *api.MemberState
		ended, err = s.untilMember(ctx, "the scheduler has the last batch", func(m *api.MemberState) bool {
			last = m
			return m.GetCacheState().GetEngineBatches() == t.batches && m.GetCacheState().GetTrust() == api.Trust_TRUST_EXACT
		})
		if err == nil && last.GetHeldGpuBlocks() != t.held {
			err = fmt.Errorf("the scheduler holds %d blocks, should hold %d", last.GetHeldGpuBlocks(), t.held)
		}
		if err != nil {
			return throughput{}, err
		}
	}
	if err := s.end(); err != nil {
		return throughput{}, err
	}
	blocks := float64(t.blocks)
	s.bus.mu.Lock()
	defer s.bus.mu.Unlock()
	out := throughput{
		Batches: t.batches, Blocks: t.blocks, Deltas: s.bus.deltas, Keys: s.bus.keys, BusBytes: float64(s.bus.bytes) / blocks,
		PerWall: blocks / ended.Sub(began).Seconds(), PerAgent: blocks / s.agentCPU.Seconds(),
	}
	if s.client != nil {
		out.PerScheduler = blocks / s.schedulerCPU.Seconds()
	}
	return out, s.bus.err
}
