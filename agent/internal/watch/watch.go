// Package watch polls an engine's HTTP server: what it serves, how loaded it
// is, and what its events don't tell. It decides which ranks there are, has each
// followed, and hands on what the polls find out.
package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/rank"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
)

const (
	// probeFast is the pace until the engine answers: the sooner its ranks are
	// known, the fewer events are missed.
	probeFast = 100 * time.Millisecond
	// probeSuspect is the pace while a rank's events seem not to be its engine's.
	probeSuspect = 200 * time.Millisecond
	// ranksWithin is how long the engine may leave open which ranks it has.
	ranksWithin = 5 * time.Second
	// retireAfter is the number of polls in a row that do not name a rank any more.
	retireAfter = 10
)

// Config of a watch. What the engine says itself counts before most of it.
type Config struct {
	Engine *vllm.Engine
	URL    string // of the engine, for people
	// Every poll; Failures in a row make the members unreachable.
	Every    time.Duration
	Failures int
	// Audit is the time between two audits of the idle engine; 0: none.
	Audit time.Duration

	// Events and Replay of rank 0; empty: by convention.
	Events, Replay string
	EventsBind     bool
	// Model is the identity of the block keys; empty: the first served name.
	Model     string
	BlockSize int // in tokens; 0: the engine's
	Hits      rank.HitSettings
	// Member describes each rank to schedulers; the rest is the engine's.
	Member *pb.MemberInfo
	Log    *slog.Logger
}

// Watch is the watch of one engine.
type Watch struct {
	cfg    Config
	audits audits
	// open makes a rank, which follow has run until it is stopped.
	open   func(rank.Config) (*rank.Rank, error)
	follow func(*rank.Rank) (stop func())

	// Owned by pollAll.
	version   string
	reported  vllm.Config
	reporting chan vllm.Config // carries at most one; nil: nobody is asking
	sources   map[int]vllm.Source
	said      bool   // the engine has said what its sources are
	unread    string // why what it said has no meaning; empty: it has
	asked     bool   // version and sources are those of the running engine
	models    vllm.Models
	since     time.Time // the engine answers without a break since then
	met       time.Time // its first answer since nobody listened at its address; zero: nobody does
	silent    int       // polls in a row that it did not answer
	missing   map[int]int
	over      map[int]vllm.Source // by rank: what overrules the configuration, as logged
	adapters  map[string]string   // name -> root, as seen before
	unnamed   int                 // names left out of heartbeats

	asking sync.WaitGroup // for the configuration
	soon   chan struct{}  // asks for a poll soon

	mu     sync.Mutex // guards all below
	ranks  map[int]followed
	status Status
	polls  Polls
}

// followed is a rank that runs until stop.
type followed struct {
	*rank.Rank
	stop func()
}

// Status is what people are told of the engine.
type Status struct {
	Version string   `json:"version,omitempty"`
	Models  []string `json:"models,omitempty"`
	Error   string   `json:"error,omitempty"` // of the newest poll
}

// Polls counts them, and of these those that failed.
type Polls struct{ All, Failed uint64 }

// New is a watch that Run runs.
func New(cfg Config) *Watch {
	return &Watch{cfg: cfg, ranks: make(map[int]followed), missing: make(map[int]int), over: make(map[int]vllm.Source), soon: make(chan struct{}, 1)}
}

// Run polls until ctx ends or a rank cannot be followed any more. Nothing that
// the engine says ends it. open makes a rank of what was found of it.
func (w *Watch) Run(ctx context.Context, open func(rank.Config) (*rank.Rank, error)) error {
	g, ctx := errgroup.WithContext(ctx)
	w.open = open
	w.follow = func(r *rank.Rank) func() {
		ctx, stop := context.WithCancel(ctx)
		g.Go(func() error { return r.Run(ctx) })
		return stop
	}
	if w.cfg.Audit > 0 {
		g.Go(func() error { w.auditAll(ctx); return nil })
	}
	g.Go(func() error { w.pollAll(ctx); return nil })
	return g.Wait()
}

func (w *Watch) pollAll(ctx context.Context) {
	defer w.asking.Wait()
	logged := ""
	for ctx.Err() == nil {
		err := w.poll(ctx)
		w.mu.Lock()
		w.polls.All++
		w.status.Error = ""
		pause := w.cfg.Every
		if err != nil {
			w.polls.Failed++
			w.status.Error = err.Error()
			pause = min(pause, probeFast)
		}
		w.mu.Unlock()
		if text := fmt.Sprint(err); ctx.Err() == nil && text != logged {
			logged = text
			if err != nil {
				w.cfg.Log.Warn("engine does not answer as it should", "engine", w.cfg.URL, "error", err,
					"do", "nothing while it loads its model; else see whether it runs, and -engine and -engine-api-key")
			} else {
				w.cfg.Log.Info("engine answers", "engine", w.cfg.URL, "version", w.version, "models", w.models.Names)
			}
		}
		w.rest(ctx, pause*9/10+rand.N(pause/5))
	}
}

// pollSoon asks for a poll within probeFast of the one before.
func (w *Watch) pollSoon() {
	select {
	case w.soon <- struct{}{}:
	default: // it is asked for
	}
}

// rest waits for the next poll. Meanwhile each rank's events are compared with
// what the last one found, once they can be expected to have arrived; while a
// difference shows, the next poll comes soon.
func (w *Watch) rest(ctx context.Context, pause time.Duration) {
	began := time.Now()
	for ctx.Err() == nil {
		var next time.Time
		for _, r := range w.Ranks() {
			due, soon := r.Compare()
			if !due.IsZero() && (next.IsZero() || due.Before(next)) {
				next = due
			}
			if soon {
				pause = min(pause, probeSuspect)
			}
		}
		now, end := time.Now(), began.Add(pause)
		if !now.Before(end) {
			return
		}
		if next.IsZero() || next.After(end) {
			next = end
		}
		wait := max(next.Sub(now), time.Millisecond)
		select {
		case <-time.After(wait):
			for _, r := range w.Ranks() {
				r.Overslept(time.Since(now) - wait)
			}
		case w.reported = <-w.reporting:
			w.reporting = nil
			return
		case <-w.soon:
			pause = min(pause, probeFast)
		case <-ctx.Done():
		}
	}
}

// poll asks the engine once and hands on what is new.
func (w *Watch) poll(ctx context.Context) error {
	before := make(map[int]rank.Position)
	for _, r := range w.Ranks() {
		before[r.Number()] = r.Position()
	}
	models, modelsErr := w.cfg.Engine.Models(ctx)
	asked := time.Now()
	page, pageErr := w.cfg.Engine.Metrics(ctx)
	at := time.Now()
	if modelsErr != nil && pageErr != nil {
		w.asked, w.since = false, time.Time{}
		if errors.Is(pageErr, syscall.ECONNREFUSED) {
			w.met = time.Time{}
		}
		// A busy engine may be slow once; one that is away is so again and again.
		if w.silent++; w.silent >= w.cfg.Failures {
			for _, r := range w.Ranks() {
				r.Unreachable(at)
			}
		}
		return modelsErr
	}
	w.silent = 0
	if w.since.IsZero() {
		w.since = at
	}
	if w.met.IsZero() {
		w.met = at
	}
	if modelsErr == nil {
		w.ask(ctx)
		w.models = models
		w.reload(models.Adapters)
	}
	if w.name() == "" {
		return errors.Join(modelsErr, pageErr)
	}
	settleErr := w.settle(page, pageErr, at)
	for _, r := range w.Ranks() {
		w.report(r, page, pageErr, before, asked, at)
	}
	return errors.Join(modelsErr, pageErr, settleErr)
}

// ask learns what changes only with the engine's process.
func (w *Watch) ask(ctx context.Context) {
	if w.asked {
		return
	}
	version, err := w.cfg.Engine.Version(ctx)
	if err == nil {
		w.version = version
	}
	sources, said, sourcesErr := w.cfg.Engine.Sources(ctx)
	if sourcesErr == nil || said {
		w.sources, w.said, w.unread = sources, said, ""
	}
	if said && sourcesErr != nil {
		w.unread = sourcesErr.Error()
	}
	w.asked = err == nil && sourcesErr == nil
	if w.asked {
		w.askConfig(ctx)
	}
	if err := errors.Join(err, sourcesErr); err != nil {
		w.cfg.Log.Debug("engine says little about itself", "error", err)
	}
}

// askConfig asks for the engine's configuration beside the polls: an engine may
// take many seconds for its first answer.
func (w *Watch) askConfig(ctx context.Context) {
	answer := make(chan vllm.Config, 1)
	w.reported, w.reporting = vllm.Config{}, answer
	w.asking.Go(func() {
		c, err := w.cfg.Engine.Config(ctx)
		if err != nil {
			w.cfg.Log.Info("engine does not tell its configuration", "error", err)
		}
		answer <- c
	})
}

// name is the identity of the keys; empty: not known yet.
func (w *Watch) name() string {
	if w.cfg.Model != "" || len(w.models.Names) == 0 {
		return w.cfg.Model
	}
	return w.models.Names[0]
}

// reload purges adapters that are gone or came back from another place: under
// their old name they have other weights.
func (w *Watch) reload(adapters []vllm.Adapter) {
	roots := make(map[string]string, len(adapters))
	for _, a := range adapters {
		roots[a.Name] = a.Root
	}
	for name, root := range w.adapters {
		if now, ok := roots[name]; ok && now == root {
			continue
		}
		w.cfg.Log.Info("adapter is gone or reloaded, forgetting its blocks", "adapter", name)
		for _, r := range w.Ranks() {
			r.Purge(name)
		}
	}
	w.adapters = roots
}

// settle starts the ranks that are new and retires those that are gone. At the
// bound the others wait until some are gone.
func (w *Watch) settle(page vllm.Page, pageErr error, at time.Time) (err error) {
	wanted := w.wanted(page, pageErr, at)
	for _, n := range wanted {
		delete(w.missing, n)
		source := w.source(n)
		w.mu.Lock()
		r, known := w.ranks[n]
		full := len(w.ranks) >= vllm.MaxRanks
		w.mu.Unlock()
		switch {
		case known:
			r.Move(source)
		case !full:
			if e := w.start(n, source, page, pageErr); e != nil {
				err = errors.Join(err, fmt.Errorf("rank %d: %w", n, e))
			}
		}
	}
	ranks := w.Ranks()
	for _, r := range ranks {
		r.Share(len(ranks))
		n := r.Number()
		if len(wanted) == 0 || slices.Contains(wanted, n) {
			continue
		}
		if w.missing[n]++; w.missing[n] < retireAfter {
			continue
		}
		w.cfg.Log.Warn("the engine does not have this rank any more", "member", r.Member(), "do", "nothing if it was started with fewer ranks")
		delete(w.missing, n)
		delete(w.over, n)
		w.mu.Lock()
		stop := w.ranks[n].stop
		delete(w.ranks, n)
		w.mu.Unlock()
		stop() // its publisher takes leave
	}
	return err
}

// start follows one more rank.
func (w *Watch) start(n int, source vllm.Source, page vllm.Page, pageErr error) error {
	cfg := rank.Config{
		Number: n, Identity: w.identity(n, page), Hits: w.hits(n, page), Info: w.info(n), Source: source,
		Poll: w.pollSoon, Engine: w.cfg.URL, Audited: w.cfg.Audit > 0, Tail: vllm.TailConfig{Bind: w.cfg.EventsBind},
	}
	if pageErr == nil {
		cfg.Emptied = rank.EmptiedOf(page)
	}
	r, err := w.open(cfg)
	if err != nil {
		return err
	}
	w.cfg.Log.Info("following the engine", "member", r.Member(), "events", source.Endpoint, "unusable", source.Unusable, "replay", source.Replay, "model", cfg.Identity.Model)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ranks[n] = followed{r, w.follow(r)}
	return nil
}

// wanted are the ranks that the engine has. Metrics know best; a process may
// have only a high one.
func (w *Watch) wanted(page vllm.Page, pageErr error, at time.Time) []int {
	var numbers []int
	if pageErr == nil {
		for _, r := range page.Ranks {
			numbers = append(numbers, r.Rank)
		}
		return numbers
	}
	for n := range w.sources {
		numbers = append(numbers, n)
	}
	if len(numbers) == 0 && len(w.Ranks()) == 0 && at.Sub(w.since) > ranksWithin {
		numbers = append(numbers, 0)
	}
	return numbers
}

func (w *Watch) identity(n int, page vllm.Page) rank.Identity {
	id := rank.Identity{Model: w.name(), BlockSize: w.cfg.BlockSize, Reported: w.cfg.BlockSize}
	for _, r := range page.Ranks {
		if r.Rank == n {
			id.Reported = cmp.Or(w.cfg.BlockSize, r.Cache.BlockSize)
			id.Blocks = r.Cache.Blocks
		}
	}
	return id
}

// hits is how a rank's hits end, as far as a poll tells it.
func (w *Watch) hits(n int, page vllm.Page) rank.HitRule {
	var cache vllm.Cache
	for _, r := range page.Ranks {
		if r.Rank == n {
			cache = r.Cache
		}
	}
	return rank.HitRuleOf(w.reported, w.cfg.Hits, page.Speculates, cache, w.models.MaxModelLen, w.version)
}

// report hands a rank what a poll has found about it.
func (w *Watch) report(r *rank.Rank, page vllm.Page, pageErr error, before map[int]rank.Position, asked, at time.Time) {
	n, broken := r.Number(), r.Unconnected(w.since)
	if source := w.source(n); source.Unusable != "" {
		broken = source.Unusable
	}
	if i := slices.IndexFunc(page.Ranks, func(m vllm.RankMetrics) bool { return m.Rank == n }); pageErr == nil && i >= 0 {
		m := page.Ranks[i]
		found := rank.Poll{Identity: w.identity(n, page), Hits: w.hits(n, page), Load: m.Load, Began: w.began(page), Emptied: rank.EmptiedOf(page), Asked: asked, At: at}
		if at, ok := before[n]; ok {
			found.Before = &at
		}
		r.Learn(found)
		if m.Cache.PrefixCaching != nil && !*m.Cache.PrefixCaching {
			broken = "prefix caching is off in the engine"
		}
	}
	r.Describe(w.info(n), broken)
}

// began is when the process began that gave a page, by its own word; else when it
// was met. It tells one process from the next.
func (w *Watch) began(page vllm.Page) time.Time {
	if page.ProcessStart > 0 {
		return time.UnixMilli(int64(1000 * page.ProcessStart))
	}
	return w.met
}

// info describes a rank to schedulers.
func (w *Watch) info(n int) *pb.MemberInfo {
	info := proto.Clone(w.cfg.Member).(*pb.MemberInfo)
	info.Rank, info.Engine, info.EngineVersion = uint32(n), "vllm", w.version
	info.Models, info.Root, info.MaxModelLen = []string{w.name()}, w.models.Root, uint64(w.models.MaxModelLen)
	for _, name := range w.models.Names {
		if name != w.name() {
			info.Models = append(info.Models, name)
		}
	}
	for _, a := range w.models.Adapters {
		info.Adapters = append(info.Adapters, &pb.Adapter{Name: a.Name, Root: a.Root})
	}
	w.mu.Lock()
	w.status.Version, w.status.Models = w.version, info.Models
	w.mu.Unlock()
	w.fit(info)
	return info
}

// fit leaves out the names that a heartbeat cannot carry: requests for them are
// placed by load.
func (w *Watch) fit(info *pb.MemberInfo) {
	names, adapters := len(info.Models), len(info.Adapters)
	info.Models = info.Models[:min(names, protocol.MaxNames)]
	info.Adapters = info.Adapters[:min(adapters, protocol.MaxNames-len(info.Models))]
	for proto.Size(info) > protocol.MaxInfo && len(info.Adapters) > 0 {
		info.Adapters = info.Adapters[:len(info.Adapters)/2]
	}
	for proto.Size(info) > protocol.MaxInfo && len(info.Models) > 1 {
		info.Models = info.Models[:len(info.Models)/2]
	}
	left := names + adapters - len(info.Models) - len(info.Adapters)
	if left != w.unnamed {
		w.unnamed = left
		w.cfg.Log.Warn("a heartbeat cannot carry all names", "models and adapters", left)
	}
}

// Ranks in their order.
func (w *Watch) Ranks() []*rank.Rank {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := make([]*rank.Rank, 0, len(w.ranks))
	for _, n := range slices.Sorted(maps.Keys(w.ranks)) {
		list = append(list, w.ranks[n].Rank)
	}
	return list
}

// Status of the engine.
func (w *Watch) Status() Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.status
}

// Polls so far.
func (w *Watch) Polls() Polls {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.polls
}
