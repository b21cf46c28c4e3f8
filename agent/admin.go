package agent

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/kvscout/kvscout/agent/internal/rank"
	"github.com/kvscout/kvscout/agent/internal/watch"
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
	Address string        `json:"address"`
	Warning string        `json:"warning,omitempty"`
	Engine  watch.Status  `json:"engine"`
	Ranks   []rank.Status `json:"ranks"`
}

// Status of the agent.
func (a *Agent) Status() Status {
	s := Status{NATS: "not connected"}
	conn := a.conn.Load()
	if conn != nil {
		s.NATS = conn.Status().String()
	}
	s.Engine = a.watch.Status()
	reason := ""
	for _, r := range a.watch.Ranks() {
		rs := r.Status()
		s.Ranks = append(s.Ranks, rs)
		if !rs.Believed && reason == "" {
			reason = rs.Member + ": " + rs.Disbelief
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
	case reason != "":
		s.Reason = reason
	default:
		s.Believed = true
	}
	return s
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
