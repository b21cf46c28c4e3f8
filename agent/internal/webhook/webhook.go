// Package webhook is the server that Kubernetes asks about each new pod: an
// AdmissionReview in, a JSON Patch out. It never refuses a pod. Its certificates
// it makes itself, keeps them in a Secret that its replicas share, has them
// trusted through the webhook's configuration, and renews them. What is changed
// in a pod, others decide.
package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/agent/internal/inject"
	"github.com/kvscout/kvscout/protocol/admin"
	"github.com/kvscout/kvscout/protocol/kube"
	"github.com/kvscout/kvscout/protocol/logging"
	"github.com/kvscout/kvscout/protocol/telemetry"
)

const (
	// maxReview bounds a review in bytes: API servers take no larger objects.
	maxReview = 8 << 20
	// syncEvery is how often certificates are looked at; retryEvery, after an error.
	syncEvery, retryEvery = time.Minute, 5 * time.Second
	// pairsKey of the Secret holds the certificates with their keys.
	pairsKey = "certificates.pem"
	// stopWait is how long reviews under way may take at the end.
	stopWait = 5 * time.Second
)

// Config of a Server. Every field is required.
type Config struct {
	// Address to listen on for the API server, with TLS.
	Address string
	// AdminAddress for /healthz, /readyz and /metrics, without.
	AdminAddress string
	// Kubernetes is the URL of the API server, ServiceAccount the folder with
	// token, ca.crt and namespace.
	Kubernetes, ServiceAccount string
	// Service that leads here, the Secret for certificates in the same namespace,
	// and the MutatingWebhookConfiguration.
	Service, Secret, Configuration string
	// Decide what to change in a pod. It may be called from several goroutines.
	Decide func(inject.Pod) inject.Decision
	// Version of the program, for metrics.
	Version string
	Log     *slog.Logger
}

// Stats of a Server.
type Stats struct {
	Injected, LeftAlone, Malformed uint64 // reviews
	SyncFailures                   uint64
	HungUp                         uint64 // connections
}

// Server answers reviews.
type Server struct {
	cfg         Config
	limit       *logging.Limiter // in cfg.Log
	api         api
	namespace   string
	certificate atomic.Pointer[tls.Certificate] // nil until it is trusted
	ready       atomic.Bool
	addresses   atomic.Pointer[[2]string]

	injected, leftAlone, malformed, failures, hungUp, adminHungUp atomic.Uint64
}

// New reads the pod's namespace.
func New(cfg Config) (*Server, error) {
	text, err := os.ReadFile(filepath.Join(cfg.ServiceAccount, "namespace"))
	if err != nil {
		return nil, fmt.Errorf("-service-account: %w", err)
	}
	limit := logging.Limit(cfg.Log.Handler())
	cfg.Log = slog.New(limit)
	s := &Server{cfg: cfg, limit: limit, api: api{kube.New(cfg.Kubernetes, cfg.ServiceAccount)}, namespace: strings.TrimSpace(string(text))}
	if s.namespace == "" || strings.ContainsAny(s.namespace, "/? \n") {
		return nil, errors.New("-service-account: the file namespace does not hold a name")
	}
	return s, nil
}

// Stats as of now.
func (s *Server) Stats() Stats {
	return Stats{s.injected.Load(), s.leftAlone.Load(), s.malformed.Load(), s.failures.Load(), s.hungUp.Load() + s.adminHungUp.Load()}
}

// Addrs are where reviews and probes are served; empty until they are.
func (s *Server) Addrs() (reviews, probes string) {
	if a := s.addresses.Load(); a != nil {
		return a[0], a[1]
	}
	return "", ""
}

// Run serves until ctx ends. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	defer s.limit.Start()()
	defer s.api.Close()
	tel, err := telemetry.New(ctx, telemetry.Config{Service: "kvscout-webhook", Version: s.cfg.Version, Log: s.cfg.Log})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWait)
		defer cancel()
		_ = tel.Shutdown(ctx)
	}()
	if err := s.meter(tel.Meters); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	listener, err := net.Listen("tcp", s.cfg.Address)
	if err != nil {
		return fmt.Errorf("listen for reviews: %w", err)
	}
	defer listener.Close()
	probes, err := net.Listen("tcp", s.cfg.AdminAddress)
	if err != nil {
		return fmt.Errorf("listen for probes: %w", err)
	}
	defer probes.Close()
	s.addresses.Store(&[2]string{listener.Addr().String(), probes.Addr().String()})

	g, ctx := errgroup.WithContext(ctx)
	reviews := admin.Server(http.HandlerFunc(s.serve), &s.hungUp)
	reviews.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		if c := s.certificate.Load(); c != nil {
			return c, nil
		}
		return nil, errors.New("no certificate yet")
	}}
	reviews.ErrorLog = slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug)
	people := admin.Server(s.people(tel.Handler()), &s.adminHungUp)
	serve := func(server *http.Server, run func() error) {
		g.Go(func() error {
			if err := run(); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		})
		g.Go(func() error {
			<-ctx.Done()
			wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWait)
			defer cancel()
			if server.Shutdown(wait) != nil {
				return server.Close()
			}
			return nil
		})
	}
	serve(reviews, func() error { return reviews.ServeTLS(listener, "", "") })
	serve(people, func() error { return people.Serve(probes) })
	g.Go(func() error { return s.keepTrusted(ctx) })
	s.cfg.Log.Info("serving reviews", "address", listener.Addr().String(), "probes", probes.Addr().String())
	return g.Wait()
}

// serve a review.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		http.Error(w, "POST an AdmissionReview", http.StatusMethodNotAllowed)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxReview))
	var text []byte
	var what answered
	if err == nil {
		text, what, err = answer(body, s.cfg.Decide)
	}
	if err != nil {
		s.malformed.Add(1)
		s.cfg.Log.Warn("a review cannot be answered", "error", err)
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if len(what.Engines) > 0 {
		s.injected.Add(1)
	} else {
		s.leftAlone.Add(1)
	}
	if len(what.Engines) > 0 || len(what.Warnings) > 0 {
		s.cfg.Log.Info("pod created", "pod", what.namespace+"/"+what.name, "engines", what.Engines, "warnings", what.Warnings)
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text)
}

// people serves probes and metrics.
func (s *Server) people(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	say := func(w http.ResponseWriter, ok bool) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = w.Write([]byte("the certificate is not trusted yet\n"))
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { say(w, true) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { say(w, s.ready.Load()) })
	mux.Handle("GET /metrics", metrics)
	return mux
}

// keepTrusted keeps certificates valid and trusted until ctx ends. An API server
// that is away stops nothing: what is trusted stays so for weeks.
func (s *Server) keepTrusted(ctx context.Context) error {
	checked := false
	said := ""
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		var err error
		if !checked {
			if err = s.api.hasSidecars(ctx); errors.Is(err, errTooOld) {
				return err
			}
			checked = err == nil
		}
		if err == nil {
			err = s.sync(ctx, time.Now())
		}
		if ctx.Err() != nil {
			return nil
		}
		wait, text := syncEvery, ""
		if err != nil {
			s.failures.Add(1)
			wait, text = retryEvery, err.Error()
		} else if s.ready.CompareAndSwap(false, true) {
			s.cfg.Log.Info("the certificate is trusted")
		}
		if text != said && text != "" && !kube.IsCode(err, http.StatusConflict) {
			s.cfg.Log.Warn("certificates cannot be kept", "error", err)
		}
		said = text
		timer.Reset(wait)
	}
}

// sync looks at the certificates once: they are renewed, trusted, then served.
func (s *Server) sync(ctx context.Context, now time.Time) error {
	kept, err := s.api.secret(ctx, s.namespace, s.cfg.Secret)
	if err != nil {
		return err
	}
	pairs, err := parsePairs(kept.Data[pairsKey])
	if err != nil {
		return fmt.Errorf("the Secret %s, which may be emptied: %w", s.cfg.Secret, err)
	}
	full := s.cfg.Service + "." + s.namespace + ".svc"
	pairs, changed, err := renew(pairs, []string{full, full + ".cluster.local"}, now)
	if err != nil {
		return err
	}
	if changed {
		text, err := encodePairs(pairs)
		if err != nil {
			return err
		}
		if kept.Data == nil {
			kept.Data = make(map[string][]byte)
		}
		kept.Data[pairsKey] = text
		kept.APIVersion, kept.Kind = "v1", "Secret"
		if err := s.api.keep(ctx, s.namespace, s.cfg.Secret, kept); err != nil {
			return err
		}
	}
	if err := s.api.trust(ctx, s.cfg.Configuration, bundle(pairs)); err != nil {
		return err
	}
	s.certificate.Store(serving(pairs, now))
	return nil
}

// instruments of a Server.
var instruments = []telemetry.Instrument[Stats]{
	telemetry.CountersOf("kvscout.agent.webhook.reviews", "{review}", "Reviews of pods, by what came of them.", "outcome", func(s Stats) map[string]uint64 {
		return map[string]uint64{"injected": s.Injected, "left_alone": s.LeftAlone, "malformed": s.Malformed}
	}),
	telemetry.CounterOf("kvscout.agent.webhook.sync.failures", "{attempt}", "Attempts to keep the certificates that failed.", func(s Stats) uint64 { return s.SyncFailures }),
	telemetry.CounterOf("kvscout.agent.webhook.connections.refused", "{connection}", "Connections beyond the bound.", func(s Stats) uint64 { return s.HungUp }),
}

func (s *Server) meter(provider metric.MeterProvider) error {
	return telemetry.Observe(provider.Meter(telemetry.Scope), instruments, func(yield func(Stats, ...string)) { yield(s.Stats()) })
}
