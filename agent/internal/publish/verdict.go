package publish

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
)

const (
	// maxSchedulers bounds those whose verdicts are remembered; others are
	// dropped and counted.
	maxSchedulers = 64
	// missedVerdicts in a row are the end of a scheduler that says how often it
	// speaks, shortest to longest being what is believed of that.
	missedVerdicts = 3
	shortest       = time.Second
	longest        = time.Minute
	// unheardFor is how long nobody may say anything before that is said.
	verdictFor = missedVerdicts * protocol.VerdictEvery
)

// Opinion is what one scheduler makes of the member.
type Opinion struct {
	// Scheduler is its name.
	Scheduler string
	// Trust in the cache state there, and why it is not EXACT.
	Trust  pb.Trust
	Reason string
	// Refused says why what this agent says does not count there; empty: it does.
	Refused string
}

// verdicts are what the schedulers make of one member.
type verdicts struct {
	log     *slog.Logger
	release string        // of this program
	refused atomic.Uint64 // messages that are no verdict, or one too many

	mu       sync.Mutex // guards all below
	received map[uint64]*received
	since    time.Time // nobody is heard since then; zero: somebody is
	said     bool      // that nobody is
}

// heard is one scheduler.
type received struct {
	Opinion
	until time.Time // it is gone without another verdict
}

func newVerdicts(log *slog.Logger, release string, now time.Time) *verdicts {
	return &verdicts{log: log, release: release, received: make(map[uint64]*received), since: now}
}

// receive takes them as they come.
func (v *verdicts) receive(member string) nats.MsgHandler {
	return func(m *nats.Msg) { v.take(m.Data, member, time.Now()) }
}

func (v *verdicts) take(data []byte, member string, now time.Time) {
	said, err := protocol.ReadVerdict(data, member)
	var version protocol.OtherVersion
	if errors.As(err, &version) && said != nil {
		said.Refused = version.Explain("the scheduler", said.GetRelease(), "this agent", v.release)
		err = nil
	}
	if err != nil {
		v.refused.Add(1)
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	h := v.received[said.GetSender()]
	if h == nil {
		if len(v.received) >= maxSchedulers {
			v.refused.Add(1)
			return
		}
		h = new(received)
		v.received[said.GetSender()] = h
		v.since, v.said = time.Time{}, false
	}
	before := h.Opinion
	h.Opinion = Opinion{Scheduler: said.GetScheduler(), Trust: said.GetTrust(), Reason: said.GetReason(), Refused: said.GetRefused()}
	interval := time.Duration(said.GetIntervalMs()) * time.Millisecond
	h.until = now.Add(missedVerdicts * min(max(interval, shortest), longest))
	log := v.log.With("scheduler", h.Scheduler)
	switch {
	case before.Refused == "" && h.Refused != "":
		log.Error("a scheduler refuses this member: it gets no requests from there", "reason", h.Refused)
	case before.Refused != "" && h.Refused == "":
		log.Info("a scheduler accepts this member again")
	case before.Trust != h.Trust:
		log.Info("a scheduler's trust in this member", "trust", trustName(h.Trust), "reason", h.Reason)
	}
}

// expire forgets who is silent, and says once when nobody is left. It is
// called as often as heartbeats are sent, which verdicts answer.
func (v *verdicts) expire(now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for sender, h := range v.received {
		if now.After(h.until) {
			delete(v.received, sender)
			v.log.Info("a scheduler has gone silent", "scheduler", h.Scheduler)
		}
	}
	switch {
	case len(v.received) > 0:
	case v.since.IsZero():
		v.since = now
	case now.Sub(v.since) >= verdictFor && !v.said:
		v.said = true
		v.log.Warn("no scheduler answers: is one running, on this NATS and for this pool?", "for", now.Sub(v.since).Round(time.Second))
	}
}

// list gives them by name.
func (v *verdicts) list() []Opinion {
	v.mu.Lock()
	defer v.mu.Unlock()
	var list []Opinion
	for _, h := range v.received {
		list = append(list, h.Opinion)
	}
	slices.SortFunc(list, func(a, b Opinion) int { return strings.Compare(a.Scheduler, b.Scheduler) })
	return list
}

func trustName(t pb.Trust) string { return strings.TrimPrefix(t.String(), "TRUST_") }
