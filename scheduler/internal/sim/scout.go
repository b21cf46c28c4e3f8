package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
)

// placer chooses where a request goes, and hears what becomes of it.
type placer interface {
	// place returns nil where the request waits or is refused.
	place(r *request) (*pod, error)
	firstToken(r *request)
	end(r *request, outcome fleet.Outcome)
	join(p *pod)
	// step hears that an engine's changes are public.
	step(p *pod)
	restart(p *pod)
}

// t0 is the time of the virtual clock's zero.
var t0 = time.Unix(1_700_000_000, 0)

// Model that all engines serve.
const Model = "model"

// scout places by the real scheduler: picker, fleet and index as they are, and
// between them and the engines nothing but wires that take their time.
type scout struct {
	*run
	fleet  *fleet.Fleet
	index  *index.Index
	picker *pick.Picker
	wires  []*wire // by pod
	byID   []*pod
	queue  waits

	knowsOutput bool // how long outputs will be
}

func newScout(r *run) (*scout, error) {
	s := &scout{
		run:   r,
		fleet: fleet.New(fleet.Config{}),
		index: index.New(index.Config{}),
	}
	var err error
	name, known := cutKnown(r.cfg.Policy)
	s.knowsOutput = slices.Contains(known, KnowOutput)
	cfg := pick.Config{Fleet: s.fleet, Index: s.index, Policies: pick.Policies{Policy: name, Targets: r.cfg.Targets}, Seed: r.cfg.Seed}
	if t := newTruth(s, known); t != nil {
		cfg.Know = t.tell
	}
	s.picker, err = pick.New(cfg)
	if err != nil {
		return nil, err
	}
	s.picker.SetProfiles(r.cfg.Measured)
	s.queue.Queue = admission.New(r.cfg.Queue, s.fleet, s.picker)
	s.tick()
	return s, nil
}

func (s *scout) clock() time.Time { return t0.Add(s.calendar.now) }

// tick is what the scheduler does every half second.
func (s *scout) tick() {
	s.picker.Tick(s.clock())
	s.fleet.Sweep(s.clock())
	s.calendar.at(s.calendar.now+500*time.Millisecond, s.tick)
}

func (s *scout) join(p *pod) {
	id, err := s.fleet.Join(p.name, s.clock())
	if err != nil {
		panic(fmt.Sprintf("sim: %v", err)) // Config bounds the number of pods
	}
	for int(id) >= len(s.byID) {
		s.byID = append(s.byID, nil)
	}
	s.byID[id] = p
	w := newWire(s, p, id)
	s.wires = append(s.wires, w)
	p.wire = w
}

func (s *scout) place(r *request) (*pod, error) {
	q := &pick.Request{
		Model: Model, Session: r.Session, Tenant: r.Tenant, Top: 1, Reserve: true,
		Prompt: pick.Prompt{Keys: r.Keys[:min(len(r.Keys), r.Length/s.cfg.blockSize)], BlockSize: s.cfg.blockSize, Length: r.Length},
	}
	if s.knowsOutput {
		q.ExpectedOutput = r.Output
	}
	d, err := s.queue.Try(q, s.clock())
	var noRoom *pick.NoRoom
	switch {
	case errors.As(err, &noRoom):
		s.wait(r, q, noRoom)
		return nil, nil
	case err != nil:
		return nil, err
	}
	return s.chosen(r, d), nil
}

// chosen notes what was decided of a request.
func (s *scout) chosen(r *request, d *pick.Decision) *pod {
	c := &d.Candidates[0]
	r.decision, r.priority = d.ID, d.EnginePriority
	r.predictedMS, r.predictedCached = float64(r.queued)/float64(time.Millisecond)+c.Cost.FirstToken(), r.Length-c.Uncached
	return s.byID[c.Member.ID]
}

func (s *scout) firstToken(r *request) { s.report(r, fleet.FirstToken) }

func (s *scout) end(r *request, outcome fleet.Outcome) { s.report(r, outcome) }

func (s *scout) report(r *request, outcome fleet.Outcome) {
	if s.cfg.NoReports {
		return
	}
	rep := pick.Report{Decision: r.decision, Outcome: outcome}
	if outcome == fleet.Finished {
		prompt, cached := uint64(r.Length), uint64(r.cached)
		rep.PromptTokens, rep.CachedTokens = &prompt, &cached
		if s.cfg.ReportOutputs {
			rep.OutputTokens = uint64(r.Output)
		}
	}
	s.picker.Report(rep, s.clock())
	s.wake()
}

func (s *scout) step(p *pod) { p.wire.publish() }

func (s *scout) restart(p *pod) { p.wire.restart() }

// info is what the agent of a pod says of it.
func (s *scout) info(p *pod) fleet.Info {
	return fleet.Info{
		Name: p.name, Pod: p.name, Models: []string{Model},
		BlockSize: s.cfg.blockSize, Blocks: uint64(p.cache.limit),
		Labels: map[string]string{fleet.GPULabel: p.profile.Name},
	}
}

// load is what the agent reads from the engine at this moment.
func (p *pod) load(at time.Time) *fleet.Load {
	running, waiting, usage, totals := p.sample()
	if !(usage <= 1) {
		usage = math.NaN()
	}
	return &fleet.Load{At: at, Running: running, Waiting: waiting, KVUsage: usage, Totals: totals}
}

// change of what an engine holds: consecutive blocks of one chain; from the last
// to the first where they are held no more.
type change struct {
	lane     index.Lane
	end      bool // it is the block at which a hit may end, on no lane of its own
	held     bool
	before   []blockkey.Key
	position int32
	keys     []blockkey.Key
}
