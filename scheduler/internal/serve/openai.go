package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/gateway"
)

// openai serves OpenAI requests. One without a listener serves nothing.
type openai struct {
	listener net.Listener
	server   *http.Server
}

// newOpenAI listens where GatewayAddress says so.
func (s *Server) newOpenAI() (*openai, error) {
	o := &openai{server: &http.Server{
		Handler:           s.cfg.Gateway,
		TLSConfig:         s.cfg.TLS,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		Protocols:         new(http.Protocols),
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ErrorLog:          log.New(io.Discard, "", 0), // what clients do wrong is counted
	}}
	o.server.Protocols.SetHTTP1(true)
	o.server.Protocols.SetHTTP2(true)
	o.server.Protocols.SetUnencryptedHTTP2(s.cfg.TLS == nil)
	if s.cfg.GatewayAddress == "" {
		return o, nil
	}
	l, err := net.Listen("tcp", s.cfg.GatewayAddress)
	if err != nil {
		return nil, fmt.Errorf("gateway address: %w", err)
	}
	// Clients of HTTP/1.1 have a connection for each request.
	o.listener = &listener{Listener: l, limit: gateway.MaxOpen, refused: s.cfg.Refused}
	return o, nil
}

func (o *openai) address() string {
	if o.listener == nil {
		return ""
	}
	return o.listener.Addr().String()
}

// serve until stop or close.
func (o *openai) serve() (err error) {
	switch {
	case o.listener == nil:
		return nil
	case o.server.TLSConfig == nil:
		err = o.server.Serve(o.listener)
	default:
		err = o.server.ServeTLS(o.listener, "", "")
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// stop finishes what is under way, as far as ctx allows.
func (o *openai) stop(ctx context.Context) {
	if err := o.server.Shutdown(ctx); err != nil {
		o.close()
	}
}

// close at once.
func (o *openai) close() {
	if o.listener != nil {
		o.listener.Close()
	}
	o.server.Close()
}
