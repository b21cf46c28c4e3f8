package agent

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/protocol/pb"
)

// Status is what /readyz says.
type Status struct {
	Ready  bool         `json:"ready"`
	Reason string       `json:"reason,omitempty"` // when not ready
	NATS   string       `json:"nats"`
	Engine engineStatus `json:"engine"`
	Ranks  []RankStatus `json:"ranks"`
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
}

// Status of the agent. It is ready when NATS and the engine are there and no
// rank is about to know more than it says.
func (a *Agent) Status() Status {
	s := Status{NATS: "not connected"}
	conn := a.conn.Load()
	if conn != nil {
		s.NATS = conn.Status().String()
	}
	a.watch.mu.Lock()
	s.Engine = a.watch.status
	a.watch.mu.Unlock()
	syncing := ""
	for _, r := range a.watch.list() {
		rs := r.status()
		s.Ranks = append(s.Ranks, rs)
		if rs.Trust == trustName(pb.Trust_TRUST_SYNCING) && syncing == "" {
			syncing = rs.Member + ": " + rs.Reason
		}
	}
	connected := conn != nil && conn.IsConnected()
	refused := a.refused.reason(connected, time.Now())
	switch {
	case refused != "":
		s.Reason = refused
	case !connected:
		s.Reason = "NATS is not connected"
	case len(s.Ranks) == 0:
		s.Reason = "the engine has not answered yet"
	case syncing != "":
		s.Reason = syncing
	default:
		s.Ready = true
	}
	return s
}

func (r *rank) status() RankStatus {
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
	return s
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
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		s := a.Status()
		text, err := json.MarshalIndent(s, "", "  ")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if !s.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = w.Write(append(text, '\n'))
	})
	mux.Handle("GET /metrics", metrics)
	return mux
}
