package agent

import (
	"cmp"
	"context"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/agent/internal/rank"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/telemetry"
)

var laneNames = [mirror.Lanes]string{"gpu", "host", "disk"}

// rankStats are what is counted of one rank, as of one moment.
type rankStats struct {
	status    rank.Status
	opinions  []publish.Opinion
	publisher publish.Stats
	saved     rank.SaverStats
	saves     bool
	tail      vllm.TailStats
	mirror    mirror.Stats
	held      [mirror.Lanes]int
	trust     pb.Trust
	foreign   uint64 // streams of another engine
}

func statsOf(r *rank.Rank) *rankStats {
	st := &rankStats{
		status: r.Status(), opinions: r.Opinions(), publisher: r.Published(), tail: r.Tail(), mirror: r.Mirror(), held: r.Held(), trust: r.Trust(), foreign: r.Foreign(),
	}
	st.saved, st.saves = r.Saved()
	return st
}

// meter makes the instruments. All but the lag of events are read from the packages'
// Stats when somebody asks.
func (a *Agent) meter(provider metric.MeterProvider) (err error) {
	meter := provider.Meter(telemetry.Scope)
	a.lags, err = meter.Float64Histogram("kvscout.agent.event.lag", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(telemetry.LagBuckets...),
		metric.WithDescription("Time from the engine's stamp on a batch of events until it is applied."))
	if err != nil {
		return err
	}
	if err := telemetry.Observe(meter, ofAgent, func(yield func(*Agent, ...string)) { yield(a) }); err != nil {
		return err
	}
	return telemetry.Observe(meter, ofRanks, func(yield func(*rankStats, ...string)) {
		for _, r := range a.watch.Ranks() {
			yield(statsOf(r), telemetry.LabelRank, strconv.Itoa(r.Number()))
		}
	})
}

// lag takes how long batches of a rank take to be applied.
func (a *Agent) lag(number int) func(time.Duration) {
	labels := metric.WithAttributeSet(telemetry.Labels(telemetry.LabelRank, strconv.Itoa(number)))
	return func(d time.Duration) { a.lags.Record(context.Background(), telemetry.Lag(d), labels) }
}

type counts = map[string]uint64

// ofAgent are the instruments of the whole process.
var ofAgent = []telemetry.Instrument[*Agent]{
	telemetry.Gauge("kvscout.agent.build_info", "", "1, by version, commit and Go version of the program.", func(a *Agent, see telemetry.See) {
		b := settings.Built()
		see(1, "version", cmp.Or(a.cfg.Version, b.Version), "commit", b.Commit, "goversion", b.Go)
	}),
	telemetry.Counter("kvscout.agent.audits", "{audit}", "Audits of the idle engine.", func(a *Agent, see telemetry.See) {
		n := a.watch.Audits()
		see.Counts(telemetry.LabelOutcome, counts{"held": n.Held, "missing": n.Missing, "skipped": n.Skipped, "error": n.Failed})
	}),
	telemetry.Counter("kvscout.agent.connections.refused", "{connection}", "Connections to the admin address beyond the bound.", func(a *Agent, see telemetry.See) {
		see(float64(a.hungUp.Load()))
	}),
	telemetry.Counter("kvscout.agent.engine.polls", "{poll}", "Polls of the engine's HTTP server.", func(a *Agent, see telemetry.See) {
		polls := a.watch.Polls()
		see.Counts(telemetry.LabelOutcome, counts{"ok": polls.All - polls.Failed, "error": polls.Failed})
	}),
}

// ofRanks are the instruments of each rank.
var ofRanks = []telemetry.Instrument[*rankStats]{
	telemetry.Gauge("kvscout.agent.trust", "", "1 for the trust that the cache state deserves.", func(s *rankStats, see telemetry.See) {
		for t := pb.Trust_TRUST_UNKNOWN; t <= pb.Trust_TRUST_EXACT; t++ {
			see.Flag(t == s.trust, telemetry.LabelTrust, rank.TrustName(t))
		}
	}),
	telemetry.Gauge("kvscout.agent.believed", "", "1 while a scheduler believes what the agent says of the rank.", func(s *rankStats, see telemetry.See) { see.Flag(s.status.Believed) }),
	telemetry.Gauge("kvscout.agent.schedulers", "{scheduler}", "Schedulers by what they make of the rank.", func(s *rankStats, see telemetry.See) {
		n := counts{"refused": 0}
		for t := pb.Trust_TRUST_UNKNOWN; t <= pb.Trust_TRUST_EXACT; t++ {
			n[rank.TrustName(t)] = 0
		}
		for _, o := range s.opinions {
			name := rank.TrustName(o.Trust)
			if o.Refused != "" {
				name = "refused"
			}
			if _, known := n[name]; known {
				n[name]++
			}
		}
		see.Counts(telemetry.LabelTrust, n)
	}),
	telemetry.Gauge("kvscout.agent.blocks", "{block}", "Blocks held.", func(s *rankStats, see telemetry.See) {
		for l, name := range laneNames {
			see(float64(s.held[l]), telemetry.LabelLane, name)
		}
	}),

	telemetry.Gauge("kvscout.agent.connected", "", "1 while the engine's event stream is connected.", func(s *rankStats, see telemetry.See) { see.Flag(s.tail.Connected) }),
	telemetry.Gauge("kvscout.agent.last_event.timestamp", "s", "The engine's stamp on its newest batch of events that was applied, in Unix time; 0: none was.", func(s *rankStats, see telemetry.See) {
		see(s.tail.EngineSecond)
	}),
	telemetry.CounterOf("kvscout.agent.event.batches", "{batch}", "Batches of events applied.", func(s *rankStats) uint64 { return s.tail.Batches }),
	telemetry.CounterOf("kvscout.agent.event.batches.replayed", "{batch}", "Batches applied that the engine was asked for again.", func(s *rankStats) uint64 { return s.tail.Replayed }),
	telemetry.CounterOf("kvscout.agent.event.batches.lost", "{batch}", "Batches that are gone for good.", func(s *rankStats) uint64 { return s.tail.LostBatches }),
	telemetry.CountersOf("kvscout.agent.event.batches.unreadable", "{batch}", "Messages of the stream that cannot be read.", telemetry.LabelReason, func(s *rankStats) counts {
		return counts{"malformed": s.tail.Malformed, "unknown_shape": s.tail.UnknownShapes, "undecodable": s.tail.Undecodable - s.tail.UnknownShapes}
	}),
	telemetry.CounterOf("kvscout.agent.event.gaps", "{gap}", "Holes in the live stream.", func(s *rankStats) uint64 { return s.tail.Gaps }),
	telemetry.CounterOf("kvscout.agent.event.replays", "{request}", "Requests for batches that were missing.", func(s *rankStats) uint64 { return s.tail.Replays }),
	telemetry.CounterOf("kvscout.agent.event.connections", "{connection}", "Connections to the event stream that were made.", func(s *rankStats) uint64 { return s.tail.Connections }),
	telemetry.CounterOf("kvscout.agent.event.connections.closed", "{connection}", "Connections to a listening agent that were closed for others.", func(s *rankStats) uint64 { return s.tail.HungUp }),
	telemetry.CounterOf("kvscout.agent.event.streams.foreign", "{stream}", "Streams that were found to be another engine's.", func(s *rankStats) uint64 { return s.foreign }),
	telemetry.CounterOf("kvscout.agent.engine.incarnations", "{incarnation}", "Incarnations of the engine that began.", func(s *rankStats) uint64 { return s.tail.Incarnations }),
	telemetry.CountersOf("kvscout.agent.events.skipped", "{event}", "Events passed over, or a part of them.", telemetry.LabelReason, func(s *rankStats) counts {
		k := s.tail.Skips
		return counts{"unknown_event": k.UnknownEvents, "unknown_field": k.UnknownFields, "unknown_medium": k.UnknownMediums, "shared_storage": k.SharedStorage}
	}),
	telemetry.CountersOf("kvscout.agent.blocks.withheld", "{block}", "Blocks that were announced and withheld.", telemetry.LabelReason, func(s *rankStats) counts {
		return counts{"unknown_extra": s.tail.Skips.UnknownExtras, "nameless_adapter": s.tail.Skips.NamelessLoRA}
	}),

	telemetry.Gauge("kvscout.agent.mirror.blocks", "{block}", "Blocks that the mirror remembers.", func(s *rankStats, see telemetry.See) { see(float64(s.mirror.Nodes)) }),
	telemetry.Gauge("kvscout.agent.mirror.blocks.uncertain", "{block}", "Blocks that are held and not published, or not sure to be held.", func(s *rankStats, see telemetry.See) {
		see.Counts(telemetry.LabelState, counts{"waiting": uint64(s.mirror.Waiting), "withheld": uint64(s.mirror.Withheld), "suspect": uint64(s.mirror.Suspect)})
	}),
	telemetry.CountersOf("kvscout.agent.mirror.copies", "{copy}", "Copies of blocks that the engine announced.", telemetry.LabelKind, func(s *rankStats) counts {
		return counts{"stored": s.mirror.Stored, "removed": s.mirror.Removed}
	}),
	telemetry.CountersOf("kvscout.agent.mirror.copies.ignored", "{copy}", "Copies announced of blocks that are not known, or were there already.", telemetry.LabelReason, func(s *rankStats) counts {
		return counts{"unknown_stored": s.mirror.UnknownStored, "unknown_removed": s.mirror.UnknownRemoved, "repeated": s.mirror.Repeated}
	}),
	telemetry.CounterOf("kvscout.agent.mirror.stores.refused", "{event}", "Events of the wrong block size or form.", func(s *rankStats) uint64 { return s.mirror.Refused }),
	telemetry.CounterOf("kvscout.agent.mirror.blocks.dropped", "{block}", "Blocks not remembered because the bound was reached.", func(s *rankStats) uint64 { return s.mirror.Dropped }),
	telemetry.CounterOf("kvscout.agent.mirror.contradictions", "{hash}", "Hashes with two contents, contents with two hashes.", func(s *rankStats) uint64 { return s.mirror.Contradictions }),

	telemetry.CountersOf("kvscout.agent.publish.messages", "{message}", "Messages sent to schedulers.", telemetry.LabelKind, func(s *rankStats) counts {
		return counts{"delta": s.publisher.Deltas, "heartbeat": s.publisher.Heartbeats, "chunk": s.publisher.Chunks}
	}),
	telemetry.CounterOf("kvscout.agent.publish.keys", "{key}", "Block keys sent in deltas.", func(s *rankStats) uint64 { return s.publisher.Keys }),
	telemetry.CounterOf("kvscout.agent.publish.size", "By", "Deltas and heartbeats sent, in bytes.", func(s *rankStats) uint64 { return s.publisher.Bytes }),
	telemetry.CounterOf("kvscout.agent.publish.deltas.dropped", "{delta}", "Deltas not sent, as NATS was away or refused them.", func(s *rankStats) uint64 { return s.publisher.Dropped }),
	telemetry.CounterOf("kvscout.agent.publish.errors", "{message}", "Messages that NATS did not take.", func(s *rankStats) uint64 { return s.publisher.Errors }),
	telemetry.CountersOf("kvscout.agent.publish.snapshots", "{request}", "Requests for snapshots.", telemetry.LabelOutcome, func(s *rankStats) counts {
		return counts{"answered": s.publisher.Snapshots, "refused": s.publisher.Refused}
	}),
	telemetry.CounterOf("kvscout.agent.publish.verdicts.unreadable", "{message}", "Verdicts of schedulers that cannot be read, or of too many schedulers.", func(s *rankStats) uint64 { return s.publisher.Unreadable }),

	telemetry.Counter("kvscout.agent.state.writes", "{file}", "State files written.", func(s *rankStats, see telemetry.See) {
		if s.saves {
			see.Counts(telemetry.LabelOutcome, counts{"ok": s.saved.Written, "error": s.saved.Failed})
		}
	}),
	telemetry.Counter("kvscout.agent.state.loads", "{file}", "State files of an earlier process, by what became of them.", func(s *rankStats, see telemetry.See) {
		if s.saves {
			see.Counts(telemetry.LabelOutcome, counts{"refused": s.saved.Refused, "resumed": s.saved.Resumed, "disproved": s.saved.Disproved})
		}
	}),
	telemetry.Gauge("kvscout.agent.state.size", "By", "Size of the newest state file.", func(s *rankStats, see telemetry.See) {
		if s.saves {
			see(float64(s.saved.Bytes))
		}
	}),
}
