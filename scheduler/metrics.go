package scheduler

import (
	"context"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

// meters are the instruments that are told of each answer. Everything else is
// read from the rooms' Stats when somebody asks.
type meters struct {
	decisions *decisions
	reports   metric.Int64Counter
	queued    metric.Float64Histogram
	calls     *calls
	log       callLog
	spans     *spans
}

// durations in seconds, from a decision that is a lookup to an engine that
// renders.
var durations = []float64{
	.000001, .000002, .000005, .00001, .00002, .00005, .0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100,
}

// waits in seconds, for requests that wait for room.
var waits = []float64{.001, .01, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100, 300, 1000, 3600}

func newMeters(s *Scheduler) (*meters, error) {
	b := &builder{meter: s.telemetry.Meters.Meter(telemetry.Scope)}
	m := &meters{
		decisions: newDecisions(b),
		reports:   b.counter(telemetry.SchedulerReports, "{report}", "Calls of Report."),
		queued:    b.histogram(telemetry.SchedulerQueueDuration, "s", "How long requests waited that got a place.", waits),
		calls:     newCalls(b, callLog{s.cfg.Log.With("component", "calls")}),
		log:       callLog{s.cfg.Log.With("component", "calls")},
		spans:     &spans{tracer: s.telemetry.Tracers.Tracer(telemetry.Scope), propagator: s.telemetry.Propagator},
	}
	b.observeFleet(s)
	b.observePicker(s)
	b.observeIndex(s)
	b.observeIngest(s)
	b.observeReplicas(s)
	b.observeIntake(s)
	b.observeRPC(s)
	b.observeQueue(s)
	return m, b.err
}

// decided counts an answer, and records the spans of a request.
func (m *meters) decided(ctx context.Context, d rpc.Decided) {
	if trace.SpanFromContext(ctx).IsRecording() {
		m.spans.record(ctx, &d)
	}
	if d.Decision == nil {
		return
	}
	m.log.decided(ctx, &d)
	m.decisions.decided(ctx, &d)
	if d.Queues {
		m.queued.Record(ctx, d.Queued.Seconds())
	}
}

func (m *meters) reported(o api.Outcome) {
	m.reports.Add(context.Background(), 1, metric.WithAttributes(attribute.String(telemetry.LabelOutcome, outcomeName(o))))
}

// outcomeName is the word for it in metrics, spans and logs.
func outcomeName(o api.Outcome) string {
	return strings.ToLower(strings.TrimPrefix(o.String(), "OUTCOME_"))
}

func (b *builder) observeFleet(s *Scheduler) {
	b.gauge(telemetry.SchedulerMembers, "{member}", "Members by trust in their cache state.", func(see see) {
		counts := [...]int64{fleet.Unknown: 0, fleet.Approximate: 0, fleet.Syncing: 0, fleet.Exact: 0}
		view, now := s.fleet.View(), time.Now()
		for _, m := range view.Members {
			counts[view.Believe(m, now).Trust]++
		}
		for t, n := range counts {
			see(n, telemetry.LabelTrust, strings.ToLower(fleet.Trust(t).String()))
		}
	})
	b.gauge(telemetry.SchedulerAddresses, "{member}", "Members with something wrong with their address.", func(see see) {
		for kind, n := range s.addresses.count() {
			see(n, telemetry.LabelEvent, kind)
		}
	})
	b.gauge(telemetry.SchedulerLearned, "{member}", "Members whose speed is their own.", func(see see) {
		n := int64(0)
		for _, m := range s.fleet.View().Members {
			if s.picker.Speed(m).Learned {
				n++
			}
		}
		see(n, "", "")
	})
	b.gauge(telemetry.SchedulerPrefillSpeed, "{token}", "Tokens that a member computes in a second, the fixed part apart.", func(see see) {
		var speeds []float64
		for _, m := range s.fleet.View().Members {
			speeds = append(speeds, 1000/s.picker.Speed(m).B)
		}
		if len(speeds) == 0 {
			return
		}
		slices.Sort(speeds)
		see(int64(speeds[0]), telemetry.LabelStat, "min")
		see(int64(speeds[len(speeds)/2]), telemetry.LabelStat, "median")
		see(int64(speeds[len(speeds)-1]), telemetry.LabelStat, "max")
	})
	b.gauge(telemetry.SchedulerOpenDecisions, "{decision}", "Decisions that can still be reported.", func(see see) {
		see(int64(s.fleet.Stats().Decisions), "", "")
	})
	b.flag(telemetry.SchedulerReady, "1 when all pictures are exact, or the wait for that is over.", s.ready)
	b.flag(telemetry.SchedulerConnected, "1 while members can be heard over NATS.", s.hears)
	b.events(telemetry.SchedulerFleetEvents, "What became of decisions and members.", func(see see) {
		st := s.fleet.Stats()
		see(int64(st.Decided), telemetry.LabelEvent, "decided")
		see(int64(st.Expired), telemetry.LabelEvent, "expired")
		see(int64(st.Evicted), telemetry.LabelEvent, "evicted")
		see(int64(st.Refused), telemetry.LabelEvent, "refused_member")
		see(int64(st.Failures), telemetry.LabelEvent, "failure")
		see(int64(st.Paused), telemetry.LabelEvent, "left_out")
	})
	// Members come and go, and take what was reported of them along: the sums
	// are those of the members that are there.
	for _, sum := range []struct {
		name, help string
		of         func(fleet.Reported) uint64
	}{
		{telemetry.SchedulerPromptTokens, "Prompt tokens by the engines' own count, as reported, of members that are there.",
			func(r fleet.Reported) uint64 { return r.PromptTokens }},
		{telemetry.SchedulerCachedTokens, "Cached prompt tokens by the engines' own count, as reported, of members that are there.",
			func(r fleet.Reported) uint64 { return r.CachedTokens }},
		{telemetry.SchedulerPredictedTokens, "Cached prompt tokens that were predicted for the same requests.",
			func(r fleet.Reported) uint64 { return r.PredictedTokens }},
	} {
		b.gauge(sum.name, "{token}", sum.help, func(see see) {
			total := uint64(0)
			for _, m := range s.fleet.View().Members {
				total += sum.of(m.Reported())
			}
			see(int64(total), "", "")
		})
	}
}

func (b *builder) observePicker(s *Scheduler) {
	b.seconds(telemetry.SchedulerConfirm, "How long after its first token is due a prompt that was just sent is believed to be cached without an event.", func() float64 {
		return s.picker.Stats().Confirm.Seconds()
	})
	b.gauge(telemetry.SchedulerSentBlocks, "{block}", "Blocks that members without an exact cache state are believed to hold, as they were sent there.", func(see see) {
		see(int64(s.picker.Stats().Sent.Blocks), "", "")
	})
	b.events(telemetry.SchedulerSentEvents, "What was noted of prompts sent to members without an exact cache state, or for policies that go by it.", func(see see) {
		st := s.picker.Stats().Sent
		see(int64(st.Added), telemetry.LabelEvent, "added")
		see(int64(st.Evicted), telemetry.LabelEvent, "evicted")
		see(int64(st.Resets), telemetry.LabelEvent, "reset")
		see(int64(st.Moved), telemetry.LabelEvent, "moved")
		see(int64(st.Copied), telemetry.LabelEvent, "copied")
	})
	b.tokens(telemetry.SchedulerHitTokens, "Prefixes found cached, of requests that were picked.", func(see see) {
		l := s.picker.Stats().Ladder
		see(int64(l.Prompt), telemetry.LabelStage, "prompt")
		see(int64(l.Ideal), telemetry.LabelStage, "ideal")
		see(int64(l.Feasible), telemetry.LabelStage, "feasible")
		see(int64(l.Routed), telemetry.LabelStage, "routed")
	})
	b.tokens(telemetry.SchedulerDelivered, "Cached tokens of requests that were reported.", func(see see) {
		d := s.fleet.Stats().Delivered
		see(int64(d.Prompt), telemetry.LabelStage, "prompt")
		see(int64(d.Predicted), telemetry.LabelStage, "predicted")
		see(int64(d.Cached), telemetry.LabelStage, "delivered")
	})
	b.tokens(telemetry.SchedulerLostTokens, "Cached tokens that a request did not get.", func(see see) {
		l := s.picker.Stats().Ladder
		see(int64(l.Unavailable), telemetry.LabelStage, "unavailable")
		see(int64(l.Diverted), telemetry.LabelStage, "diversion")
		see(int64(s.fleet.Stats().Delivered.Missing), telemetry.LabelStage, "index")
	})
	broken := b.observable(telemetry.SchedulerStickyBroken, "{request}", "Requests that left their session's last member.")
	b.register(func(o metric.Observer) {
		for reason, n := range s.picker.Stats().Left {
			if left := policy.Left(reason); left != policy.Stayed {
				o.ObserveInt64(broken, int64(n), metric.WithAttributes(attribute.String(telemetry.LabelReason, left.String())))
			}
		}
	}, broken)
}

func (b *builder) observeIndex(s *Scheduler) {
	b.gauge(telemetry.SchedulerIndexBlocks, "{block}", "Distinct blocks in the index.", func(see see) {
		see(s.index.Stats().Blocks, "", "")
	})
	b.gauge(telemetry.SchedulerIndexEntries, "{entry}", "Blocks in the index, counted for each member and lane.", func(see see) {
		see(s.index.Stats().Memberships, "", "")
	})
	b.gauge(telemetry.SchedulerIndexBytes, "By", "Memory that the index takes.", func(see see) {
		see(s.index.Stats().Bytes, "", "")
	})
	b.events(telemetry.SchedulerIndexEvents, "What the index did not take.", func(see see) {
		st := s.index.Stats()
		see(st.Shed, telemetry.LabelEvent, "shed")
		see(st.Refused, telemetry.LabelEvent, "refused")
	})
}

func (b *builder) observeIngest(s *Scheduler) {
	b.gauge(telemetry.SchedulerSnapshotsAwaited, "{snapshot}", "Snapshots that members were asked for and have not sent.", func(see see) {
		if in := s.ingest.Load(); in != nil {
			see(in.Stats().InFlight, "", "")
		}
	})
	b.gauge(telemetry.SchedulerAwaitedBytes, "By", "Memory for snapshots that are not complete, and deltas that wait for them.", func(see see) {
		if in := s.ingest.Load(); in != nil {
			see(in.Stats().AwaitedBytes, "", "")
		}
	})
	b.events(telemetry.SchedulerIngestEvents, "Messages of the bus and what became of them.", func(see see) {
		in := s.ingest.Load()
		if in == nil {
			return
		}
		st := in.Stats()
		for _, e := range []struct {
			name  string
			count uint64
		}{
			{"delta", st.Deltas}, {"heartbeat", st.Heartbeats}, {"chunk", st.Chunks}, {"key", st.Keys},
			{"epoch", st.Epochs}, {"epoch_back", st.EpochsBack}, {"repeated", st.Repeated}, {"ignored", st.Ignored},
			{"gap", st.Gaps}, {"mismatch", st.Mismatches}, {"resync", st.Resyncs}, {"snapshot", st.Snapshots},
			{"failed_snapshot", st.FailedSnapshots}, {"no_responder", st.NoResponders}, {"overflow", st.Overflows},
			{"malformed", st.Malformed}, {"wrong_version", st.WrongVersion}, {"wrong_member", st.WrongMember},
			{"refused_member", st.RefusedMembers}, {"verdict", st.Verdicts}, {"dropped", st.Dropped},
		} {
			see(int64(e.count), telemetry.LabelEvent, e.name)
		}
	})
}

func (b *builder) observeReplicas(s *Scheduler) {
	b.gauge(telemetry.SchedulerPeers, "{scheduler}", "Other schedulers of the pool that were heard lately.", func(see see) {
		if r := s.replica.Load(); r != nil {
			see(r.Stats().Peers, "", "")
		}
	})
	b.events(telemetry.SchedulerPeerEvents, "What schedulers told each other.", func(see see) {
		r := s.replica.Load()
		if r == nil {
			return
		}
		st := r.Stats()
		for _, e := range []struct {
			name  string
			count uint64
		}{
			{"sent", st.Sent}, {"heard", st.Heard}, {"charge", st.Charges}, {"end", st.Ends}, {"unknown", st.Unknown},
			{"stale", st.Stale}, {"lost", st.Lost}, {"malformed", st.Malformed}, {"unsendable", st.Unsendable}, {"dropped", st.Dropped},
		} {
			see(int64(e.count), telemetry.LabelEvent, e.name)
		}
	})
}

func (b *builder) observeIntake(s *Scheduler) {
	b.events(telemetry.SchedulerIntakePrompts, "Prompts by what the caller sent.", func(see see) {
		st := s.intake.Stats()
		see(int64(st.Tokens), telemetry.LabelSource, "tokens")
		see(int64(st.Keys), telemetry.LabelSource, "keys")
		see(int64(st.Bodies), telemetry.LabelSource, "openai_body")
		see(int64(st.None), telemetry.LabelSource, "none")
	})
	b.events(telemetry.SchedulerIntakeEvents, "What became of prompts that came as text.", func(see see) {
		st := s.intake.Stats()
		see(int64(st.Hits), telemetry.LabelEvent, "hit")
		see(int64(st.Misses), telemetry.LabelEvent, "miss")
		see(int64(st.Shared), telemetry.LabelEvent, "shared")
		see(int64(st.Evicted), telemetry.LabelEvent, "evicted")
		see(int64(st.Unresolved), telemetry.LabelEvent, "unresolved")
	})
	b.gauge(telemetry.SchedulerIntakeCacheBytes, "By", "Memory for prompts that were turned into tokens.", func(see see) {
		see(s.intake.Stats().CacheBytes, "", "")
	})
	calls := b.observable(telemetry.SchedulerIntakeCalls, "{call}", "Requests to engines for tokens.")
	b.register(func(o metric.Observer) {
		for _, c := range s.intake.Stats().Calls {
			o.ObserveInt64(calls, int64(c.Count), metric.WithAttributes(
				attribute.String(telemetry.LabelEndpoint, c.Endpoint), attribute.String(telemetry.LabelOutcome, c.Outcome)))
		}
	}, calls)
}

func (b *builder) observeRPC(s *Scheduler) {
	b.gauge(telemetry.SchedulerWatchers, "{stream}", "Open Watch streams.", func(see see) {
		see(s.rpc.Stats().Watchers, "", "")
	})
	b.events(telemetry.SchedulerRefused, "What was refused because there was too much of it.", func(see see) {
		see(int64(s.rpc.Stats().Refused), telemetry.LabelEvent, "call")
		see(int64(s.refused.Load()), telemetry.LabelEvent, "connection")
	})
	b.events(telemetry.SchedulerPanics, "Calls that ended in a panic.", func(see see) {
		see(int64(s.rpc.Stats().Panics), "", "")
	})
}

func (b *builder) observeQueue(s *Scheduler) {
	b.gauge(telemetry.SchedulerQueueWaiting, "{request}", "Requests that wait for room.", func(see see) {
		see(int64(s.rpc.Stats().Queue.Waiting), "", "")
	})
	b.gauge(telemetry.SchedulerQueueBytes, "By", "Memory for requests that wait.", func(see see) {
		see(s.rpc.Stats().Queue.Bytes, "", "")
	})
	b.events(telemetry.SchedulerQueueEvents, "What became of requests that had to wait.", func(see see) {
		st := s.rpc.Stats().Queue
		see(int64(st.Pushed), telemetry.LabelEvent, "pushed")
		see(int64(st.Admitted), telemetry.LabelEvent, "admitted")
		see(int64(st.Failed), telemetry.LabelEvent, "failed")
		see(int64(st.Cancelled), telemetry.LabelEvent, "cancelled")
		see(int64(st.Displaced), telemetry.LabelEvent, "displaced")
		see(int64(st.Refused), telemetry.LabelEvent, "refused")
	})
	b.gauge(telemetry.SchedulerProfiles, "{profile}", "Profiles of members in use.", func(see see) {
		see(s.profiles.count.Load(), "", "")
	})
	b.events(telemetry.SchedulerProfileEvents, "What became of profiles.", func(see see) {
		see(int64(s.profiles.loads.Load()), telemetry.LabelEvent, "loaded")
		see(int64(s.profiles.refusals.Load()), telemetry.LabelEvent, "refused")
		see(int64(s.picker.Stats().Unmeasured), telemetry.LabelEvent, "unmeasured")
	})
}

// see takes one value, with an attribute unless its key is empty.
type see func(value int64, key, attr string)

// builder makes instruments and keeps the first error.
type builder struct {
	meter metric.Meter
	err   error
}

func (b *builder) keep(err error) {
	if b.err == nil {
		b.err = err
	}
}

func (b *builder) counter(name, unit, help string) metric.Int64Counter {
	c, err := b.meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
	b.keep(err)
	return c
}

func (b *builder) floatCounter(name, unit, help string) metric.Float64Counter {
	c, err := b.meter.Float64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
	b.keep(err)
	return c
}

func (b *builder) histogram(name, unit, help string, bounds []float64) metric.Float64Histogram {
	h, err := b.meter.Float64Histogram(name, metric.WithUnit(unit), metric.WithDescription(help),
		metric.WithExplicitBucketBoundaries(bounds...))
	b.keep(err)
	return h
}

func (b *builder) observable(name, unit, help string) metric.Int64ObservableCounter {
	c, err := b.meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(help))
	b.keep(err)
	return c
}

// events is a counter that read fills.
func (b *builder) events(name, help string, read func(see)) {
	c := b.observable(name, "{event}", help)
	b.register(func(o metric.Observer) { read(seeing(o, c)) }, c)
}

// tokens is a counter of tokens that read fills.
func (b *builder) tokens(name, help string, read func(see)) {
	c := b.observable(name, "{token}", help)
	b.register(func(o metric.Observer) { read(seeing(o, c)) }, c)
}

// gauge is a gauge that read fills.
func (b *builder) gauge(name, unit, help string, read func(see)) {
	g, err := b.meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(help))
	b.keep(err)
	b.register(func(o metric.Observer) { read(seeing(o, g)) }, g)
}

// seconds is a gauge of a time that read returns.
func (b *builder) seconds(name, help string, read func() float64) {
	g, err := b.meter.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(help))
	b.keep(err)
	b.register(func(o metric.Observer) { o.ObserveFloat64(g, read()) }, g)
}

// flag is a gauge of 1 and 0.
func (b *builder) flag(name, help string, is func() bool) {
	b.gauge(name, "", help, func(see see) {
		value := int64(0)
		if is() {
			value = 1
		}
		see(value, "", "")
	})
}

func (b *builder) register(read func(metric.Observer), of metric.Observable) {
	if b.err != nil {
		return
	}
	_, err := b.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		read(o)
		return nil
	}, of)
	b.keep(err)
}

func seeing(o metric.Observer, of metric.Int64Observable) see {
	return func(value int64, key, attr string) {
		if key == "" {
			o.ObserveInt64(of, value)
			return
		}
		o.ObserveInt64(of, value, metric.WithAttributes(attribute.String(key, attr)))
	}
}
