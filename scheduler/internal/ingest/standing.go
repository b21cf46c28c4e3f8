package ingest

import (
	"log/slog"
	"time"

	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

const (
	// missedBeats is how many heartbeats may be missing before a member is said to
	// be silent: as many as make its cache state count as the last known one.
	missedBeats = 3
	// rivalSteps back of the epoch within rivalWithin mean that two agents speak
	// for one member: one that starts anew goes back once at most, when its clock
	// was set.
	rivalSteps  = 3
	rivalWithin = 10 * time.Second
)

// standing is what people were last told of a member, so that each change is
// told once.
type standing struct {
	known       bool // anything was told of the trust
	trust       fleet.Trust
	since       time.Time // of trust
	silent      bool
	sleeping    bool
	unreachable bool
	withdrawn   fleet.Withdrawal

	interval     time.Duration // between heartbeats, as announced
	pod, address string        // of the newest heartbeat
	rivals       rivals
}

// rivals notices epochs that go back and forth.
type rivals struct {
	epoch  uint64
	back   int
	since  time.Time // of the first step back that counts
	logged bool
}

// step takes the epoch of a heartbeat and tells when there are surely two who
// send them: once, until they were not noticed for a while.
func (r *rivals) step(epoch uint64, now time.Time) bool {
	went := epoch < r.epoch
	r.epoch = epoch
	if !went {
		return false
	}
	if gone := now.Sub(r.since); r.back > 0 && gone > rivalWithin {
		r.logged = r.logged && gone < 2*rivalWithin
		r.back = 0
	}
	if r.back++; r.back == 1 {
		r.since = now
	}
	if r.back < rivalSteps || r.logged {
		return false
	}
	r.logged = true
	return true
}

// standsAt is the trust that lasts beyond a change that comes in parts or waits
// for its proof, and the reason.
func (m *member) standsAt() (fleet.Trust, string) {
	switch trust := fleet.TrustOf(int32(m.trust)); {
	case trust == fleet.Unknown:
		return trust, m.reason
	case !m.synced:
		return fleet.Syncing, m.why
	case trust == fleet.Exact && m.short:
		return fleet.Approximate, "the index is full"
	default:
		return trust, m.reason
	}
}

// logTrust says when a member's trust is another one than was said.
func (w *worker) logTrust(m *member) {
	trust, reason := m.standsAt()
	if m.said.known && m.said.trust == trust {
		return
	}
	now := time.Now()
	first, lasted := !m.said.known, now.Sub(m.said.since)
	m.said.known, m.said.trust, m.said.since = true, trust, now
	log := w.in.cfg.Log.With("member", m.name, "pod", m.said.pod)
	switch trust {
	case fleet.Exact:
		if first {
			log.Info("member is EXACT", "epoch", m.epoch, "sequence", m.sequence, "blocks", m.held[0].Count)
			return
		}
		log.Info("member is EXACT", "epoch", m.epoch, "sequence", m.sequence, "blocks", m.held[0].Count, "after", lasted.Round(time.Millisecond))
	case fleet.Syncing:
		if first {
			return // it was just announced
		}
		log.Warn("member is SYNCING: its cache gets no credit", "reason", reason,
			"do", "nothing for a few seconds; if it stays, see the agent's log and /readyz")
	case fleet.Approximate:
		log.Warn("member is APPROXIMATE: it may hold blocks that are not known", "reason", reason,
			"do", "look the reason up in docs/OPERATIONS.md; often it is the engine's configuration")
	default:
		log.Warn("member is UNKNOWN: its engine sends no usable events", "reason", reason,
			"do", "check --kv-events-config of the engine and the agent's log; it is picked by load alone meanwhile")
	}
}

// logHeartbeat says what a heartbeat changes beside the trust.
func (w *worker) logHeartbeat(m *member, h *pb.Heartbeat, now time.Time) {
	s, log, info := &m.said, w.in.cfg.Log, h.GetInfo()
	other := s.address
	s.interval, s.pod, s.address = infoOf(h).Heartbeat, info.GetPod(), info.GetAddress()
	if s.rivals.step(h.GetHeader().GetEpoch(), now) {
		log.Error("two agents publish for one member: its cache state cannot be believed", "member", m.name, "pod", s.pod, "address", s.address, "other", other,
			"do", "give each agent its own -pod-uid (or -namespace); look for an agent that was not stopped")
	}
	if s.silent {
		s.silent = false
		log.Info("member sends heartbeats again", "member", m.name, "pod", s.pod, "after", now.Sub(m.lastSeen).Round(time.Millisecond))
	}
	if h.GetLoad() == nil {
		return
	}
	if is := h.GetLoad().GetUnreachable(); is != s.unreachable {
		s.unreachable = is
		logChange(log, is, "engine does not answer its agent: member is not eligible", "engine answers its agent again", "member", m.name, "pod", s.pod, "address", s.address,
			"do", "see whether the engine's process hangs or is gone, and the agent's log")
	}
	if is := h.GetLoad().GetSleeping(); is != s.sleeping {
		s.sleeping = is
		message := "engine is awake"
		if is {
			message = "engine sleeps: member is not eligible"
		}
		log.Info(message, "member", m.name, "pod", s.pod)
	}
}

// logWithdrawal says that the cluster takes a member out of service, or puts it back.
func (w *worker) logWithdrawal(m *member, is fleet.Withdrawal) {
	if is == m.said.withdrawn {
		return
	}
	m.said.withdrawn = is
	log := w.in.cfg.Log.With("member", m.name, "pod", m.said.pod)
	if is == fleet.InService {
		log.Info("member is in service again")
		return
	}
	log.Info("member is withdrawn: it is picked only where no other can be", "reason", is.String())
}

// logChange says that something is wrong, with what to do in the last two attributes,
// or is right again.
func logChange(log *slog.Logger, wrong bool, bad, good string, attributes ...any) {
	if wrong {
		log.Warn(bad, attributes...)
		return
	}
	log.Info(good, attributes[:len(attributes)-2]...)
}

// logSilent says which members have missed their heartbeats. Without the
// connection, or with heartbeats waiting here, it is not they who are silent.
func (w *worker) logSilent(now time.Time) {
	since := w.in.connected.Load()
	if now.Sub(w.swept) < sweepEvery || since == nil || len(w.queue) > 0 {
		return
	}
	w.swept = now
	for _, m := range w.members {
		last := m.lastSeen
		if last.Before(*since) {
			last = *since
		}
		if m.said.silent || now.Sub(last) <= missedBeats*m.said.interval {
			continue
		}
		m.said.silent = true
		w.in.cfg.Log.Warn("member missed its heartbeats: its last known cache state is used", "member", m.name, "pod", m.said.pod, "address", m.said.address,
			"for", now.Sub(m.lastSeen).Round(time.Millisecond),
			"do", "see whether its agent runs and reaches NATS; it is not eligible after 3s and forgotten after -grace")
	}
}
