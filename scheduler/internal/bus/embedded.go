package bus

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/scheduler/internal/certs"
	"github.com/kvscout/kvscout/scheduler/internal/textfile"
)

const (
	// busStart bounds the start of the embedded NATS server.
	busStart = 10 * time.Second
	// maxClients are looked at for where members connect from.
	maxClients = 1 << 20
)

// embedded is a NATS server in this process.
type embedded struct {
	cfg      *Config
	log      *slog.Logger
	subjects protocol.Subjects
	server   *server.Server
	tls      *tls.Config   // nil: plain
	self     nkeys.KeyPair // who this process is there; nil: nobody is asked
	users    string        // text of the file of users in force
	gate     *gate         // nil: no tokens, the server itself knows its users
}

// startEmbedded starts the server and waits until it serves.
func startEmbedded(cfg *Config, subjects protocol.Subjects, log *slog.Logger) (*embedded, error) {
	e := &embedded{cfg: cfg, log: log, subjects: subjects}
	if cfg.TLS.Cert != "" {
		var err error
		if e.tls, err = certs.Server(cfg.TLS, log); err != nil {
			return nil, fmt.Errorf("-nats-tls-cert, -nats-tls-key and -nats-tls-ca: %w", err)
		}
	}
	var users []*server.NkeyUser
	if cfg.Users != "" {
		var err error
		if users, e.users, err = readUsers(cfg.Users, subjects); err != nil {
			return nil, fmt.Errorf("-nats-users: %w", err)
		}
	}
	if cfg.Tokens != nil {
		e.gate = newGate(cfg.Tokens, subjects, log)
	}
	if cfg.Users != "" || cfg.Tokens != nil {
		var err error
		if e.self, err = nkeys.CreateUser(); err != nil {
			return nil, fmt.Errorf("key of the scheduler itself: %w", err)
		}
	}
	opts, err := e.options(users)
	if err != nil {
		return nil, err
	}
	if e.gate != nil {
		e.gate.use(opts.Nkeys)
	}
	if e.server, err = server.NewServer(opts); err != nil {
		return nil, err
	}
	out := &serverLog{log: log}
	e.server.SetLoggerV2(out, false, false, false)
	e.server.Start()
	for end := time.Now().Add(busStart); !e.server.ReadyForConnections(20 * time.Millisecond); {
		fatal := out.fatal.Load()
		if fatal == nil && time.Now().Before(end) {
			continue
		}
		e.stop()
		if fatal == nil {
			return nil, fmt.Errorf("not ready after %s", busStart)
		}
		return nil, fmt.Errorf("%w (choose another address for it, or name the server that is there by its URL)", *fatal)
	}
	return e, nil
}

// options of the server when these are its users.
func (e *embedded) options(users []*server.NkeyUser) (*server.Options, error) {
	host, text, err := net.SplitHostPort(e.cfg.Address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("port of %q: %w", e.cfg.Address, err)
	}
	opts := &server.Options{
		ServerName: "kvscout-scheduler",
		Host:       host,
		Port:       int(port),
		NoSigs:     true,
		MaxPayload: 1 << 20,
		TLSConfig:  e.tls,
		Nkeys:      users,
	}
	if port == 0 {
		opts.Port = server.RANDOM_PORT
	}
	if e.gate != nil {
		opts.CustomClientAuthentication, opts.AlwaysEnableNonce, opts.AuthTimeout = e.gate, true, authWithin.Seconds()
	}
	if e.self != nil {
		key, err := e.self.PublicKey()
		if err != nil {
			return nil, fmt.Errorf("key of the scheduler itself: %w", err)
		}
		opts.Nkeys = append(opts.Nkeys, &server.NkeyUser{
			Nkey: key, Permissions: schedulerRights(e.subjects),
			AllowedConnectionTypes: map[string]struct{}{"IN_PROCESS": {}},
		})
	}
	return opts, nil
}

// client is how this process connects to the server.
func (e *embedded) client() ([]nats.Option, error) {
	options := []nats.Option{nats.InProcessServer(e.server)}
	if e.self != nil {
		key, err := e.self.PublicKey()
		if err != nil {
			return nil, fmt.Errorf("key of the scheduler itself: %w", err)
		}
		options = append(options, nats.Nkey(key, e.self.Sign))
	}
	return options, nil
}

// follow keeps the server's users those of the file. Who is no longer among
// them is cut off.
func (e *embedded) follow(ctx context.Context) {
	if e.gate != nil {
		defer e.gate.end()
		var checking sync.WaitGroup
		defer checking.Wait()
		checking.Go(func() { e.gate.recheck(ctx, e.server) })
	}
	if e.cfg.Users == "" {
		<-ctx.Done()
		return
	}
	textfile.Follow(ctx, e.reload, func(err error) {
		e.log.Error("the file of NATS users is not used, the last good one is", "error", err)
	})
}

func (e *embedded) reload() error {
	users, text, err := readUsers(e.cfg.Users, e.subjects)
	if err != nil || text == e.users {
		return err
	}
	opts, err := e.options(users)
	if err != nil {
		return err
	}
	if e.gate != nil {
		// The server would take those whom the gate let in for users that are gone.
		e.gate.cutAll(e.server, e.gate.use(opts.Nkeys))
	} else if err := e.server.ReloadOptions(opts); err != nil {
		return fmt.Errorf("users of %s: %w", e.cfg.Users, err)
	}
	e.users = text
	e.log.Info("NATS users read", "file", e.cfg.Users, "users", len(users))
	return nil
}

func (e *embedded) stop() {
	if e.gate != nil {
		e.gate.end()
	}
	e.server.Shutdown()
	e.server.WaitForShutdown()
}

// serverLog passes the server's log on, and keeps what it calls fatal.
type serverLog struct {
	log   *slog.Logger
	fatal atomic.Pointer[error]
}

func (l *serverLog) Noticef(format string, v ...any) {
	l.log.Debug("NATS server", "text", fmt.Sprintf(format, v...))
}
func (l *serverLog) Debugf(format string, v ...any) {
	l.log.Debug("NATS server", "text", fmt.Sprintf(format, v...))
}
func (l *serverLog) Tracef(format string, v ...any) {
	l.log.Debug("NATS server", "text", fmt.Sprintf(format, v...))
}
func (l *serverLog) Warnf(format string, v ...any) {
	l.log.Warn("the embedded NATS server warns", "text", fmt.Sprintf(format, v...))
}
func (l *serverLog) Errorf(format string, v ...any) {
	l.log.Error("the embedded NATS server reports an error", "text", fmt.Sprintf(format, v...))
}
func (l *serverLog) Fatalf(format string, v ...any) {
	err := fmt.Errorf(format, v...)
	l.fatal.CompareAndSwap(nil, &err)
}

// origins are the IP addresses from which somebody listens for a member's
// snapshot requests, by the member's name: those of its agent, as far as the
// users' rights keep others from listening.
func (e *embedded) origins() map[string][]netip.Addr {
	found := make(map[string][]netip.Addr)
	list, err := e.server.Connz(&server.ConnzOptions{Subscriptions: true, Limit: maxClients})
	if err != nil {
		e.log.Warn("cannot tell where members connect from", "error", err)
		return found
	}
	for _, c := range list.Conns {
		ip, err := netip.ParseAddr(c.IP)
		if err != nil {
			continue // this process
		}
		for _, subject := range c.Subs {
			if kind, member, err := e.subjects.Parse(subject); err == nil && kind == protocol.Snapshot {
				found[member] = append(found[member], ip.Unmap())
			}
		}
	}
	return found
}
