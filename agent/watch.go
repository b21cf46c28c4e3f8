package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
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
	// ranksWithin is how long the engine may leave open which ranks it has.
	ranksWithin = 5 * time.Second
	// retireAfter is the number of looks in a row that do not name a rank any more.
	retireAfter = 10
)

// watch looks at the engine's HTTP server: what it serves, how loaded it is,
// and what its events don't tell. It decides which ranks there are.
type watch struct {
	cfg    *Config
	engine *vllm.Engine
	start  func(number int, id identity, source vllm.Source, now emptied) (*rank, error)
	retire func(*rank)

	// Owned by run.
	version  string
	sources  map[int]vllm.Source
	said     bool // the engine has said what its sources are
	asked    bool // version and sources are those of the running engine
	models   vllm.Models
	since    time.Time // the engine answers without a break since then
	missing  map[int]int
	adapters map[string]string // name -> root, as seen before
	unnamed  int               // names left out of heartbeats

	mu     sync.Mutex // guards all below
	ranks  map[int]*rank
	status engineStatus
	looks  uint64
	failed uint64
}

// engineStatus is what people are told of the engine.
type engineStatus struct {
	Version string   `json:"version,omitempty"`
	Models  []string `json:"models,omitempty"`
	Error   string   `json:"error,omitempty"` // of the newest look
}

// run looks until ctx ends. An error is a rank that cannot be started.
func (w *watch) run(ctx context.Context) error {
	w.missing = make(map[int]int)
	logged := ""
	for ctx.Err() == nil {
		err := w.look(ctx)
		if fatal := (*startError)(nil); errors.As(err, &fatal) {
			return fatal.err
		}
		w.mu.Lock()
		w.looks++
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
				w.cfg.Log.Info("engine does not answer as it should", "engine", settings.RedactURLs(w.cfg.Engine), "error", err)
			} else {
				w.cfg.Log.Info("engine answers", "engine", settings.RedactURLs(w.cfg.Engine), "version", w.version, "models", w.models.Names)
			}
		}
		select {
		case <-time.After(pause*9/10 + rand.N(pause/5)):
		case <-ctx.Done():
		}
	}
	return nil
}

// startError is what ends the agent.
type startError struct{ err error }

func (e *startError) Error() string { return e.err.Error() }

// look asks the engine once and hands on what is new.
func (w *watch) look(ctx context.Context) error {
	marks := make(map[int]mark)
	for _, r := range w.list() {
		marks[r.number] = r.mark()
	}
	models, modelsErr := w.engine.Models(ctx)
	page, pageErr := w.engine.Metrics(ctx)
	at := time.Now()
	if modelsErr != nil && pageErr != nil {
		w.asked, w.since = false, time.Time{}
		for _, r := range w.list() {
			r.unreachable(at)
		}
		return modelsErr
	}
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
	if err := w.settle(page, pageErr, at); err != nil {
		return err
	}
	for _, r := range w.list() {
		w.tell(r, page, pageErr, marks, at)
	}
	return errors.Join(modelsErr, pageErr)
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
	if sourcesErr == nil {
		w.sources, w.said = sources, said
	}
	w.asked = err == nil && sourcesErr == nil
	if err := errors.Join(err, sourcesErr); err != nil {
		w.cfg.Log.Debug("engine says little about itself", "error", err)
	}
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

// settle starts the ranks that are new and retires those that are gone.
func (w *watch) settle(page vllm.Page, pageErr error, at time.Time) error {
	wanted := w.wanted(page, pageErr, at)
	for _, n := range wanted {
		w.missing[n] = 0
		source, err := w.source(n)
		r := w.rank(n)
		switch {
		case err != nil:
		case r == nil:
			now := emptied{}
			if pageErr == nil {
				now = emptiedOf(page)
			}
			r, err = w.start(n, w.identity(n, page), source, now)
		case r.source != source:
			r.source = source
			r.tail.Move(source.Endpoint, source.Replay)
		}
		if err != nil {
			return &startError{fmt.Errorf("rank %d: %w", n, err)}
		}
		w.mu.Lock()
		w.ranks[n] = r
		w.mu.Unlock()
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
		w.cfg.Log.Info("rank is gone", "rank", r.number)
		w.mu.Lock()
		delete(w.ranks, r.number)
		w.mu.Unlock()
		w.retire(r)
	}
	return nil
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

// source is where a rank's events are: as configured, else as the engine says,
// else where most engines have them.
func (w *watch) source(n int) (vllm.Source, error) {
	learned, known := w.sources[n]
	s := vllm.Source{Endpoint: w.cfg.Events, Replay: w.cfg.Replay, Topic: w.cfg.Topic}
	host := w.engine.Host()
	base := cmp.Or(s.Endpoint, "tcp://"+net.JoinHostPort(host, defaultEventsPort))
	var err, replayErr error
	switch {
	case s.Endpoint != "":
		s.Endpoint, err = vllm.RankEndpoint(s.Endpoint, n)
	case known:
		s.Endpoint = learned.Endpoint
	default:
		s.Endpoint, err = vllm.RankEndpoint(base, n)
	}
	switch {
	case s.Replay == NoReplay:
		s.Replay = ""
	case s.Replay != "":
		s.Replay, replayErr = vllm.RankEndpoint(s.Replay, n)
	case known:
		s.Replay = learned.Replay
	default:
		s.Replay = vllm.ReplayBeside(base, host, replayOffset+n)
	}
	return s, errors.Join(err, replayErr)
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

// tell hands a rank what a look has found about it.
func (w *watch) tell(r *rank, page vllm.Page, pageErr error, marks map[int]mark, at time.Time) {
	broken := r.unconnected(w.since)
	if _, ok := w.sources[r.number]; w.said && !ok && w.cfg.Events == "" {
		broken = "the engine publishes no KV events"
	}
	if pageErr == nil {
		i := slices.IndexFunc(page.Ranks, func(m vllm.RankMetrics) bool { return m.Rank == r.number })
		if i >= 0 {
			m := page.Ranks[i]
			r.become(w.identity(r.number, page))
			r.sample(&m.Load, at)
			if before, ok := marks[r.number]; ok {
				broken = cmp.Or(broken, r.weigh(&m.Load, page.Resets, before))
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

// fit leaves out the names that a heartbeat has no room for: requests for them
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
		w.cfg.Log.Warn("names that a heartbeat has no room for", "models and adapters", left)
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
