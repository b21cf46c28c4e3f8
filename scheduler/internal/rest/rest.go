// Package rest serves the services of gRPC as HTTP/JSON, by the paths that the
// .proto files annotate. It calls them in this process, through the interceptors
// of gRPC, so that rights, limits, logs and metrics are theirs. What a request
// means it leaves to them.
package rest

import (
	"context"
	_ "embed" // the OpenAPI document
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	gateway "github.com/kvscout/kvscout/scheduler/internal/rest/kvscout/scheduler/v1"
)

//go:embed openapi.swagger.json
var document []byte

const (
	// headerWait and bodyWait bound how long a request may take to come.
	headerWait = 10 * time.Second
	bodyWait   = 30 * time.Second
	idleWait   = 2 * time.Minute
	maxHeader  = 64 << 10
)

// Config of what is served. All but Caller must be set.
type Config struct {
	// Services to call.
	Services *Local
	// MaxBody bounds a request's body in bytes.
	MaxBody int64
	// Longest is how long a request may take to be answered, and how long a watch
	// goes on.
	Longest time.Duration
	// Caller is who everybody is taken for that shows no certificate; nil: nobody.
	Caller credentials.AuthInfo
	// Served is told of every request, on its goroutine.
	Served func(ctx context.Context, method string, code int, took time.Duration)
	Log    *slog.Logger
}

type handler struct {
	cfg Config
	mux *runtime.ServeMux
}

// parseQueries sets the parser of query parameters, which the gateway keeps for all
// servers of a process: once, as they read it while they serve.
var parseQueries = sync.OnceFunc(func() { runtime.SetQueryParameterParser(query{})(nil) })

// Server serves the services. Its caller sets TLSConfig where there is one.
func Server(cfg Config) (*http.Server, error) {
	h, err := Handler(cfg)
	if err != nil {
		return nil, err
	}
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerWait,
		WriteTimeout:      cfg.Longest,
		IdleTimeout:       idleWait,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}, nil
}

// Handler is what Server serves, for a server of others: Longest is that server's
// business.
func Handler(cfg Config) (http.Handler, error) {
	parseQueries()
	h := &handler{cfg: cfg, mux: runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, form),
		runtime.WithIncomingHeaderMatcher(propagated),
		runtime.WithErrorHandler(fail),
		runtime.WithRoutingErrorHandler(misrouted),
		runtime.WithDisablePathLengthFallback(),
		runtime.WithDisableHTTPMethodOverride(),
		runtime.WithHealthzEndpoint(healthpb.NewHealthClient(cfg.Services)),
	)}
	ctx := context.Background()
	err := errors.Join(
		gateway.RegisterSchedulerHandlerClient(ctx, h.mux, api.NewSchedulerClient(cfg.Services)),
		gateway.RegisterAdminHandlerClient(ctx, h.mux, api.NewAdminClient(cfg.Services)),
		h.mux.HandlePath(http.MethodGet, "/openapi.json", func(w http.ResponseWriter, _ *http.Request, _ map[string]string) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(document)
		}),
	)
	if err != nil {
		return nil, err
	}
	return h, nil
}

// ServeHTTP reads the body within its bounds and hands the request on, with who
// its caller is.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start, answer := time.Now(), &answer{ResponseWriter: w, code: http.StatusOK}
	defer func() { h.cfg.Served(r.Context(), method(r), answer.code, time.Since(start)) }()
	if r.Method == http.MethodPost {
		text, err := h.read(w, r)
		if err != nil {
			fail(r.Context(), h.mux, form, answer, r, err)
			return
		}
		r.Body = text
	}
	caller := &peer.Peer{LocalAddr: r.Context().Value(http.LocalAddrContextKey).(net.Addr), AuthInfo: h.cfg.Caller}
	if at, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		caller.Addr = net.TCPAddrFromAddrPort(at)
	}
	if r.TLS != nil {
		caller.AuthInfo = credentials.TLSInfo{State: *r.TLS}
	}
	h.mux.ServeHTTP(answer, r.WithContext(peer.NewContext(r.Context(), caller)))
}

// read the whole body. A page of somewhere else can make a browser send anything
// but JSON without asking: so nothing else is taken.
func (h *handler) read(w http.ResponseWriter, r *http.Request) (*body, error) {
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind != "application/json" {
		return nil, refused(http.StatusUnsupportedMediaType, codes.InvalidArgument, fmt.Sprintf("Content-Type is %.80q: want application/json", kind))
	}
	if coding := r.Header.Get("Content-Encoding"); coding != "" && coding != "identity" {
		return nil, refused(http.StatusUnsupportedMediaType, codes.InvalidArgument, fmt.Sprintf("Content-Encoding is %.80q: want none", coding))
	}
	// The deadline must not outlive the reading: it would end a request that waits.
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyWait))
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, h.cfg.MaxBody))
	_ = control.SetReadDeadline(time.Time{})
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, refused(http.StatusRequestEntityTooLarge, codes.InvalidArgument, fmt.Sprintf("the body is larger than %d bytes", h.cfg.MaxBody))
	case err != nil:
		return nil, status.Errorf(codes.InvalidArgument, "read the body: %v", err)
	}
	return &body{text: text}, nil
}

// propagated headers become metadata: what traces need.
func propagated(header string) (string, bool) {
	switch header := strings.ToLower(header); header {
	case "traceparent", "tracestate", "baggage":
		return header, true
	}
	return "", false
}

// answer remembers the status.
type answer struct {
	http.ResponseWriter
	code int
}

func (a *answer) WriteHeader(code int) {
	a.code = code
	a.ResponseWriter.WriteHeader(code)
}

func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// method of a request, by OpenTelemetry's conventions: whatever callers make up
// is one.
func method(r *http.Request) string {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return r.Method
	}
	return "_OTHER"
}
