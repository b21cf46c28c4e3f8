package serve

import (
	"context"
	"net/http"

	"github.com/kvscout/kvscout/scheduler/internal/rest"
)

// web serves the API as HTTP/JSON. One without a listener serves nothing.
type web struct {
	httpServer
	services *rest.Local
}

// newWeb listens where HTTPAddress says so.
func (s *Server) newWeb() (*web, error) {
	w := &web{httpServer: httpServer{server: &http.Server{}}, services: &rest.Local{Unary: s.cfg.unary(), Streams: s.cfg.streams(), Stats: s.cfg.stats()}}
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
	w.listener, err = s.bind("HTTP", s.cfg.HTTPAddress, maxConnections)
	return w, err
}

// stop finishes what is under way, as far as ctx allows.
func (w *web) stop(ctx context.Context) {
	w.httpServer.stop(ctx)
	w.services.Wait()
}
