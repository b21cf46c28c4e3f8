package scheduler

import (
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// busStart bounds the start of the embedded NATS server.
const busStart = 10 * time.Second

// bus is the connection to NATS, with the server behind it when that one is
// embedded.
type bus struct {
	conn   *nats.Conn
	server *server.Server // nil when the server is somebody else's
	closed chan struct{}  // the connection is closed for good
}

// openBus starts the embedded server unless cfg names another one, and
// connects. A server of others need not be there yet.
func openBus(cfg *Config) (*bus, error) {
	b := &bus{closed: make(chan struct{})}
	log := cfg.Log.With("room", "nats")
	options := []nats.Option{
		nats.Name("kvscout-scheduler"),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		nats.IgnoreAuthErrorAbort(), // credentials are mended while we run
		nats.ReconnectWait(250 * time.Millisecond),
		nats.PingInterval(10 * time.Second),
		nats.ClosedHandler(func(*nats.Conn) { close(b.closed) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("connection lost", "error", err)
			}
		}),
		nats.ReconnectHandler(func(c *nats.Conn) { log.Info("connected again", "server", c.ConnectedUrlRedacted()) }),
		nats.ErrorHandler(func(_ *nats.Conn, s *nats.Subscription, err error) {
			subject := ""
			if s != nil {
				subject = s.Subject
			}
			log.Warn("asynchronous error", "subject", subject, "error", err)
		}),
	}
	url := cfg.NATSURL
	if url == "" {
		s, err := startServer(cfg.NATSAddress, log)
		if err != nil {
			return nil, err
		}
		b.server = s
		options = append(options, nats.InProcessServer(s))
	} else {
		options = append(options, nats.RetryOnFailedConnect(true),
			nats.ConnectHandler(func(c *nats.Conn) { log.Info("connected", "server", c.ConnectedUrlRedacted()) }))
		if cfg.NATSCredentials != "" {
			options = append(options, nats.UserCredentials(cfg.NATSCredentials))
		}
	}
	conn, err := nats.Connect(url, options...)
	if err != nil {
		b.stopServer()
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	b.conn = conn
	return b, nil
}

// close ends the connection and then the server, and waits for both.
func (b *bus) close() {
	b.conn.Close()
	<-b.closed
	b.stopServer()
}

func (b *bus) stopServer() {
	if b.server != nil {
		b.server.Shutdown()
		b.server.WaitForShutdown()
	}
}

// address of the embedded server; empty when there is none.
func (b *bus) address() string {
	if b.server == nil {
		return ""
	}
	return b.server.Addr().String()
}

func startServer(address string, log *slog.Logger) (*server.Server, error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("embedded NATS: port of %q: %w", address, err)
	}
	opts := &server.Options{
		ServerName: "kvscout-scheduler",
		Host:       host,
		Port:       int(port),
		NoSigs:     true,
		MaxPayload: 1 << 20,
	}
	if port == 0 {
		opts.Port = server.RANDOM_PORT
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		log.Warn("the embedded NATS server asks nobody who he is, and listens beyond this machine", "address", address)
	}
	s, err := server.NewServer(opts)
	if err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	out := &serverLog{log: log}
	s.SetLoggerV2(out, false, false, false)
	s.Start()
	for end := time.Now().Add(busStart); !s.ReadyForConnections(20 * time.Millisecond); {
		fatal := out.fatal.Load()
		if fatal == nil && time.Now().Before(end) {
			continue
		}
		s.Shutdown()
		s.WaitForShutdown()
		if fatal == nil {
			return nil, fmt.Errorf("embedded NATS: not ready after %s", busStart)
		}
		return nil, fmt.Errorf("embedded NATS: %w (choose another address for it, or name the server that is there by its URL)", *fatal)
	}
	return s, nil
}

// serverLog passes the server's log on, and keeps what it calls fatal.
type serverLog struct {
	log   *slog.Logger
	fatal atomic.Pointer[error]
}

func (l *serverLog) Noticef(format string, v ...any) { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l *serverLog) Debugf(format string, v ...any)  { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l *serverLog) Tracef(format string, v ...any)  { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l *serverLog) Warnf(format string, v ...any)   { l.log.Warn(fmt.Sprintf(format, v...)) }
func (l *serverLog) Errorf(format string, v ...any)  { l.log.Error(fmt.Sprintf(format, v...)) }
func (l *serverLog) Fatalf(format string, v ...any) {
	err := fmt.Errorf(format, v...)
	l.fatal.CompareAndSwap(nil, &err)
}

// redacted is a list of server URLs without user and password.
func redacted(urls string) string {
	var out []string
	for part := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(part))
		if err != nil {
			continue
		}
		u.User = nil
		out = append(out, u.String())
	}
	return strings.Join(out, ",")
}
