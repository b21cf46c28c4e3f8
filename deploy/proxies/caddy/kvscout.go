// Package kvscout makes Caddy's reverse proxy send requests to LLM engines where
// their prefix is cached: the directive kvscout asks a scheduler and reports what
// came of it, and the selection policy of the same name goes where that said.
package kvscout

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/kvscout/kvscout/protocol/client"
	"github.com/kvscout/kvscout/protocol/tlsclient"
)

func init() {
	caddy.RegisterModule(Handler{})
	caddy.RegisterModule(Selection{})
}

// Handler asks where a completion should go before the reverse proxy sends it
// there, and reports what came of it. All other requests pass.
type Handler struct {
	// Schedulers to ask, host:port. The first that answers is asked; the others
	// stand by.
	Schedulers []string `json:"schedulers,omitempty"`
	// Timeout is what one scheduler may take for an answer; 200ms. Where requests
	// wait for room, as long as they may.
	Timeout caddy.Duration `json:"timeout,omitempty"`
	// Attempts bounds the members that are tried for a request; 3.
	Attempts int `json:"attempts,omitempty"`
	// TLS to the schedulers; none: in plain text.
	TLS *TLS `json:"tls,omitempty"`

	client *client.Client
	bodies *budget
	log    *zap.Logger
	warned *atomic.Int64 // when, in ns since 1970
}

// TLS to the schedulers.
type TLS struct {
	// CA is a file with the certificates that theirs must come from; the system's.
	CA string `json:"ca,omitempty"`
	// Certificate and Key are files with that of this proxy, where schedulers ask for
	// one.
	Certificate string `json:"certificate,omitempty"`
	Key         string `json:"key,omitempty"`
	// ServerName in their certificates; the host of their address.
	ServerName string `json:"server_name,omitempty"`
}

func (t *TLS) credentials() (credentials.TransportCredentials, error) {
	cfg, err := tlsclient.Trust{CA: t.CA, Name: t.ServerName}.Config()
	if err != nil {
		return nil, fmt.Errorf("ca: %w", err)
	}
	if t.Certificate != "" || t.Key != "" {
		pair, err := tls.LoadX509KeyPair(t.Certificate, t.Key)
		if err != nil {
			return nil, fmt.Errorf("client_auth: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(cfg), nil
}

// CaddyModule says what it is.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.kvscout", New: func() caddy.Module { return new(Handler) }}
}

// Provision prepares to ask; it connects with the first request.
func (h *Handler) Provision(ctx caddy.Context) error {
	if h.Timeout < 0 || h.Attempts < 0 {
		return errors.New("timeout and attempts must be positive")
	}
	cfg := client.Config{Schedulers: h.Schedulers, Timeout: time.Duration(h.Timeout), Attempts: h.Attempts}
	if h.TLS != nil {
		creds, err := h.TLS.credentials()
		if err != nil {
			return fmt.Errorf("tls: %w", err)
		}
		cfg.Dial = []grpc.DialOption{grpc.WithTransportCredentials(creds)}
	}
	var err error
	h.client, err = client.New(cfg)
	h.bodies, h.log, h.warned = new(budget), ctx.Logger(), new(atomic.Int64)
	return err
}

// Cleanup sends the reports that wait.
func (h *Handler) Cleanup() error {
	if h.client == nil {
		return nil
	}
	return h.client.Close()
}

// ServeHTTP serves one request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, "/completions") || r.Header.Get("Content-Encoding") != "" {
		return next.ServeHTTP(w, r)
	}
	b := &body{of: h.bodies}
	defer b.release()
	whole, err := b.read(r)
	switch {
	case err != nil:
		return caddyhttp.Error(http.StatusBadRequest, fmt.Errorf("read the request: %w", err))
	case !whole:
		return next.ServeHTTP(w, r)
	}
	x := newExchange(w, r, next, b.bytes)
	err = h.client.Do(r.Context(), x.request(), nil, x.send)
	switch {
	case x.panicked != nil:
		panic(x.panicked)
	case x.unused:
		h.warn("the reverse proxy does not go where kvscout says: set lb_policy kvscout", nil)
	case x.tries > 0 || err == nil || r.Context().Err() != nil:
	default:
		if refused, ok := refusalOf(err); ok {
			return refused.write(w)
		}
		h.warn("no scheduler says where requests go, the fallback policy does", err)
		return next.ServeHTTP(w, x.again(r.Context()))
	}
	return err
}

// warn says so at most once a second.
func (h *Handler) warn(text string, err error) {
	now := time.Now().UnixNano()
	if last := h.warned.Load(); now-last > int64(time.Second) && h.warned.CompareAndSwap(last, now) {
		h.log.Warn(text, zap.Error(err))
	}
}

// place is what the handler tells the policy by the request's context.
type place struct {
	*client.Placement
	// taken by the policy; left: it was asked once more, or could not go there.
	taken, left atomic.Bool
}

type placeKey struct{}

func placeOf(ctx context.Context) *place {
	p, _ := ctx.Value(placeKey{}).(*place)
	return p
}

var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
