package scheduler

import (
	"net/http"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler/internal/rest"
)

// admin serves what people, probes and collectors ask for.
func (s *Scheduler) admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { say(w, true, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		ready, why := s.readiness()
		say(w, ready, why)
	})
	mux.Handle("GET /metrics", s.telemetry.Handler())
	mux.HandleFunc("GET /v1/members", func(w http.ResponseWriter, r *http.Request) {
		members, err := s.rpc.ListMembers(r.Context(), &api.ListMembersRequest{Model: r.URL.Query().Get("model")})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		rest.Write(w, members)
	})
	mux.HandleFunc("GET /v1/books", func(w http.ResponseWriter, r *http.Request) {
		books, err := s.rpc.GetBooks(r.Context(), &api.GetBooksRequest{})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		rest.Write(w, books)
	})
	mux.HandleFunc("GET /v1/prefixes", func(w http.ResponseWriter, r *http.Request) {
		prefixes, err := s.rpc.ListPrefixes(r.Context(), &api.ListPrefixesRequest{Model: r.URL.Query().Get("model")})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		rest.Write(w, prefixes)
	})
	mux.HandleFunc("GET /config", func(w http.ResponseWriter, _ *http.Request) {
		text, err := settings.Text(s.live.Load().Settings())
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = w.Write(text)
	})
	return mux
}

// readiness tells whether this scheduler should be asked, and why. One that lost
// NATS goes on by its last known state: all replicas lose the same server at the
// same time, and to take them all away would be worse than old answers.
func (s *Scheduler) readiness() (ready bool, why string) {
	ready, why = s.ready(), "ready"
	switch {
	case !s.linked():
		why = "NATS is not connected"
		if ready {
			why = "ready, but NATS is not connected: answers stand on the last known state"
		}
	case !ready:
		why = "waiting for members to become exact"
	}
	if b := s.bus.Load(); b != nil {
		if refused := b.Refused.Reason(s.linked(), time.Now()); refused != "" {
			why += "; " + refused
		}
	}
	return ready, why
}

func say(w http.ResponseWriter, good bool, text string) {
	status := http.StatusOK
	if !good {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text + "\n"))
}
