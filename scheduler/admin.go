package scheduler

import (
	"net/http"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/protocol/settings"
)

// admin serves what people, probes and collectors ask for.
func (s *Scheduler) admin() *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { say(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if s.ready() {
			say(w, http.StatusOK, "ready")
			return
		}
		why := "waiting for members to become exact"
		if r := s.refusals.Load(); r != nil {
			if refused := r.reason(); refused != "" {
				why += "; " + refused
			}
		}
		say(w, http.StatusServiceUnavailable, why)
	})
	mux.Handle("GET /metrics", s.telemetry.Handler())
	mux.HandleFunc("GET /fleet", func(w http.ResponseWriter, r *http.Request) {
		fleet, err := s.rpc.Fleet(r.Context(), &pb.FleetRequest{Model: r.URL.Query().Get("model")})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		text, err := protojson.MarshalOptions{Multiline: true, EmitUnpopulated: true}.Marshal(fleet)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(text)
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
	return &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
	}
}

func say(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text + "\n"))
}
