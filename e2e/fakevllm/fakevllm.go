// Package fakevllm stands in for a vLLM engine where there is no GPU. On the
// wire it is vLLM 0.32: KV events over ZeroMQ with replay, the metric names,
// the OpenAI-compatible HTTP endpoints and their answers. Inside is a real block
// pool under a continuous batch: reference-counted blocks, eviction when a
// block is reused, chunked prefill, at most all but the last token cached. What
// is not real is the arithmetic: a step takes the time a Profile says, divided
// by a speed-up, and the tokens it generates are letters.
//
// A Publisher, the event side alone, can play what another engine once sent.
//
// The package imports nothing of kvscout, so that both agree on the wire or
// tests fail.
package fakevllm

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Config configures an Engine.
type Config struct {
	// Model is the served model name; empty: "fake".
	Model string
	// Version is what /version says; empty: "0.32.0".
	Version string
	// Adapters are LoRA adapters that are loaded from the start.
	Adapters []Adapter
	// MaxAdapters is max_loras; 0: 4.
	MaxAdapters int

	// Host to listen on; empty: 127.0.0.1.
	Host string
	// TLS that HTTP is served by; nil: plain text.
	TLS *tls.Config
	// Port of HTTP, EventsPort and ReplayPort of rank 0; rank r is at the port
	// + r. 0: free ports.
	Port, EventsPort, ReplayPort int
	// Topic of the events; empty is vLLM's default too.
	Topic string
	// BufferSteps and ReplayHWM as in PublisherConfig.
	BufferSteps, ReplayHWM int
	// ThreeFrameReplay as in PublisherConfig.
	ThreeFrameReplay bool
	// NoEvents and NoReplay turn the events, or only the replay, off.
	NoEvents, NoReplay bool
	// NoSources answers 404 where the event endpoints are told, as vLLM did
	// before 0.31.
	NoSources bool
	// NoRequestCounts leaves http_requests_total out of /metrics, like an API
	// server without that instrumentation: resets and sleeps go uncounted.
	NoRequestCounts bool
	// NoPromptDetails leaves cached tokens out of usage, as an engine does without
	// --enable-prompt-tokens-details.
	NoPromptDetails bool
	// Era of the events; zero: Maps.
	Era Era

	// Ranks is the number of data-parallel ranks; 0: 1.
	Ranks int
	// BlockSize in tokens; 0: 16.
	BlockSize int
	// Groups of the model's layers that have blocks of their own; empty: one of
	// Full attention.
	Groups []Group
	// Dense keeps every block that a group has, as vLLM did by default before
	// 0.30. Otherwise Sliding and StateSpace groups keep what the end of a prompt
	// and known junctions need.
	Dense bool
	// Drops: the engine drops the last block of each hit, as EAGLE makes it.
	Drops bool
	// Blocks of the pool of each rank, the null block included; 0: Qwen32BBlocks.
	Blocks int
	// MaxModelLen in tokens; 0: 131,072, or what the pool can hold.
	MaxModelLen int
	// MaxBatchedTokens in a step; 0: 8,192.
	MaxBatchedTokens int
	// MaxSequences that run at once; 0: 256.
	MaxSequences int
	// Preemption admits a sequence when there is room for its prompt, and lets
	// the last ones start over when the others need theirs, as vLLM does.
	// Otherwise a sequence is admitted when all it may ever need is there.
	Preemption bool
	// PriorityScheduling serves by the requests' priority, lower first.
	PriorityScheduling bool
	// StreamInterval is how many tokens a streamed chunk holds, after the
	// first; 0: 1.
	StreamInterval int
	// ScaleOut enables the render endpoints, which vLLM 0.32 has off.
	ScaleOut bool

	// Profile of the steps; zero: Qwen32B.
	Profile Profile
	// Speedup divides the profile's times; 0: 1. All that the engine reports is
	// in real time.
	Speedup float64
	// Seed of what is generated.
	Seed uint64
}

// Adapter is a LoRA adapter.
type Adapter struct {
	Name, Path string
}

func (c Config) withDefaults() Config {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	if c.Model == "" {
		c.Model = "fake"
	}
	if c.Version == "" {
		c.Version = "0.32.0"
	}
	if c.Host == "" {
		c.Host = "127.0.0.1"
	}
	def(&c.MaxAdapters, 4)
	def(&c.BufferSteps, 10000)
	def(&c.Ranks, 1)
	def(&c.BlockSize, 16)
	def(&c.Blocks, Qwen32BBlocks)
	if len(c.Groups) == 0 {
		c.Groups = []Group{{Kind: Full}}
	}
	def(&c.MaxModelLen, min(131072, (c.Blocks-1)/len(c.Groups)*c.BlockSize))
	def(&c.MaxBatchedTokens, 8192)
	def(&c.MaxSequences, 256)
	def(&c.StreamInterval, 1)
	if c.Profile == (Profile{}) {
		c.Profile = Qwen32B()
	}
	if c.Speedup == 0 {
		c.Speedup = 1
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	positive := func(name string, v int) {
		if v < 1 {
			errs = append(errs, fmt.Errorf("%s is %d", name, v))
		}
	}
	positive("ranks", c.Ranks)
	positive("block size", c.BlockSize)
	positive("max batched tokens", c.MaxBatchedTokens)
	positive("max sequences", c.MaxSequences)
	positive("stream interval", c.StreamInterval)
	positive("max model length", c.MaxModelLen)
	if c.Blocks < 2 {
		errs = append(errs, fmt.Errorf("blocks is %d, at least 2 are needed", c.Blocks))
	} else if c.MaxModelLen > (c.Blocks-1)/len(c.Groups)*c.BlockSize {
		errs = append(errs, fmt.Errorf("max model length %d does not fit into %d blocks of %d for %d groups", c.MaxModelLen, c.Blocks-1, c.BlockSize, len(c.Groups)))
	}
	for i, g := range c.Groups {
		if (g.Kind == Sliding || g.Kind == Chunked) && g.Span < 1 {
			errs = append(errs, fmt.Errorf("group %d (%s) has a span of %d", i, g.spec(), g.Span))
		}
		if g.Kind == Chunked && (c.Drops || g.Span%max(c.BlockSize, 1) != 0) {
			errs = append(errs, fmt.Errorf("group %d: chunks of %d with blocks of %d, drops %v: vLLM has no such engine", i, g.Span, c.BlockSize, c.Drops))
		}
	}
	if c.Speedup < 0 {
		errs = append(errs, fmt.Errorf("speed-up is %v", c.Speedup))
	}
	return errors.Join(errs...)
}

// Engine is one engine process: its ranks and its HTTP server.
type Engine struct {
	cfg      Config
	started  time.Time
	listener net.Listener
	ranks    []*rank
	events   []*Publisher // by rank, empty without events
	metrics  *metrics
	requests sync.WaitGroup
	// noSources as in Config; it may change while the engine runs.
	noSources atomic.Bool

	mu       sync.Mutex // guards what follows
	adapters map[string]loaded
	lastID   int
	inFlight int
	issued   uint64 // request ids
}

// loaded is an adapter and the number it got.
type loaded struct {
	Adapter
	id int
}

// New binds the sockets, so that the addresses are known. Run serves them, and
// must be called to release them.
func New(cfg Config) (*Engine, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("fake engine: %w", err)
	}
	e := &Engine{cfg: cfg, started: time.Now(), adapters: make(map[string]loaded)}
	e.HideSources(cfg.NoSources)
	for _, a := range cfg.Adapters {
		e.load(a)
	}
	var err error
	e.listener, err = net.Listen("tcp", net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port)))
	if err != nil {
		return nil, fmt.Errorf("fake engine: %w", err)
	}
	if !cfg.NoEvents {
		if e.events, err = bindRanks(cfg); err != nil {
			e.listener.Close()
			return nil, fmt.Errorf("fake engine: %w", err)
		}
	}
	e.metrics = newMetrics(e)
	for i := range cfg.Ranks {
		var p *Publisher
		if e.events != nil {
			p = e.events[i]
		}
		e.ranks = append(e.ranks, newRank(i, cfg, p, e.metrics))
	}
	return e, nil
}

// bindRanks binds a publisher for each rank on consecutive ports. Free ports
// are tried until they are.
func bindRanks(cfg Config) ([]*Publisher, error) {
	var err error
	for range 20 {
		var list []*Publisher
		if list, err = tryRanks(cfg); err == nil {
			return list, nil
		}
		if cfg.EventsPort != 0 && (cfg.ReplayPort != 0 || cfg.NoReplay) {
			break
		}
	}
	return nil, err
}

func tryRanks(cfg Config) (list []*Publisher, err error) {
	defer func() {
		if err != nil {
			for _, p := range list {
				p.Close()
			}
		}
	}()
	at := func(base, first, rank int) int {
		switch {
		case base != 0:
			return base + rank
		case rank == 0:
			return 0
		}
		return first + rank
	}
	var firstEvents, firstReplay int
	for r := range cfg.Ranks {
		pc := PublisherConfig{
			Endpoint:         fmt.Sprintf("tcp://%s:%d", cfg.Host, at(cfg.EventsPort, firstEvents, r)),
			Topic:            cfg.Topic,
			BufferSteps:      cfg.BufferSteps,
			ReplayHWM:        cfg.ReplayHWM,
			ThreeFrameReplay: cfg.ThreeFrameReplay,
		}
		if !cfg.NoReplay {
			pc.ReplayEndpoint = fmt.Sprintf("tcp://%s:%d", cfg.Host, at(cfg.ReplayPort, firstReplay, r))
		}
		p, err := NewPublisher(pc)
		if err != nil {
			return list, err
		}
		list = append(list, p)
		if r == 0 {
			firstEvents = port(p.events)
			if p.replay != nil {
				firstReplay = port(p.replay)
			}
		}
	}
	return list, nil
}

func port(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }

// Addr is host:port of the HTTP server.
func (e *Engine) Addr() string { return e.listener.Addr().String() }

// HideSources makes the engine like one with Config.NoSources, or not.
func (e *Engine) HideSources(hidden bool) { e.noSources.Store(hidden) }

// URL is where the HTTP server is.
func (e *Engine) URL() string {
	if e.cfg.TLS != nil {
		return "https://" + e.Addr()
	}
	return "http://" + e.Addr()
}

// Events is the publisher of a rank; nil without events.
func (e *Engine) Events(rank int) *Publisher {
	if e.events == nil {
		return nil
	}
	return e.events[rank]
}

// Run serves until ctx ends. Then requests are cut off, as a dying engine does.
func (e *Engine) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var group sync.WaitGroup
	for _, p := range e.events {
		group.Go(func() { _ = p.Run(ctx) })
	}
	for _, r := range e.ranks {
		group.Go(func() { r.run(ctx) })
	}
	srv := &http.Server{
		Handler:           e.handler(),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 10 * time.Second,
	}
	failed := make(chan error, 1)
	listener := e.listener
	if e.cfg.TLS != nil {
		listener = tls.NewListener(listener, e.cfg.TLS)
	}
	go func() { failed <- srv.Serve(listener) }()
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		stop()
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	if srv.Shutdown(grace) != nil {
		_ = srv.Close()
	}
	cancel()
	if err == nil {
		if end := <-failed; !errors.Is(end, http.ErrServerClosed) {
			err = end
		}
	}
	e.requests.Wait()
	group.Wait()
	return err
}

// Counters is what a rank counted since its start.
type Counters struct {
	Steps             uint64
	Queries, Hits     uint64 // prompt tokens looked up and found
	Stored, Evicted   uint64 // blocks
	Finished, Aborted uint64 // requests
	Preempted         uint64
	PromptTokens      uint64 // of finished requests
	Generated         uint64 // tokens
	FirstTokens       uint64 // requests that got one
	// FirstTokenWait is the time from the requests' arrival to their first
	// tokens, together, in real time.
	FirstTokenWait time.Duration
	Resets         uint64
	// Lag is time that the machine was too slow for: steps began later than the
	// profile says. It should be nothing.
	Lag time.Duration
}

// State is what a rank is doing now, which /metrics tells at the end of a step.
type State struct {
	Running, Waiting int
	// Usage is the share of blocks in use by running requests.
	Usage float64
	// Cached is the number of distinct block hashes that can be hit.
	Cached   int
	Counters Counters
}

// State returns a snapshot of a rank.
func (e *Engine) State(rank int) State {
	r := e.ranks[rank]
	r.mu.Lock()
	defer r.mu.Unlock()
	return State{
		Running:  len(r.running),
		Waiting:  len(r.waiting) + len(r.incoming),
		Usage:    r.pool.usage(),
		Cached:   len(r.pool.byHash),
		Counters: r.counters,
	}
}

// Held returns the engine's hash of every block a rank has cached, once for
// each copy, in no order.
func (e *Engine) Held(rank int) []uint64 {
	r := e.ranks[rank]
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pool.held(nil)
}

// Depth is how many leading whole blocks of tokens a rank's first group of Full
// attention has cached now, including one that holds the last token. Adapter
// and salt may be empty.
func (e *Engine) Depth(rank int, tokens []uint32, adapter, salt string) int {
	hashes := e.hashes(tokens, adapter, salt)
	group := slices.IndexFunc(e.cfg.Groups, func(g Group) bool { return g.Kind == Full })
	if group < 0 {
		return 0
	}
	r := e.ranks[rank]
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pool.match(hashes, group)
}

// Hit is how many tokens a rank would find cached of a prompt now.
func (e *Engine) Hit(rank int, tokens []uint32, adapter, salt string) int {
	hashes := e.hashes(tokens, adapter, salt)
	r := e.ranks[rank]
	r.mu.Lock()
	defer r.mu.Unlock()
	end, _ := e.cfg.hit(r.pool, hashes, len(tokens))
	return end * e.cfg.BlockSize
}

func (e *Engine) hashes(tokens []uint32, adapter, salt string) []uint64 {
	e.mu.Lock()
	a := e.adapters[adapter]
	e.mu.Unlock()
	return scope{adapter: adapter, path: a.Path, salt: salt}.appendHashes(nil, tokens, e.cfg.BlockSize)
}

func (e *Engine) load(a Adapter) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lastID++
	e.adapters[a.Name] = loaded{a, e.lastID}
}
