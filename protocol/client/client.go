// Package client is what a proxy needs around a request: where to send it, within
// a time that is never exceeded; another member when that one fails; and a report
// of what came of it. While no scheduler answers the proxy goes on by its own
// choice. What is sent to engines, and how, is the proxy's.
package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol/buffers"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	usualTimeout  = 200 * time.Millisecond
	usualAttempts = 3
	// rest is how long a scheduler that did not answer in time is left alone.
	rest = time.Second
	// maxBackoff bounds how long a scheduler that is back is not asked.
	maxBackoff = 3 * time.Second
)

// Config of a Client.
type Config struct {
	// Schedulers to ask, host:port. The first that answers is asked; the others
	// stand by.
	Schedulers []string
	// Local is a scheduler that is asked before them without a connection; nil: there
	// is none.
	Local api.SchedulerClient
	// Timeout is what one scheduler may take for an answer; 200 ms. Where requests
	// wait for room (-queue-length), as long as they may. Negative: as long as it
	// wants.
	Timeout time.Duration
	// Attempts bounds the members that Do tries for a request; 3.
	Attempts int
	// Dial is how schedulers are reached, for example with TLS; empty: in plain text.
	Dial []grpc.DialOption
}

// reconnect soon: while a scheduler is away the proxy chooses, which is dearer than
// to try.
var reconnect = grpc.WithConnectParams(grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff},
	MinConnectTimeout: maxBackoff,
})

// Client asks schedulers. It is for any number of callers at a time.
type Client struct {
	cfg        Config
	schedulers []*scheduler
	stats      counters
}

type counters struct{ picked, unanswered, reported, lost atomic.Uint64 }

// Stats of a Client.
type Stats struct {
	// Picked by a scheduler, and Unanswered by all of them.
	Picked, Unanswered uint64
	// Reported to a scheduler, and Lost, because none took them in time.
	Reported, Lost uint64
}

// New returns a Client. It connects when it is first used.
func New(cfg Config) (*Client, error) {
	if len(cfg.Schedulers) == 0 && cfg.Local == nil {
		return nil, errors.New("no scheduler is named")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = usualTimeout
	}
	if cfg.Attempts <= 0 {
		cfg.Attempts = usualAttempts
	}
	if len(cfg.Dial) == 0 {
		cfg.Dial = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	c := &Client{cfg: cfg}
	if cfg.Local != nil {
		c.schedulers = append(c.schedulers, &scheduler{ask: cfg.Local, timeout: cfg.Timeout, stats: &c.stats})
	}
	for _, address := range cfg.Schedulers {
		conn, err := grpc.NewClient(address, append(append(buffers.Client(), reconnect), cfg.Dial...)...)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("scheduler %s: %w", address, err), c.Close())
		}
		c.schedulers = append(c.schedulers, &scheduler{conn: conn, ask: api.NewSchedulerClient(conn), timeout: cfg.Timeout, stats: &c.stats})
	}
	return c, nil
}

// Close sends the reports that wait, as far as they are taken in time, and hangs
// up. There must be no calls any more.
func (c *Client) Close() error {
	var errs []error
	for _, s := range c.schedulers {
		s.flushing.Wait()
		if s.conn != nil {
			errs = append(errs, s.conn.Close())
		}
	}
	return errors.Join(errs...)
}

// Stats returns the counts.
func (c *Client) Stats() Stats {
	return Stats{Picked: c.stats.picked.Load(), Unanswered: c.stats.unanswered.Load(), Reported: c.stats.reported.Load(), Lost: c.stats.lost.Load()}
}

// Pick asks for the member that should get the request. It takes no longer than
// the timeout for each scheduler. Its error is that of the last one asked.
func (c *Client) Pick(ctx context.Context, request *api.Request) (*Placement, error) {
	err := status.Error(codes.Unavailable, "no scheduler has answered in time of late")
	for _, s := range c.schedulers {
		if s.rests(time.Now()) {
			continue
		}
		var answer *api.PickResponse
		if answer, err = s.pick(ctx, request); err == nil {
			c.stats.picked.Add(1)
			return placed(s, answer), nil
		}
		if ctx.Err() != nil || !elsewhere(err) {
			break
		}
	}
	c.stats.unanswered.Add(1)
	return nil, err
}

// elsewhere tells whether another scheduler may answer what this one did not: it
// is away, stops or is overloaded. What is wrong with the request is so everywhere.
func elsewhere(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Internal, codes.Unknown, codes.Unimplemented:
		return true
	}
	return false
}

// Do serves one request. It asks where, calls send with that, and reports what
// send returns; a report of nil says only whether it worked. If send returns an
// error that Another made, Do tries another member. A send that knows better than
// its error who is to blame says so by the report's outcome.
//
// Where no scheduler says where, choose does: the address of a member that is not
// among those tried, or nothing. A nil choose has nobody.
func (c *Client) Do(ctx context.Context, request *api.Request, choose func(tried []string) string, send func(context.Context, *Placement) (*api.Report, error)) error {
	var tried []string
	var failed error
	for len(tried) < c.cfg.Attempts {
		place, err := c.Pick(ctx, without(request, tried))
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if place = chosen(choose, tried); place == nil {
				if failed != nil {
					return failed
				}
				return fmt.Errorf("pick: %w", err)
			}
			place.Why = err
		}
		report, err := send(ctx, place)
		place.end(ctx, report, err)
		var another *anotherError
		if err == nil || !errors.As(err, &another) || ctx.Err() != nil {
			return err
		}
		failed = another.error
		tried = append(tried, place.Address)
	}
	return failed
}

func chosen(choose func([]string) string, tried []string) *Placement {
	if choose == nil {
		return nil
	}
	address := choose(tried)
	if address == "" || slices.Contains(tried, address) {
		return nil
	}
	return &Placement{Address: address, since: time.Now()}
}

// without is the request with those excluded that were tried. It is another one
// then, so that it has another name.
func without(request *api.Request, tried []string) *api.Request {
	if len(tried) == 0 {
		return request
	}
	r := proto.CloneOf(request)
	for _, address := range tried {
		r.Exclude = append(r.Exclude, &api.MemberRef{Ref: &api.MemberRef_Address{Address: address}})
	}
	if r.RequestId != "" {
		r.RequestId = fmt.Sprintf("%s/%d", r.RequestId, len(tried)+1)
	}
	return r
}

// Another marks an error of send: nothing of an answer has gone to the client, so
// another member may be tried.
func Another(err error) error { return &anotherError{err} }

type anotherError struct{ error }

func (e *anotherError) Unwrap() error { return e.error }
