package serve

import (
	"context"
	"errors"
	"net"
	"net/http"
)

// httpServer serves on a listener of its own. One without a listener serves nothing.
type httpServer struct {
	listener net.Listener
	server   *http.Server
}

func (h *httpServer) address() string {
	if h.listener == nil {
		return ""
	}
	return h.listener.Addr().String()
}

// serve until stop or close.
func (h *httpServer) serve() (err error) {
	switch {
	case h.listener == nil:
		return nil
	case h.server.TLSConfig == nil:
		err = h.server.Serve(h.listener)
	default:
		err = h.server.ServeTLS(h.listener, "", "")
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// stop finishes what is under way, as far as ctx allows.
func (h *httpServer) stop(ctx context.Context) {
	if err := h.server.Shutdown(ctx); err != nil {
		h.close()
	}
}

// close at once.
func (h *httpServer) close() {
	if h.listener != nil {
		h.listener.Close()
	}
	h.server.Close()
}
