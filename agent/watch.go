package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/protocol/settings"
)

const (
	// probeFast is the pace until the engine answers: the sooner its ranks are
	// known, the fewer events are missed.
	probeFast = 100 * time.Millisecond
	// probeSuspect is the pace while a rank's events seem not to be its engine's.
	probeSuspect = 200 * time.Millisecond
	// ranksWithin is how long the engine may leave open which ranks it has.
	ranksWithin = 5 * time.Second
	// retireAfter is the number of looks in a row that do not name a rank any more.
	retireAfter = 10
)

// watch polls of the engine's HTTP server: what it serves, how loaded it is,
// and what its events don't tell. It decides which ranks there are.
type watch struct {
	cfg    *Config
	engine *vllm.Engine
	start  func(number int, id identity, hits hitRule, source vllm.Source, now emptied) (*rank, error)
	retire func(*rank)

	// Owned by run.
	version   string
	reported  vllm.Config
	reporting chan vllm.Config // carries at most one; nil: nobody is asking
	sources   map[int]vllm.Source
	said      bool   // the engine has said what its sources are
	unread    string // why what it said has no meaning; empty: it has
	asked     bool   // version and sources are those of the running engine
	models    vllm.Models
	since     time.Time // the engine answers without a break since then
	silent    int       // looks in a row that it did not answer
	missing   map[int]int
	over      map[int]vllm.Source // by rank: what overrules the configuration, as logged
	adapters  map[string]string   // name -> root, as seen before
	unnamed   int                 // names left out of heartbeats

	asking sync.WaitGroup // for the configuration

	mu     sync.Mutex // guards all below
	ranks  map[int]*rank
	status engineStatus
	polls  uint64
	failed uint64
}

// engineStatus is what people are told of the engine.
type engineStatus struct {
	Version string   `json:"version,omitempty"`
	Models  []string `json:"models,omitempty"`
	Error   string   `json:"error,omitempty"` // of the newest look
}

// run looks until ctx ends. Nothing that the engine says ends it.
func (w *watch) run(ctx context.Context) {
	defer w.asking.Wait()
	logged := ""
	for ctx.Err() == nil {
		err := w.poll(ctx)
		w.mu.Lock()
		w.polls++
		w.status.Error = ""
		pause := w.cfg.Probe
		if err != nil {
			w.failed++
			w.status.Error = err.Error()
			pause = min(pause, probeFast)
		}
		w.mu.Unlock()
		if text := fmt.Sprint(err); ctx.Err() == nil && text != logged {
			logged = text
			if err != nil {
				w.cfg.Log.Warn("engine does not answer as it should", "engine", settings.RedactURLs(w.cfg.Engine), "error", err,
					"do", "nothing while it loads its model; else see whether it runs, and -engine and -engine-api-key")
			} else {
				w.cfg.Log.Info("engine answers", "engine", settings.RedactURLs(w.cfg.Engine), "version", w.version, "models", w.models.Names)
			}
		}
		w.rest(ctx, pause*9/10+rand.N(pause/5))
	}
}

// rest waits for the next look. Meanwhile each rank's events are compared with
// what the last one found, once they can be expected to have arrived; while a
// difference shows, the next look comes soon.
func (w *watch) rest(ctx context.Context, pause time.Duration) {
	began := time.Now()
	for ctx.Err() == nil {
		var next time.Time
		for _, r := range w.list() {
			due, soon := r.compare()
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
		select {
		case <-time.After(max(next.Sub(now), time.Millisecond)):
		case w.reported = <-w.reporting:
			w.reporting = nil
			return
		case <-ctx.Done():
		}
	}
}

// look asks the engine once and hands on what is new.
func (w *watch) poll(ctx context.Context) error {
	marks := make(map[int]mark)
	for _, r := range w.list() {
		marks[r.number] = r.mark()
	}
	models, modelsErr := w.engine.Models(ctx)
	asked := time.Now()
	page, pageErr := w.engine.Metrics(ctx)
	at := time.Now()
	if modelsErr != nil && pageErr != nil {
		w.asked, w.since = false, time.Time{}
		// A busy engine may be slow once; one that is away is so again and again.
		if w.silent++; w.silent >= w.cfg.ProbeFailures {
			for _, r := range w.list() {
				r.unreachable(at)
			}
		}
		return modelsErr
	}
	w.silent = 0
	if w.since.IsZero() {
		w.since = at
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
	for _, r := range w.list() {
		w.report(r, page, pageErr, marks, asked, at)
	}
	return errors.Join(modelsErr, pageErr, settleErr)
}

// ask learns what changes only with the engine's process.
func (w *watch) ask(ctx context.Context) {
	if w.asked {
		return
	}
	version, err := w.engine.Version(ctx)
	if err == nil {
		w.version = version
	}
	sources, said, sourcesErr := w.engine.Sources(ctx)
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
func (w *watch) askConfig(ctx context.Context) {
	answer := make(chan vllm.Config, 1)
	w.reported, w.reporting = vllm.Config{}, answer
	w.asking.Go(func() {
		c, err := w.engine.Config(ctx)
		if err != nil {
			w.cfg.Log.Info("engine does not tell its configuration", "error", err)
		}
		answer <- c
	})
}

// name is the identity of the keys; empty: not known yet.
func (w *watch) name() string {
	if w.cfg.Model != "" || len(w.models.Names) == 0 {
		return w.cfg.Model
	}
	return w.models.Names[0]
}

// reload purges adapters that are gone or came back from another place: under
// their old name they have other weights.
func (w *watch) reload(adapters []vllm.Adapter) {
	roots := make(map[string]string, len(adapters))
	for _, a := range adapters {
		roots[a.Name] = a.Root
	}
	for name, root := range w.adapters {
		if now, ok := roots[name]; ok && now == root {
			continue
		}
		w.cfg.Log.Info("adapter is gone or reloaded, forgetting its blocks", "adapter", name)
		for _, r := range w.list() {
			r.purge(name)
		}
	}
	w.adapters = roots
}

// settle starts the ranks that are new and retires those that are gone. At the
// bound the others wait until some are gone.
func (w *watch) settle(page vllm.Page, pageErr error, at time.Time) (err error) {
	wanted := w.wanted(page, pageErr, at)
	for _, n := range wanted {
		delete(w.missing, n)
		r := w.rank(n)
		if r == nil && len(w.list()) >= vllm.MaxRanks {
			continue
		}
		source := w.source(n)
		switch {
		case r == nil:
			now := emptied{}
			if pageErr == nil {
				now = emptiedOf(page)
			}
			r, startErr := w.start(n, w.identity(n, page), w.hits(n, page), source, now)
			if startErr != nil {
				err = errors.Join(err, fmt.Errorf("rank %d: %w", n, startErr))
				continue
			}
			w.mu.Lock()
			w.ranks[n] = r
			w.mu.Unlock()
		case r.source != source:
			r.move(source)
		}
	}
	ranks := w.list()
	for _, r := range ranks {
		r.share(min(rankBlocks, mirrorBlocks/len(ranks)))
		if len(wanted) == 0 || slices.Contains(wanted, r.number) {
			continue
		}
		if w.missing[r.number]++; w.missing[r.number] < retireAfter {
			continue
		}
		r.log.Warn("the engine does not have this rank any more", "do", "nothing if it was started with fewer ranks")
		delete(w.missing, r.number)
		delete(w.over, r.number)
		w.mu.Lock()
		delete(w.ranks, r.number)
		w.mu.Unlock()
		w.retire(r)
	}
	return err
}

// wanted are the ranks that the engine has. Metrics know best; a process may
// have only a high one.
func (w *watch) wanted(page vllm.Page, pageErr error, at time.Time) []int {
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
	if len(numbers) == 0 && len(w.list()) == 0 && at.Sub(w.since) > ranksWithin {
		numbers = append(numbers, 0)
	}
	return numbers
}

// source is where a rank's events are: as the engine reports, because it knows;
// else as configured; else where most engines have them. An engine that connects
// to us cannot say where that is.
func (w *watch) source(n int) vllm.Source {
	configured := w.configured(n)
	switch {
	case w.cfg.EventsBind, !w.said:
		return configured
	case w.unread != "" && w.cfg.Events != "":
		return configured
	case w.unread != "":
		return vllm.Source{Unusable: "what the engine says of its event endpoints cannot be used: " + w.unread}
	}
	chosen, known := w.sources[n]
	if !known {
		chosen.Unusable = "the engine publishes no KV events"
	}
	// The same port under another host is the same socket, seen from here.
	if w.cfg.Events != "" && samePort(configured.Endpoint, chosen.Endpoint) {
		chosen.Endpoint = configured.Endpoint
	}
	if w.cfg.Replay == NoReplay || w.cfg.Replay != "" && samePort(configured.Replay, chosen.Replay) {
		chosen.Replay = configured.Replay
	}
	overruled := w.cfg.Events != "" && chosen.Endpoint != configured.Endpoint || w.cfg.Replay != "" && chosen.Replay != configured.Replay
	if overruled && w.over[n] != chosen {
		w.over[n] = chosen
		w.cfg.Log.Warn("the engine reports other event endpoints than configured, which are used: correct or drop -events and -replay",
			"rank", n, "engine", settings.RedactURLs(w.cfg.Engine), "configured", configured.Endpoint, "configured_replay", configured.Replay,
			"events", chosen.Endpoint, "replay", chosen.Replay, "unusable", chosen.Unusable)
	}
	return chosen
}

// configured is a rank's source by the configuration and by convention.
func (w *watch) configured(n int) vllm.Source {
	host := w.engine.Host()
	base := cmp.Or(w.cfg.Events, "tcp://"+net.JoinHostPort(host, defaultEventsPort))
	endpoint, err := vllm.RankEndpoint(base, n)
	if err != nil {
		return vllm.Source{Unusable: err.Error()}
	}
	s := vllm.Source{Endpoint: endpoint}
	switch w.cfg.Replay {
	case NoReplay:
	case "":
		s.Replay = vllm.ReplayBeside(base, host, replayOffset+n)
	default:
		// A replay that cannot be had makes the cache state a lower bound.
		s.Replay, _ = vllm.RankEndpoint(w.cfg.Replay, n)
	}
	return s
}

// samePort says that two endpoints may be one socket under two names.
func samePort(a, b string) bool {
	port := func(endpoint string) string { return endpoint[strings.LastIndexByte(endpoint, ':')+1:] }
	return a == b || strings.HasPrefix(a, "tcp://") && strings.HasPrefix(b, "tcp://") && port(a) == port(b)
}

func (w *watch) identity(n int, page vllm.Page) identity {
	id := identity{model: w.name(), blockSize: w.cfg.BlockSize, reported: w.cfg.BlockSize}
	for _, r := range page.Ranks {
		if r.Rank == n {
			id.reported = cmp.Or(w.cfg.BlockSize, r.Cache.BlockSize)
			id.blocks = r.Cache.Blocks
		}
	}
	return id
}

// hits is how a rank's hits end, as far as a look tells it.
func (w *watch) hits(n int, page vllm.Page) hitRule {
	var cache vllm.Cache
	for _, r := range page.Ranks {
		if r.Rank == n {
			cache = r.Cache
		}
	}
	return hitRuleOf(w.reported, w.cfg, page.Speculates, cache, w.version)
}

// tell hands a rank what a look has found about it.
func (w *watch) report(r *rank, page vllm.Page, pageErr error, marks map[int]mark, asked, at time.Time) {
	broken := cmp.Or(r.source.Unusable, r.unconnected(w.since))
	if pageErr == nil {
		i := slices.IndexFunc(page.Ranks, func(m vllm.RankMetrics) bool { return m.Rank == r.number })
		if i >= 0 {
			m := page.Ranks[i]
			r.become(w.identity(r.number, page))
			r.follow(w.hits(r.number, page))
			r.sample(&m.Load, at)
			if before, ok := marks[r.number]; ok {
				r.weigh(&m.Load, emptiedOf(page), before, asked)
				r.counted(emptiedOf(page), before)
			}
			if m.Cache.PrefixCaching != nil && !*m.Cache.PrefixCaching {
				broken = "prefix caching is off in the engine"
			}
		}
	}
	r.describe(w.info(r.number), broken)
}

// info describes a rank to schedulers.
func (w *watch) info(n int) *pb.MemberInfo {
	info := &pb.MemberInfo{
		Namespace: w.cfg.Namespace, Pod: w.cfg.Pod, PodUid: w.cfg.PodUID, Rank: uint32(n), Labels: w.cfg.Labels,
		Address: cmp.Or(w.cfg.Address, w.engine.Address()),
		Engine:  "vllm", EngineVersion: w.version,
		Models: []string{w.name()}, Root: w.models.Root, MaxModelLen: uint64(w.models.MaxModelLen),
	}
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

// fit leaves out the a heartbeat cannot carry all names: requests for them
// are placed by load.
func (w *watch) fit(info *pb.MemberInfo) {
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

func (w *watch) rank(n int) *rank {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ranks[n]
}

// list gives the ranks in their order.
func (w *watch) list() []*rank {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := make([]*rank, 0, len(w.ranks))
	for _, r := range w.ranks {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b *rank) int { return a.number - b.number })
	return list
}
