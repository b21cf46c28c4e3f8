package serve

import (
	"io"
	"log"
	"net/http"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/gateway"
)

// newOpenAI serves OpenAI requests where GatewayAddress says so.
func (s *Server) newOpenAI() (*httpServer, error) {
	o := &httpServer{server: &http.Server{
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
	var err error
	// Clients of HTTP/1.1 have a connection for each request.
	o.listener, err = s.bind("gateway", s.cfg.GatewayAddress, gateway.MaxOpen)
	return o, err
}
