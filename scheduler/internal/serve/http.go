package serve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"

	"github.com/kvscout/kvscout/scheduler/internal/rest"
)

// web serves the API as HTTP/JSON. One without a listener serves nothing.
type web struct {
	listener net.Listener
	server   *http.Server
	services *rest.Local
}

// newWeb listens where HTTPAddress says so.
func (s *Server) newWeb() (*web, error) {
	w := &web{server: &http.Server{}, services: &rest.Local{Unary: s.cfg.unary(), Streams: s.cfg.streams(), Stats: s.cfg.stats()}}
	if s.cfg.HTTPAddress == "" {
		return w, nil
	}
	s.register(w.services)
	var err error
	w.server, err = rest.Server(rest.Config{
		Services: w.services,
		MaxBody:  maxReceive,
		Longest:  connectionGrace,
		Served:   s.cfg.Observer.Served,
		Log:      s.cfg.Log.With("component", "http"),
	})
	if err != nil {
		return nil, err
	}
	w.server.TLSConfig = s.cfg.TLS
	l, err := net.Listen("tcp", s.cfg.HTTPAddress)
	if err != nil {
		return nil, fmt.Errorf("HTTP address: %w", err)
	}
	w.listener = &listener{Listener: l, limit: maxConnections, refused: s.cfg.Refused}
	return w, nil
}

func (w *web) address() string {
	if w.listener == nil {
		return ""
	}
	return w.listener.Addr().String()
}

// serve until stop or close.
func (w *web) serve() (err error) {
	switch {
	case w.listener == nil:
		return nil
	case w.server.TLSConfig == nil:
		err = w.server.Serve(w.listener)
	default:
		err = w.server.ServeTLS(w.listener, "", "")
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// stop finishes what is under way, as far as ctx allows.
func (w *web) stop(ctx context.Context) {
	if err := w.server.Shutdown(ctx); err != nil {
		w.close()
	}
	w.services.Wait()
}

// close at once.
func (w *web) close() {
	if w.listener != nil {
		w.listener.Close()
	}
	w.server.Close()
}
