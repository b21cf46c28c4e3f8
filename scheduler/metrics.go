package scheduler

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/bus"
	"github.com/kvscout/kvscout/scheduler/internal/cluster"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/ingest"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/replica"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

// meter makes the instruments that are read when somebody asks. Those that are
// told of each answer are observe's.
func meter(s *Scheduler) error {
	return telemetry.Observe(s.telemetry.Meters.Meter(telemetry.Scope), instruments, func(yield func(*counted, ...string)) { yield(s.counted()) })
}

// counted is what all packages count, as of one moment.
type counted struct {
	*Scheduler
	now     time.Time
	view    *fleet.View
	fleet   fleet.Stats
	picker  pick.Stats
	index   index.Stats
	intake  intake.Stats
	rpc     rpc.Stats
	ingest  ingest.Stats // zero before there is a connection
	replica replica.Stats
	books   books.Stats
	cluster cluster.Stats // zero where Kubernetes is not asked
}

// spread tells of the members' values no more than the least, the middle and the
// most.
func (s *counted) spread(see telemetry.See, of func(*fleet.Member) float64) {
	var values []float64
	for _, m := range s.view.Members {
		values = append(values, of(m))
	}
	if n := len(values); n > 0 {
		slices.Sort(values)
		see(values[0], telemetry.LabelStat, "min")
		see(values[n/2], telemetry.LabelStat, "median")
		see(values[n-1], telemetry.LabelStat, "max")
	}
}

func (s *Scheduler) counted() *counted {
	st := &counted{
		Scheduler: s, now: time.Now(), view: s.fleet.View(), fleet: s.fleet.Stats(), picker: s.picker.Stats(),
		index: s.index.Stats(), intake: s.intake.Stats(), rpc: s.rpc.Stats(), books: s.books.Stats(),
	}
	if in := s.ingest.Load(); in != nil {
		st.ingest = in.Stats()
	}
	if s.cluster != nil {
		st.cluster = s.cluster.Stats()
	}
	if r := s.replica.Load(); r != nil {
		st.replica = r.Stats()
	}
	return st
}

type counts = map[string]uint64

// instruments are read from the packages' Stats when somebody asks.
var instruments = []telemetry.Instrument[*counted]{
	telemetry.Gauge("kvscout.scheduler.build_info", "", "1, by version, commit and Go version of the program.", func(s *counted, see telemetry.See) {
		b := settings.Built()
		see(1, "version", cmp.Or(s.cfg.Version, b.Version), "commit", b.Commit, "goversion", b.Go)
	}),
	telemetry.Gauge("kvscout.scheduler.ready", "", "1 when all cache states are exact, or the wait for that is over.", func(s *counted, see telemetry.See) { see.Flag(s.ready()) }),
	telemetry.Gauge("kvscout.scheduler.connected", "", "1 while members' messages are received over NATS.", func(s *counted, see telemetry.See) { see.Flag(s.hears()) }),

	telemetry.Gauge("kvscout.scheduler.members", "{member}", "Members by trust in their cache state.", func(s *counted, see telemetry.See) {
		n := counts{"unknown": 0, "approximate": 0, "syncing": 0, "exact": 0}
		for _, m := range s.view.Members {
			n[strings.ToLower(s.view.Believe(m, s.now).Trust.String())]++
		}
		see.Counts(telemetry.LabelTrust, n)
	}),
	telemetry.Gauge("kvscout.scheduler.members.learned", "{member}", "Members whose speed is their own.", func(s *counted, see telemetry.See) {
		n := 0
		for _, m := range s.view.Members {
			if s.Scheduler.picker.Speed(m).Learned {
				n++
			}
		}
		see(float64(n))
	}),
	telemetry.Gauge("kvscout.scheduler.addresses", "{member}", "Members with something wrong with their address.", func(s *counted, see telemetry.See) { see.Counts(telemetry.LabelProblem, s.members.Problems()) }),
	telemetry.Gauge("kvscout.scheduler.members.withdrawn", "{member}", "Members that are picked only where no other can be, because of their pod, by why.", func(s *counted, see telemetry.See) {
		n := make(counts)
		for w := fleet.InService + 1; w < fleet.Withdrawals; w++ {
			n[w.Label()] = 0
		}
		for _, m := range s.view.Members {
			if m.Withdrawn != fleet.InService {
				n[m.Withdrawn.Label()]++
			}
		}
		see.Counts(telemetry.LabelReason, n)
	}),
	telemetry.Gauge("kvscout.scheduler.kubernetes.lost", "{list}", "Lists of Kubernetes that are to be followed and are not at present: of pods, of nodes, and the inference pool.", func(s *counted, see telemetry.See) {
		see.Counts(telemetry.LabelKind, counts{"pod": uint64(s.cluster.LostPods), "node": uint64(s.cluster.LostNodes), "inference_pool": uint64(s.cluster.LostPool)})
	}),
	telemetry.Gauge("kvscout.scheduler.kubernetes.objects", "{object}", "Pods, and cordoned nodes, that Kubernetes has.", func(s *counted, see telemetry.See) {
		see.Counts(telemetry.LabelKind, counts{"pod": uint64(s.cluster.Pods), "cordoned_node": uint64(s.cluster.Cordoned)})
	}),
	telemetry.Counter("kvscout.scheduler.kubernetes.events", "{event}", "Changes of pods and nodes that Kubernetes told of, and times that it could not be asked.", func(s *counted, see telemetry.See) {
		see.Counts(telemetry.LabelOutcome, counts{"received": s.cluster.Events, "failed": s.cluster.Losses})
	}),
	telemetry.CountersOf("kvscout.scheduler.nats.tokens", "{token}", "Tokens of pods for the embedded NATS server that were reviewed, by what became of them; cut: a connection whose token was no longer valid.", telemetry.LabelOutcome, func(s *counted) counts {
		var st bus.TokenStats
		if b := s.bus.Load(); b != nil {
			st = b.TokenStats()
		}
		return counts{"accepted": st.Accepted, "refused": st.Refused, "unknown": st.Unknown, "cut": st.Cut}
	}),
	telemetry.Gauge("kvscout.scheduler.prefill.tokens_per_second", "", "Tokens that members compute in a second, the fixed part of a prefill apart.", func(s *counted, see telemetry.See) {
		s.spread(see, func(m *fleet.Member) float64 { return 1000 / s.Scheduler.picker.Speed(m).B })
	}),
	telemetry.Gauge("kvscout.scheduler.promised.excess", "{token}", "Tokens that were promised beyond what the engine then found in its cache, the mean of a member's last 32 reports.", func(s *counted, see telemetry.See) {
		s.spread(see, func(m *fleet.Member) float64 { return m.Bias().Mean })
	}),
	telemetry.CounterOf("kvscout.scheduler.member.biases", "{bias}", "Times that reports began to disagree with a member's promises in the same way.", func(s *counted) uint64 { return s.fleet.Biased }),
	telemetry.CounterOf("kvscout.scheduler.member.failures", "{report}", "Reports that a member failed.", func(s *counted) uint64 { return s.fleet.Failures }),
	telemetry.CounterOf("kvscout.scheduler.member.pauses", "{pause}", "Times that a member was left out for its failures.", func(s *counted) uint64 { return s.fleet.Paused }),

	telemetry.CounterOf("kvscout.scheduler.reservations", "{reservation}", "Reservations made.", func(s *counted) uint64 { return s.fleet.Decided }),
	telemetry.CountersOf("kvscout.scheduler.reservations.lost", "{reservation}", "Reservations that no report ended.", telemetry.LabelReason, func(s *counted) counts {
		return counts{"expired": s.fleet.Expired, "evicted": s.fleet.Evicted}
	}),
	telemetry.GaugeOf("kvscout.scheduler.decisions.open", "{decision}", "Decisions that can still be reported.", func(s *counted) int { return s.fleet.Decisions }),
	telemetry.Counter("kvscout.scheduler.sticky_broken", "{request}", "Requests that left their session's last member.", func(s *counted, see telemetry.See) {
		for reason, n := range s.picker.Left {
			if left := policy.Left(reason); left != policy.Stayed {
				see(float64(n), telemetry.LabelReason, left.String())
			}
		}
	}),
	telemetry.Counter("kvscout.scheduler.hit.tokens", "{token}", "Prefixes found cached, of requests that were picked.", func(s *counted, see telemetry.See) {
		h := s.picker.HitTokens
		see.Counts(telemetry.LabelStage, counts{"prompt": h.Prompt, "ideal": h.Ideal, "feasible": h.Feasible, "routed": h.Routed, "least_load": h.LeastLoad})
	}),
	telemetry.Counter("kvscout.scheduler.delivered.tokens", "{token}", "Tokens of requests that were reported.", func(s *counted, see telemetry.See) {
		d := s.fleet.Delivered
		see.Counts(telemetry.LabelStage, counts{"prompt": d.Prompt, "predicted": d.Predicted, "delivered": d.Cached})
	}),
	telemetry.CounterOf("kvscout.scheduler.used.tokens", "{token}", "Prompt tokens that the engines of reported requests found cached.", func(s *counted) uint64 { return s.books.Tokens[books.Used] }),
	telemetry.Counter("kvscout.scheduler.lost.tokens", "{token}", "Prompt tokens that the engines of reported requests did not find cached, by cause.", func(s *counted, see telemetry.See) {
		for cause, n := range s.books.Tokens {
			if c := books.Cause(cause); c != books.Used {
				see(float64(n), telemetry.LabelCause, c.String())
			}
		}
	}),
	telemetry.Counter("kvscout.scheduler.evicted.tokens", "{token}", "Evicted tokens among the lost, by how large a cache would have kept them, in multiples of the member's GPU pool.", func(s *counted, see telemetry.See) {
		see.Counts(telemetry.LabelKept, s.books.Evicted.BySize())
	}),
	telemetry.CounterOf("kvscout.scheduler.booked.requests", "{request}", "Reported requests whose tokens are accounted for.", func(s *counted) uint64 { return s.books.Requests }),
	telemetry.CounterOf("kvscout.scheduler.unbooked.requests", "{request}", "Reported requests that were not picked here, or too long ago.", func(s *counted) uint64 { return s.books.Unbooked }),
	telemetry.Counter("kvscout.scheduler.diversion.cost", "s", "What the members that had more would have cost beyond those that were picked, of requests that lost tokens to that.", func(s *counted, see telemetry.See) { see(s.books.BusyMS / 1000) }),
	telemetry.GaugeOf("kvscout.scheduler.books.memory", "By", "Memory for what was seen and for requests that wait for their report.", func(s *counted) int { return s.books.Bytes }),
	telemetry.Gauge("kvscout.scheduler.predictions.confirm", "s", "How long after its first token is due a prompt that was just sent is believed to be cached without an event.", func(s *counted, see telemetry.See) { see(s.picker.Confirm.Seconds()) }),
	telemetry.GaugeOf("kvscout.scheduler.sent.blocks", "{block}", "Blocks that members without an exact cache state are believed to hold, as they were sent there.", func(s *counted) int { return s.picker.Sent.Blocks }),
	telemetry.CounterOf("kvscout.scheduler.sent.prompts", "{prompt}", "Prompts noted as sent to members without an exact cache state, or for policies that go by it.", func(s *counted) uint64 { return s.picker.Sent.Added }),
	telemetry.CounterOf("kvscout.scheduler.sent.blocks.evicted", "{block}", "Blocks of such prompts that were dropped at the bound.", func(s *counted) uint64 { return s.picker.Sent.Evicted }),
	telemetry.CounterOf("kvscout.scheduler.sent.resets", "{reset}", "Members whose sent prompts were dropped, as their engine began anew.", func(s *counted) uint64 { return s.picker.Sent.Resets }),
	telemetry.CountersOf("kvscout.scheduler.sent.pieces", "{piece}", "Pieces of prompts that were given to another member.", telemetry.LabelOutcome, func(s *counted) counts {
		return counts{"moved": s.picker.Sent.Moved, "copied": s.picker.Sent.Copied}
	}),

	telemetry.GaugeOf("kvscout.scheduler.index.blocks", "{block}", "Distinct blocks in the index.", func(s *counted) int64 { return s.index.Blocks }),
	telemetry.GaugeOf("kvscout.scheduler.index.entries", "{entry}", "Blocks in the index, counted for each member and lane.", func(s *counted) int64 { return s.index.Memberships }),
	telemetry.GaugeOf("kvscout.scheduler.index.memory", "By", "Memory that the index takes.", func(s *counted) int64 { return s.index.Bytes }),
	telemetry.CounterOf("kvscout.scheduler.index.entries.shed", "{entry}", "Entries left out at the memory bound.", func(s *counted) int64 { return s.index.Shed }),
	telemetry.CounterOf("kvscout.scheduler.index.refused", "{call}", "Changes of a member or lane out of range.", func(s *counted) int64 { return s.index.Refused }),

	telemetry.CountersOf("kvscout.scheduler.ingest.messages", "{message}", "Messages of agents that were read.", telemetry.LabelKind, func(s *counted) counts {
		return counts{"delta": s.ingest.Deltas, "heartbeat": s.ingest.Heartbeats, "chunk": s.ingest.Chunks}
	}),
	telemetry.Counter("kvscout.scheduler.ingest.messages.discarded", "{message}", "Messages of agents that changed nothing.", func(s *counted, see telemetry.See) {
		i := &s.ingest
		see.Counts(telemetry.LabelReason, counts{"malformed": i.Malformed, "wrong_version": i.WrongVersion, "wrong_member": i.WrongMember,
			"repeated": i.Repeated, "ignored": i.Ignored, "dropped": i.Dropped})
	}),
	telemetry.CounterOf("kvscout.scheduler.ingest.keys", "{key}", "Block keys stored and removed.", func(s *counted) uint64 { return s.ingest.Keys }),
	telemetry.CounterOf("kvscout.scheduler.ingest.epochs", "{epoch}", "Incarnations of engines that began.", func(s *counted) uint64 { return s.ingest.Epochs }),
	telemetry.CountersOf("kvscout.scheduler.ingest.faults", "{fault}", "What showed that a cache state is not its agent's.", telemetry.LabelKind, func(s *counted) counts {
		return counts{"gap": s.ingest.Gaps, "mismatch": s.ingest.Mismatches, "epoch_back": s.ingest.EpochsBack}
	}),
	telemetry.CounterOf("kvscout.scheduler.ingest.resyncs", "{resync}", "Cache states that were forgotten, to be fetched again.", func(s *counted) uint64 { return s.ingest.Resyncs }),
	telemetry.Counter("kvscout.scheduler.ingest.snapshots", "{snapshot}", "Snapshots that members were asked for, by what became of them.", func(s *counted, see telemetry.See) {
		i := &s.ingest
		see.Counts(telemetry.LabelOutcome, counts{"complete": i.Snapshots, "no_responder": i.NoResponders, "overflow": i.Overflows, "failed": i.FailedSnapshots - i.NoResponders - i.Overflows})
	}),
	telemetry.GaugeOf("kvscout.scheduler.ingest.snapshots.awaited", "{snapshot}", "Snapshots that members were asked for and have not sent.", func(s *counted) int64 { return s.ingest.InFlight }),
	telemetry.GaugeOf("kvscout.scheduler.ingest.snapshots.memory", "By", "Memory for snapshots that are not complete, and deltas that wait for them.", func(s *counted) int64 { return s.ingest.AwaitedBytes }),
	telemetry.CounterOf("kvscout.scheduler.ingest.announcements.refused", "{announcement}", "Announcements of members that were not taken up.", func(s *counted) uint64 { return s.ingest.RefusedMembers }),
	telemetry.CounterOf("kvscout.scheduler.ingest.verdicts", "{message}", "Verdicts sent to agents.", func(s *counted) uint64 { return s.ingest.Verdicts }),

	telemetry.GaugeOf("kvscout.scheduler.peers", "{scheduler}", "Other schedulers of the pool that sent something lately.", func(s *counted) int64 { return s.replica.Peers }),
	telemetry.Counter("kvscout.scheduler.peer.messages", "{message}", "Messages between schedulers, by what became of them.", func(s *counted, see telemetry.See) {
		r := &s.replica
		see.Counts(telemetry.LabelOutcome, counts{"sent": r.Sent, "received": r.Received, "lost": r.Lost, "malformed": r.Malformed, "unsendable": r.Unsendable})
	}),
	telemetry.CountersOf("kvscout.scheduler.peer.reservations", "{reservation}", "Reservations that other schedulers made, by what became of them here.", telemetry.LabelOutcome, func(s *counted) counts {
		return counts{"adopted": s.replica.Reservations, "unknown": s.replica.Unknown, "stale": s.replica.Stale}
	}),
	telemetry.CounterOf("kvscout.scheduler.peer.ends", "{report}", "Reports that other schedulers passed on.", func(s *counted) uint64 { return s.replica.Ends }),
	telemetry.CounterOf("kvscout.scheduler.peer.dropped", "{record}", "Reservations and reports that were not passed on, because there were too many.", func(s *counted) uint64 { return s.replica.Dropped }),

	telemetry.Counter("kvscout.scheduler.intake.prompts", "{prompt}", "Prompts by what the caller sent.", func(s *counted, see telemetry.See) {
		i := &s.intake
		see.Counts(telemetry.LabelSource, counts{"tokens": i.Tokens, "keys": i.Keys, "openai_body": i.Bodies, "none": i.None})
	}),
	telemetry.CountersOf("kvscout.scheduler.intake.lookups", "{prompt}", "Prompts of text looked up among those turned into tokens; shared: waited for an equal one.", telemetry.LabelOutcome, func(s *counted) counts {
		return counts{"hit": s.intake.Hits, "miss": s.intake.Misses, "shared": s.intake.Shared}
	}),
	telemetry.CounterOf("kvscout.scheduler.intake.evictions", "{entry}", "Prompts dropped from that cache.", func(s *counted) uint64 { return s.intake.Evicted }),
	telemetry.CounterOf("kvscout.scheduler.intake.unresolved", "{prompt}", "Prompts that stayed without tokens.", func(s *counted) uint64 { return s.intake.Unresolved }),
	telemetry.GaugeOf("kvscout.scheduler.intake.memory", "By", "Memory for prompts that were turned into tokens.", func(s *counted) int64 { return s.intake.CacheBytes }),
	telemetry.Counter("kvscout.scheduler.intake.calls", "{call}", "Requests to engines for tokens.", func(s *counted, see telemetry.See) {
		for _, c := range s.intake.Calls {
			see(float64(c.Count), telemetry.LabelEndpoint, c.Endpoint, telemetry.LabelOutcome, c.Outcome)
		}
	}),

	telemetry.GaugeOf("kvscout.scheduler.queue.waiting", "{request}", "Requests that wait for room.", func(s *counted) int { return s.rpc.Queue.Waiting }),
	telemetry.GaugeOf("kvscout.scheduler.queue.memory", "By", "Memory for requests that wait.", func(s *counted) int64 { return s.rpc.Queue.Bytes }),
	telemetry.Counter("kvscout.scheduler.queue.requests", "{request}", "Requests that had to wait, by how that ended.", func(s *counted, see telemetry.See) {
		q := &s.rpc.Queue
		see.Counts(telemetry.LabelOutcome, counts{"admitted": q.Admitted, "failed": q.Failed, "cancelled": q.Cancelled, "displaced": q.Displaced, "refused": q.Refused})
	}),
	telemetry.GaugeOf("kvscout.scheduler.profiles", "{profile}", "Profiles of members in use.", func(s *counted) int64 { return s.profiles.Stats().Profiles }),
	telemetry.CountersOf("kvscout.scheduler.profiles.loads", "{load}", "Times that profiles were read.", telemetry.LabelOutcome, func(s *counted) counts {
		return counts{"ok": s.profiles.Stats().Loaded, "refused": s.profiles.Stats().Refused}
	}),
	telemetry.CounterOf("kvscout.scheduler.profiles.unmeasured", "{candidate}", "Candidates whose profile says nothing of the request's lengths.", func(s *counted) uint64 { return s.picker.Unmeasured }),

	telemetry.Counter("kvscout.scheduler.gateway.requests", "{request}", "Requests at the gateway by what became of them.", func(s *counted, see telemetry.See) {
		for outcome, n := range s.gateway.Stats().Ended() {
			see(float64(n), telemetry.LabelOutcome, outcome.String())
		}
	}),
	telemetry.GaugeOf("kvscout.scheduler.gateway.open", "{request}", "Requests at the gateway under way.", func(s *counted) int64 { return s.gateway.Stats().Open }),
	telemetry.GaugeOf("kvscout.scheduler.gateway.memory", "By", "Memory for bodies of the gateway's requests that no engine has answered to.", func(s *counted) int64 { return s.gateway.Stats().Bytes }),
	telemetry.Counter("kvscout.scheduler.extproc.requests", "{request}", "Requests of gateways by what became of them.", func(s *counted, see telemetry.See) {
		for outcome, n := range s.extproc.Stats().Ended() {
			see(float64(n), telemetry.LabelOutcome, outcome.String())
		}
	}),
	telemetry.GaugeOf("kvscout.scheduler.extproc.open", "{request}", "Requests of gateways under way.", func(s *counted) int64 { return s.extproc.Stats().Open }),
	telemetry.GaugeOf("kvscout.scheduler.extproc.memory", "By", "Memory for bodies of gateways' requests that have not gone on.", func(s *counted) int64 { return s.extproc.Stats().Bytes }),
	telemetry.GaugeOf("kvscout.scheduler.watchers", "{stream}", "Open WatchMembers streams.", func(s *counted) int64 { return s.rpc.Watchers }),
	telemetry.CounterOf("kvscout.scheduler.calls.refused", "{call}", "Calls beyond the bound.", func(s *counted) uint64 { return s.rpc.Refused }),
	telemetry.CounterOf("kvscout.scheduler.connections.refused", "{connection}", "Connections beyond the bound.", func(s *counted) uint64 { return s.refused.Load() }),
	telemetry.CounterOf("kvscout.scheduler.panics", "{call}", "Calls that ended in a panic.", func(s *counted) uint64 { return s.rpc.Panics }),
}
