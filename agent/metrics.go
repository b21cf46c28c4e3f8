package agent

import (
	"context"
	"strconv"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/protocol/telemetry"
)

var laneNames = [mirror.Lanes]string{"gpu", "host", "disk"}

// meter makes the instruments; all are read from the rooms' Stats when somebody
// asks.
func (a *Agent) meter(provider metric.MeterProvider) error {
	m := &meters{meter: provider.Meter(telemetry.Scope)}
	m.ranks(a, telemetry.AgentTrust, "Trust that the cache state deserves.", false, func(r *rank, see see) {
		r.mu.Lock()
		trust, _ := r.trustLocked()
		r.mu.Unlock()
		for t := pb.Trust_TRUST_UNKNOWN; t <= pb.Trust_TRUST_EXACT; t++ {
			see(number(t == trust), telemetry.LabelTrust, trustName(t))
		}
	})
	m.ranks(a, telemetry.AgentBelieved, "A scheduler takes the rank at its word.", false, func(r *rank, see see) {
		see(number(a.statusOf(r).Believed), "", "")
	})
	m.ranks(a, telemetry.AgentSchedulers, "Schedulers by what they make of the rank.", false, func(r *rank, see see) {
		count := make(map[string]int64)
		for _, o := range a.opinions(r) {
			if o.Refused != "" {
				count["refused"]++
			} else {
				count[trustName(o.Trust)]++
			}
		}
		for t := pb.Trust_TRUST_UNKNOWN; t <= pb.Trust_TRUST_EXACT; t++ {
			see(count[trustName(t)], telemetry.LabelTrust, trustName(t))
		}
		see(count["refused"], telemetry.LabelTrust, "refused")
	})
	m.ranks(a, telemetry.AgentBlocks, "Blocks held.", false, func(r *rank, see see) {
		r.mu.Lock()
		defer r.mu.Unlock()
		for l, name := range laneNames {
			see(int64(r.mirror.Count(mirror.Lane(l))), telemetry.LabelLane, name)
		}
	})
	m.ranks(a, telemetry.AgentEngineBatches, "Sequence of the engine's newest batch", false, func(r *rank, see see) {
		see(int64(r.tail.Stats().Sequence), "", "")
	})
	m.ranks(a, telemetry.AgentConnected, "The event stream is connected.", false, func(r *rank, see see) {
		see(number(r.tail.Stats().Connected), "", "")
	})
	m.ranks(a, telemetry.AgentTailEvents, "What happened to the engine's event stream.", true, func(r *rank, see see) {
		seeTail(r.tail.Stats(), see)
		r.mu.Lock()
		defer r.mu.Unlock()
		see(int64(r.stream.found), telemetry.LabelEvent, "foreign")
	})
	m.ranks(a, telemetry.AgentSkipped, "What was passed over in events, or withheld.", true, func(r *rank, see see) {
		seeSkips(r.tail.Stats().Skips, see)
	})
	m.ranks(a, telemetry.AgentMirrorNodes, "Blocks that the mirror remembers.", false, func(r *rank, see see) {
		st := r.mirrorStats()
		see(int64(st.Nodes), telemetry.LabelEvent, "all")
		see(int64(st.Waiting), telemetry.LabelEvent, "waiting")
		see(int64(st.Withheld), telemetry.LabelEvent, "withheld")
		see(int64(st.Doubtful), telemetry.LabelEvent, "doubtful")
	})
	m.ranks(a, telemetry.AgentMirrorEvents, "What happened in the mirror.", true, func(r *rank, see see) {
		seeMirror(r.mirrorStats(), see)
	})
	m.ranks(a, telemetry.AgentPublishEvents, "What went over NATS.", true, func(r *rank, see see) {
		st := a.publisherStats(r)
		for name, n := range map[string]uint64{
			"delta": st.Deltas, "key": st.Keys, "byte": st.Bytes, "dropped": st.Dropped, "heartbeat": st.Heartbeats,
			"snapshot": st.Snapshots, "chunk": st.Chunks, "refused": st.Refused, "error": st.Errors,
			"unreadable": st.Unreadable,
		} {
			see(int64(n), telemetry.LabelEvent, name)
		}
	})
	m.ranks(a, telemetry.AgentStateEvents, "What happened to the state file.", true, func(r *rank, see see) {
		if k := a.saverOf(r); k != nil {
			k.stats.each(func(name string, n uint64) { see(int64(n), telemetry.LabelEvent, name) })
		}
	})
	m.ranks(a, telemetry.AgentStateBytes, "Size of the newest state file.", false, func(r *rank, see see) {
		if k := a.saverOf(r); k != nil {
			see(int64(k.stats.bytes.Load()), "", "")
		}
	})
	m.observe(telemetry.AgentAudits, "Audits of the idle engine.", true, func(see see) {
		see(int64(a.audits.held.Load()), telemetry.LabelOutcome, "held")
		see(int64(a.audits.missing.Load()), telemetry.LabelOutcome, "missing")
		see(int64(a.audits.skipped.Load()), telemetry.LabelOutcome, "skipped")
		see(int64(a.audits.failed.Load()), telemetry.LabelOutcome, "error")
	})
	m.observe(telemetry.AgentHungUp, "Connections for probes that were hung up on.", true, func(see see) {
		see(int64(a.hungUp.Load()), telemetry.LabelEvent, "connection")
	})
	m.observe(telemetry.AgentProbes, "Looks at the engine's HTTP server.", true, func(see see) {
		a.watch.mu.Lock()
		looks, failed := a.watch.polls, a.watch.failed
		a.watch.mu.Unlock()
		see(int64(looks-failed), telemetry.LabelOutcome, "ok")
		see(int64(failed), telemetry.LabelOutcome, "error")
	})
	return m.err
}

func (r *rank) mirrorStats() mirror.Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mirror.Stats()
}

func seeTail(st vllm.TailStats, see see) {
	for name, n := range map[string]uint64{
		"batch": st.Batches, "replayed": st.Replayed, "connection": st.Connections, "gap": st.Gaps, "lost": st.LostBatches,
		"replay": st.Replays, "new_life": st.Incarnations, "malformed": st.Malformed, "undecodable": st.Undecodable, "hung_up": st.HungUp,
	} {
		see(int64(n), telemetry.LabelEvent, name)
	}
}

func seeSkips(st vllm.Skips, see see) {
	for name, n := range map[string]uint64{
		"unknown_event": st.UnknownEvents, "unknown_medium": st.UnknownMediums, "shared_storage": st.SharedStorage,
		"unknown_extra": st.UnknownExtras, "nameless_adapter": st.NamelessLoRA,
	} {
		see(int64(n), telemetry.LabelEvent, name)
	}
}

func seeMirror(st mirror.Stats, see see) {
	for name, n := range map[string]uint64{
		"stored": st.Stored, "removed": st.Removed, "unknown_removed": st.UnknownRemoved, "unknown_stored": st.UnknownStored,
		"repeated": st.Repeated, "refused": st.Refused, "dropped": st.Dropped, "contradiction": st.Contradictions,
	} {
		see(int64(n), telemetry.LabelEvent, name)
	}
}

func number(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// see takes one value, with an attribute unless its key is empty.
type see func(value int64, key, attr string)

// meters makes instruments and keeps the first error.
type meters struct {
	meter metric.Meter
	err   error
}

// ranks makes an instrument that read fills for each rank.
func (m *meters) ranks(a *Agent, name, help string, counter bool, read func(*rank, see)) {
	m.register(name, help, counter, func(o metric.Observer, of metric.Int64Observable) {
		for _, r := range a.watch.list() {
			by := attribute.String(telemetry.LabelRank, strconv.Itoa(r.number))
			read(r, func(value int64, key, attr string) {
				if key == "" {
					o.ObserveInt64(of, value, metric.WithAttributes(by))
					return
				}
				o.ObserveInt64(of, value, metric.WithAttributes(by, attribute.String(key, attr)))
			})
		}
	})
}

// observe makes an instrument that read fills.
func (m *meters) observe(name, help string, counter bool, read func(see)) {
	m.register(name, help, counter, func(o metric.Observer, of metric.Int64Observable) {
		read(func(value int64, key, attr string) {
			o.ObserveInt64(of, value, metric.WithAttributes(attribute.String(key, attr)))
		})
	})
}

func (m *meters) register(name, help string, counter bool, read func(metric.Observer, metric.Int64Observable)) {
	if m.err != nil {
		return
	}
	var of metric.Int64Observable
	if counter {
		of, m.err = m.meter.Int64ObservableCounter(name, metric.WithDescription(help))
	} else {
		of, m.err = m.meter.Int64ObservableGauge(name, metric.WithDescription(help))
	}
	if m.err != nil {
		return
	}
	_, m.err = m.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		read(o, of)
		return nil
	}, of)
}
