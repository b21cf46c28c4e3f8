package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
	"github.com/kvscout/kvscout/scheduler/internal/sim/report"
)

const reportIntro = `kvscout-sim report plays every policy on every workload of the plan, keeps the
results under OUT/routing and writes OUT/ROUTING.md with its pictures. What was
played before with the same settings and code is not played again, so it may be
stopped and started at any time.

kvscout-sim report -short plays a small part and fails if the default policy
breaks its promises.

`

// reporting is what the flags of the report say.
type reporting struct {
	traces, out, code, only string
	seeds, jobs             int
	short, render           bool
	match                   *regexp.Regexp
}

func (o *reporting) flags(fs *flag.FlagSet) {
	fs.StringVar(&o.traces, "traces", "scheduler/internal/sim/testdata", "`folder` of the traces")
	fs.StringVar(&o.out, "out", "docs", "`folder` of the page")
	fs.StringVar(&o.code, "code", "unnamed", "`name` of the code that plays; results of other code are played again")
	fs.StringVar(&o.only, "only", "", "`pattern` of the runs to play, by cell/policy; the rest of the page is written from what is kept")
	fs.IntVar(&o.seeds, "seeds", 3, "`number` of seeds")
	fs.IntVar(&o.jobs, "jobs", min(2, runtime.NumCPU()), "`number` of runs at a time")
	fs.BoolVar(&o.short, "short", false, "play a small part, write nothing, fail on a broken promise")
	fs.BoolVar(&o.render, "render", false, "play nothing: write the page from what is kept, whatever code played it")
}

func runReport(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o reporting
	if err := parseFlags("report", reportIntro, args, stdout, o.flags); err != nil {
		return err
	}
	var err error
	if o.match, err = regexp.Compile(o.only); err != nil {
		return usage(fmt.Errorf("-only: %w", err))
	}
	if o.seeds < 1 || o.jobs < 1 {
		return usage(errors.New("-seeds and -jobs: want at least 1"))
	}
	if o.short {
		return o.playShort(ctx, stdout, stderr)
	}
	page := report.Page{Sections: report.Plan(), Runs: make(map[string][]report.Run)}
	var todo []*task
	for _, s := range page.Sections {
		for _, c := range s.Cells {
			kept, err := o.kept(c.Name)
			if err != nil {
				return err
			}
			if o.render {
				page.Runs[c.Name] = kept
				continue
			}
			page.Runs[c.Name] = slices.DeleteFunc(kept, func(r report.Run) bool {
				return o.match.MatchString(c.Name+"/"+r.Policy) && (r.Code != o.code || r.Command != c.Command())
			})
			todo = append(todo, o.missing(c, page.Runs[c.Name])...)
		}
	}
	var mu sync.Mutex // guards page.Runs and the files
	err = o.play(ctx, todo, stderr, func(t *task, r sim.Result) error {
		mu.Lock()
		defer mu.Unlock()
		name := t.cell.Name
		page.Runs[name] = append(page.Runs[name], report.Run{Cell: name, Command: t.cell.Command(), Code: o.code, Result: r})
		return o.keep(name, page.Runs[name])
	})
	if err != nil {
		return err
	}
	return o.write(page)
}

// task is one run to be made.
type task struct {
	cell     report.Cell
	policy   string
	seed     uint64
	workload *workload
}

// workload is read when the first of its runs begins.
type workload struct {
	once sync.Once
	arrival.Workload
	err error
}

// missing lists the runs of a cell that are not kept.
func (o *reporting) missing(c report.Cell, kept []report.Run) []*task {
	var list []*task
	shared := new(workload)
	for _, name := range c.Policies {
		if !o.match.MatchString(c.Name + "/" + name) {
			continue
		}
		for i := range o.seeds {
			seed := uint64(i + 1)
			if !slices.ContainsFunc(kept, func(r report.Run) bool { return r.Policy == name && r.Seed == seed }) {
				list = append(list, &task{cell: c, policy: name, seed: seed, workload: shared})
			}
		}
	}
	return list
}

// play makes the runs, some at a time, and hands each result on.
func (o *reporting) play(ctx context.Context, todo []*task, stderr io.Writer, done func(*task, sim.Result) error) error {
	bar := progressbar.NewOptions(len(todo), progressbar.OptionSetWriter(stderr), progressbar.OptionSetDescription("runs"), progressbar.OptionShowCount(),
		progressbar.OptionSetPredictTime(true), progressbar.OptionThrottle(200*time.Millisecond), progressbar.OptionSetVisibility(terminal(stderr)))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(o.jobs)
	for _, t := range todo {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			r, err := o.run(t)
			if err != nil {
				return fmt.Errorf("%s, policy %s, seed %d: %w", t.cell.Name, t.policy, t.seed, err)
			}
			_ = bar.Add(1) // it is only shown
			return done(t, r)
		})
	}
	err := g.Wait()
	_ = bar.Finish()
	return err
}

func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func (o *reporting) run(t *task) (sim.Result, error) {
	w := t.workload
	w.once.Do(func() { w.Workload, w.err = o.read(t.cell) })
	if w.err != nil {
		return sim.Result{}, w.err
	}
	cfg := t.cell.Config(t.policy, t.seed)
	cfg.Arrivals, cfg.Stages = w.Play, w.Stages
	engine, err := sim.Engine(t.cell.Engine)
	if err != nil {
		return sim.Result{}, err
	}
	cfg.Engines = []sim.Profile{engine}
	return sim.Run(cfg)
}

func (o *reporting) read(c report.Cell) (arrival.Workload, error) {
	if c.Trace == "" {
		return arrival.Generate(c.Arrivals, arrival.Options{BlockSize: c.BlockSize})
	}
	return readTrace(filepath.Join(o.traces, c.Trace), arrival.Options{BlockSize: c.BlockSize, Speed: c.Speed, First: c.First})
}

func (o *reporting) file(cell string) string { return filepath.Join(o.out, "routing", cell+".json") }

// kept reads the runs of a cell that were made before.
func (o *reporting) kept(cell string) ([]report.Run, error) {
	f, err := os.Open(o.file(cell))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, err := report.ReadRuns(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; delete it to play it again", o.file(cell), err)
	}
	return list, nil
}

// keep replaces the runs of a cell whole, so that a stop leaves the old or the
// new.
func (o *reporting) keep(cell string, list []report.Run) error {
	var b bytes.Buffer
	if err := report.WriteRuns(&b, list); err != nil {
		return err
	}
	return replace(o.file(cell), b.Bytes())
}

func replace(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// write writes the page and its pictures.
func (o *reporting) write(page report.Page) error {
	var b bytes.Buffer
	if err := page.Write(&b); err != nil {
		return err
	}
	if err := replace(filepath.Join(o.out, "ROUTING.md"), b.Bytes()); err != nil {
		return err
	}
	return page.Pictures(func(name string, svg []byte) error {
		return replace(filepath.Join(o.out, "routing", name+".svg"), svg)
	})
}

// errBroken says that the default policy does not do what it promises.
var errBroken = errors.New("promises are broken")

// playShort plays the short plan and checks the promises.
func (o *reporting) playShort(ctx context.Context, stdout, stderr io.Writer) error {
	cells := report.Short()
	o.seeds = 1
	results := make([][]sim.Result, len(cells))
	var todo []*task
	for _, c := range cells {
		todo = append(todo, o.missing(c, nil)...)
	}
	var mu sync.Mutex // guards results
	err := o.play(ctx, todo, stderr, func(t *task, r sim.Result) error {
		mu.Lock()
		defer mu.Unlock()
		i := slices.IndexFunc(cells, func(c report.Cell) bool { return c.Name == t.cell.Name })
		results[i] = append(results[i], r)
		return nil
	})
	if err != nil {
		return err
	}
	var broken []error
	for i, c := range cells {
		rows := report.Rows(results[i])
		for _, r := range rows {
			fmt.Fprintf(stdout, "%-22s %-14s TTFT mean %7.3f p90 %7.3f s, hit %.3f of %.3f\n", c.Name, r.Policy, r.TTFTMean, r.TTFTP90, r.TokenHit, r.TokenHitCeiling)
		}
		for _, b := range report.Broken(c.Name, rows) {
			broken = append(broken, errors.New(b))
		}
	}
	if len(broken) > 0 {
		return fmt.Errorf("%w:\n%w", errBroken, errors.Join(broken...))
	}
	return nil
}
