package agent

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/publish"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/protocol/settings"
)

// Status is what /readyz and /believed say.
type Status struct {
	// Ready: the engine has answered, and its ranks are followed. It stays so
	// whatever becomes of NATS or the schedulers: an engine serves without them.
	Ready bool `json:"ready"`
	// Believed: each rank is taken at its word by a scheduler at least.
	Believed bool   `json:"believed"`
	Reason   string `json:"reason,omitempty"` // when it is not ready, or not believed
	NATS     string `json:"nats"`
	// Address that the members announce, and why others cannot reach it.
	Address string       `json:"address"`
	Warning string       `json:"warning,omitempty"`
	Engine  engineStatus `json:"engine"`
	Ranks   []RankStatus `json:"ranks"`
}

// RankStatus is one member.
type RankStatus struct {
	Member    string            `json:"member"`
	Trust     string            `json:"trust"`
	Reason    string            `json:"reason,omitempty"` // when trust is not EXACT
	Epoch     uint64            `json:"epoch"`
	Connected bool              `json:"connected"`
	Batches   uint64            `json:"engine_batches"`
	BlockSize int               `json:"block_size"`
	Held      [mirror.Lanes]int `json:"held"` // blocks on gpu, host, disk lane
	// Schedulers that say what they make of it, and whether one believes it.
	Believed   bool              `json:"believed"`
	Schedulers []SchedulerStatus `json:"schedulers"`
	disbelief  string
}

// SchedulerStatus is what one scheduler makes of a member.
type SchedulerStatus struct {
	Scheduler string `json:"scheduler"`
	Trust     string `json:"trust"`
	Reason    string `json:"reason,omitempty"`  // when its trust is not EXACT
	Refused   string `json:"refused,omitempty"` // why nothing that the agent says counts there
}

// Status of the agent.
func (a *Agent) Status() Status {
	s := Status{NATS: "not connected"}
	conn := a.conn.Load()
	if conn != nil {
		s.NATS = conn.Status().String()
	}
	a.watch.mu.Lock()
	s.Engine = a.watch.status
	a.watch.mu.Unlock()
	doubt := ""
	for _, r := range a.watch.list() {
		rs := a.statusOf(r)
		s.Ranks = append(s.Ranks, rs)
		if !rs.Believed && doubt == "" {
			doubt = rs.Member + ": " + rs.disbelief
		}
	}
	s.Address, s.Warning = a.address(), a.unreachable()
	s.Ready = len(s.Ranks) > 0
	connected := conn != nil && conn.IsConnected()
	refused := a.refused.Reason(connected, time.Now())
	switch {
	case refused != "":
		s.Reason = refused
	case !connected:
		s.Reason = "NATS is not connected"
	case !s.Ready:
		s.Reason = "the engine has not answered yet"
	case doubt != "":
		s.Reason = doubt
	default:
		s.Believed = true
	}
	return s
}

// statusOf a rank, with what schedulers make of it.
func (a *Agent) statusOf(r *rank) RankStatus {
	s, trust := r.status()
	opinions := a.opinions(r)
	for _, o := range opinions {
		s.Schedulers = append(s.Schedulers, SchedulerStatus{Scheduler: o.Scheduler, Trust: trustName(o.Trust), Reason: o.Reason, Refused: o.Refused})
	}
	s.disbelief = disbelief(trust, s.Reason, opinions)
	s.Believed = s.disbelief == ""
	return s
}

// disbelief says why no scheduler takes a rank at its word; empty: one does.
func disbelief(own pb.Trust, reason string, opinions []publish.Opinion) string {
	if own == pb.Trust_TRUST_SYNCING {
		return reason
	}
	why := "no scheduler has sent a verdict on this member"
	for _, o := range opinions {
		switch {
		case o.Refused != "":
			why = "refused by scheduler " + o.Scheduler + ": " + o.Refused
		case o.Trust == pb.Trust_TRUST_SYNCING:
			why = "not yet believed by scheduler " + o.Scheduler + ": " + o.Reason
		default:
			return ""
		}
	}
	return why
}

func (r *rank) status() (RankStatus, pb.Trust) {
	tail := r.tail.Stats()
	r.mu.Lock()
	defer r.mu.Unlock()
	trust, reason := r.trustLocked()
	s := RankStatus{
		Member: r.member, Trust: trustName(trust), Reason: reason, Epoch: r.epoch,
		Connected: tail.Connected, Batches: r.batches, BlockSize: r.blockSizeLocked(),
	}
	for l := range s.Held {
		s.Held[l] = r.mirror.Count(mirror.Lane(l))
	}
	return s, trust
}

// trustName is the word for it in texts and metrics.
func trustName(t pb.Trust) string {
	switch t {
	case pb.Trust_TRUST_EXACT:
		return "exact"
	case pb.Trust_TRUST_SYNCING:
		return "syncing"
	case pb.Trust_TRUST_APPROXIMATE:
		return "approximate"
	}
	return "unknown"
}

// handler serves what people, probes and collectors ask for.
func (a *Agent) handler(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("ok\n"))
	})
	status := func(holds func(Status) bool) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			s := a.Status()
			text, err := json.MarshalIndent(s, "", "  ")
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			if !holds(s) {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			_, _ = w.Write(append(text, '\n'))
		}
	}
	mux.HandleFunc("GET /readyz", status(func(s Status) bool { return s.Ready }))
	mux.HandleFunc("GET /believed", status(func(s Status) bool { return s.Believed }))
	mux.HandleFunc("GET /config", func(w http.ResponseWriter, _ *http.Request) {
		text, err := settings.Text(a.cfg.Settings())
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = w.Write(text)
	})
	mux.Handle("GET /metrics", metrics)
	return mux
}
