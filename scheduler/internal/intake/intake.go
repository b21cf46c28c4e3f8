// Package intake turns what callers send into a prompt that has block keys:
// token ids in three forms, text, chat messages and whole OpenAI bodies. Text
// becomes tokens by asking an engine of the model over HTTP, because only the
// engine knows its tokenizer and chat template; answers are cached.
//
// It scores nothing and knows of members only where an engine listens. A
// prompt that nobody can turn into tokens is no error: the Prompt says why it
// has none, and the choice is left to load. Nothing of a prompt reaches an
// error or a log.
package intake

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"
)

// ErrInvalid marks what the caller has to mend.
var ErrInvalid = errors.New("invalid request")

// Config of an Intake.
type Config struct {
	// Engines lists where engines listen that serve the model (a served name
	// or an adapter's), as host:port or URL, and that may get APIKey and the
	// prompt; an error says why none may. It may be nil: then text never becomes
	// tokens.
	Engines func(model string) ([]string, error)
	// TLS says whom to believe at engines that speak it; nil: the system's
	// authorities.
	TLS *tls.Config
	// APIKey is sent to the engines as bearer token; empty: none.
	APIKey string
	// Timeout for turning one prompt into tokens, over all attempts; 0: 3 s. A
	// caller's own deadline leaves a quarter of its time for the choice.
	Timeout time.Duration
	// CacheBytes bounds the cache of rendered prompts; 0: 64 MiB, negative: no
	// cache.
	CacheBytes int64
	// CacheFor is how long a cached answer is used; 0: 10 min.
	CacheFor time.Duration
	// MaxTokens of a prompt; 0: 2,097,152.
	MaxTokens int
	// MaxAnswer bytes are read from an engine; 0: 64 MiB.
	MaxAnswer int64
	// Sessions says where requests name theirs; see SetSessions.
	Sessions Sessions
}

// Intake is safe for concurrent use.
type Intake struct {
	cfg     Config
	client  *http.Client
	engines engines
	cache   *cache
	flights flights
	counts  counts

	sessions atomic.Pointer[Sessions]
}

type counts struct {
	tokens, keys, bodies, none atomic.Uint64
	shared, unresolved         atomic.Uint64
	calls                      [endpoints][outcomes]atomic.Uint64
}

// New returns an Intake. Close frees its idle connections.
func New(cfg Config) *Intake {
	if cfg.Engines == nil {
		cfg.Engines = func(string) ([]string, error) { return nil, nil }
	}
	cfg.Timeout = cmp.Or(cfg.Timeout, 3*time.Second)
	cfg.CacheBytes = cmp.Or(cfg.CacheBytes, 64<<20)
	cfg.CacheFor = cmp.Or(cfg.CacheFor, 10*time.Minute)
	cfg.MaxTokens = cmp.Or(cfg.MaxTokens, 2<<20)
	cfg.MaxAnswer = cmp.Or(cfg.MaxAnswer, 64<<20)
	i := &Intake{
		cfg:     cfg,
		client:  newClient(cfg.TLS),
		engines: engines{known: make(map[string]*engine)},
		cache:   newCache(cfg.CacheBytes, cfg.CacheFor),
		flights: flights{open: make(map[digest]*flight)},
	}
	i.SetSessions(cfg.Sessions)
	return i
}

// SetSessions changes Config.Sessions for requests that come from now on.
func (i *Intake) SetSessions(s Sessions) { i.sessions.Store(&s) }

// Session of a request that does not name it itself; see Sessions.Of.
func (i *Intake) Session(headers map[string]string, body []byte) string {
	return i.sessions.Load().Of(headers, body)
}

// Close closes idle connections to engines.
func (i *Intake) Close() { i.client.CloseIdleConnections() }

// Call counts requests to one endpoint of engines with one outcome.
type Call struct {
	Endpoint, Outcome string
	Count             uint64
}

// Stats are counts since New, and the cache as it is.
type Stats struct {
	// Prompts by form.
	Tokens, Keys, Bodies, None uint64
	// Hits and Misses of the cache, Shared prompts that waited for an equal
	// one, Evicted entries, Unresolved prompts that stayed without tokens.
	Hits, Misses, Shared, Evicted, Unresolved uint64
	CacheBytes                                int64
	// Calls to engines; combinations that never happened are there with 0.
	Calls []Call
}

// Stats returns the counts.
func (i *Intake) Stats() Stats {
	c := &i.counts
	s := Stats{
		Tokens: c.tokens.Load(), Keys: c.keys.Load(), Bodies: c.bodies.Load(), None: c.none.Load(),
		Shared: c.shared.Load(), Unresolved: c.unresolved.Load(),
	}
	i.cache.stats(&s)
	for e := range endpoints {
		for o := range outcomes {
			s.Calls = append(s.Calls, Call{Endpoint: e.String(), Outcome: o.String(), Count: c.calls[e][o].Load()})
		}
	}
	return s
}

// resolve asks cache and engines for the tokens of a document and completes
// the prompt with them, or with the reason why there are none.
func (i *Intake) resolve(ctx context.Context, p Prompt, d document) (Prompt, error) {
	r, err := i.render(ctx, p.lookup(), d)
	if err != nil {
		if ctx.Err() != nil {
			return Prompt{}, fmt.Errorf("turn the prompt into tokens: %w", ctx.Err())
		}
		i.counts.unresolved.Add(1)
		p.Fallback = err.Error()
		return p, nil
	}
	if p.Salt == "" {
		p.Salt = r.salt
	}
	p.Tokens, p.Items, p.Length = r.tokens, r.items, len(r.tokens)/4
	return p, i.check(&p)
}

// render returns the tokens of a document. Its errors name no part of the
// prompt and can be shown to the caller.
func (i *Intake) render(ctx context.Context, model string, d document) (*rendered, error) {
	key := d.digest(model)
	for {
		if r := i.cache.get(key); r != nil {
			return r, nil
		}
		f, mine := i.flights.join(key)
		if mine {
			return i.fly(ctx, f, key, model, d)
		}
		i.counts.shared.Add(1)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-f.landed:
		}
		if !f.abandoned {
			return f.rendered, f.err
		}
	}
}

// fly asks the engines on behalf of all who wait for the flight.
func (i *Intake) fly(ctx context.Context, f *flight, key digest, model string, d document) (*rendered, error) {
	// Unless the flight ends well, those who wait try again by themselves.
	f.abandoned = true
	defer i.flights.land(key, f)

	budget, mine := i.cfg.Timeout, false
	if deadline, ok := ctx.Deadline(); ok {
		if left := time.Until(deadline) * 3 / 4; left < budget {
			budget, mine = left, true
		}
	}
	asking, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	f.rendered, f.err = i.ask(asking, model, d)
	if f.err == nil {
		i.cache.put(key, f.rendered)
	}
	// A failure for want of this caller's time says nothing to the others.
	f.abandoned = f.err != nil && (ctx.Err() != nil || mine && asking.Err() != nil)
	return f.rendered, f.err
}
