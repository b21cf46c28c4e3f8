package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// The aims, for 1,000 members of 100,000 blocks on 2 cores.
const (
	aimRSS       = 1200 << 20 // bytes
	aimIndex     = 600 << 20
	aimStart     = 10.0 // seconds
	aimPeak      = 1.3  // times the memory after
	aimApplied   = .99  // of the batches that are due
	aimLag       = 20.0 // ms
	aimPicks     = 5000.0
	aimPick      = 5.0  // ms
	aimDisturbed = 1.5  // times the p99 before
	aimWire      = 16.0 // bytes a stored block
)

// result is all that was measured. Times are milliseconds unless a field says
// otherwise, memory is bytes.
type result struct {
	Options options
	Cores   int
	Machine string
	Load    string // average of the machine when it began

	Start struct {
		First, Exact, CPU float64 // seconds
		Peak, After       int64
	}
	Events         flow
	Both           both
	Faults         []fault
	Checked, Wrong int
	Said           []string `json:",omitempty"`
}

// flow is what happened in a span of time.
type flow struct {
	Due, Batches, Sent, Deltas, Stored float64 // a second
	Lag50, Lag99                       float64
	WireBytes                          float64            // of all that agents write, a stored block
	CPUPer1000                         float64            // of the scheduler, 1,000 batches
	Cores                              map[string]float64 // busy, by process
	Told, Heard                        float64            // a second: messages to other schedulers, reservations of theirs
	Resyncs, Dropped, Late             float64            // Dropped messages, by the scheduler
	RSS, Index, IndexBlocks            int64
	Shed                               float64
}

// both is events beside picks.
type both struct {
	flow
	Picks, P50, P99 float64 // a second; from being sent to the answer
	Due99           float64 // from when they were due
	Refused, Unsent int
}

func (b *both) times(s span, over time.Duration) {
	b.Picks = float64(s.picks) / over.Seconds()
	b.P50, b.P99 = 1000*quantile(s.took, .5).Seconds(), 1000*quantile(s.took, .99).Seconds()
	b.Due99 = 1000 * quantile(s.late, .99).Seconds()
}

// fault is what became of members that were broken.
type fault struct {
	Name       string
	Members    int
	True, Aim  float64 // seconds until all are believed again
	P99, Quiet float64 // of picks meanwhile, and before
	Picks      int
}

func (r *result) printJSON(w io.Writer) error { return json.NewEncoder(w).Encode(r) }

func (r *result) print(w io.Writer) {
	o := r.Options
	fmt.Fprintf(w, "\n%d members x %d blocks, %.0f %% of them held by %d and more, %.0f batches a second each, %s, %d cores, %d schedulers, load average when it began %s\n\n",
		o.Members, o.Blocks, 100*o.Shared, o.Holders, o.Rate, r.Machine, r.Cores, o.Schedulers, r.Load)
	missed := 0
	row := func(name, figure, aim string, good bool) {
		mark := ""
		if !good {
			mark = "MISSED"
			missed++
		}
		fmt.Fprintf(w, "%-44s %-34s %-22s %s\n", name, figure, aim, mark)
	}
	row("", "measured", "aim", true)
	if r.Start.Exact > 0 {
		row("start until all are exact", fmt.Sprintf("%.2f s, %.2f s of CPU", r.Start.Exact, r.Start.CPU), fmt.Sprintf("%.0f s", aimStart), r.Start.Exact <= aimStart)
		peak := float64(r.Start.Peak) / float64(max(r.Start.After, 1))
		row("memory until then, against after", fmt.Sprintf("%d MiB, %.2f x", r.Start.Peak>>20, peak), fmt.Sprintf("%.1f x", aimPeak), peak <= aimPeak)
	}
	events := func(name string, f *flow) {
		if f.Due == 0 {
			return
		}
		row(name, fmt.Sprintf("%.0f of %.0f/s, in %.0f deltas", f.Batches, f.Due, f.Deltas), fmt.Sprintf("%.0f/s", f.Due), f.Batches >= aimApplied*f.Due && f.Deltas >= aimApplied*f.Sent)
		row("  lag, p50 and p99", fmt.Sprintf("%.1f ms, %.1f ms", f.Lag50, f.Lag99), fmt.Sprintf("p99 %.0f ms", aimLag), f.Lag99 <= aimLag)
		row("  scheduler's CPU for 1,000 batches", fmt.Sprintf("%.1f ms", f.CPUPer1000), "stated", true)
		row("  on the wire a stored block", fmt.Sprintf("%.0f bytes, %.0f blocks/s", f.WireBytes, f.Stored), fmt.Sprintf("%.0f bytes", aimWire), f.WireBytes <= aimWire)
		row("  resyncs", fmt.Sprintf("%.0f, %.0f messages dropped", f.Resyncs, f.Dropped), "0", f.Resyncs+f.Dropped == 0)
		var cores []string
		for _, name := range slices.Sorted(maps.Keys(f.Cores)) {
			cores = append(cores, fmt.Sprintf("%s %.2f", name, f.Cores[name]))
		}
		row("  cores busy", strings.Join(cores, ", "), "", true)
	}
	events("batches published, alone", &r.Events)
	events("batches published, beside picks", &r.Both.flow)
	if f := &r.Both.flow; f.Due > 0 {
		row("memory of the scheduler", fmt.Sprintf("%d MiB", f.RSS>>20), fmt.Sprintf("%d MiB", aimRSS>>20), f.RSS <= aimRSS)
		row("  of it the index", fmt.Sprintf("%d MiB, %.1f bytes a block", f.Index>>20, float64(f.Index)/float64(max(f.IndexBlocks, 1))), fmt.Sprintf("%d MiB", aimIndex>>20), f.Index <= aimIndex && f.Shed == 0)
		if o.Schedulers > 1 {
			row("a scheduler tells the others, and takes up", fmt.Sprintf("%.0f messages/s, %.0f reservations/s", f.Told, f.Heard), "", true)
		}
		row("picks with keys", fmt.Sprintf("%.0f/s", r.Both.Picks), fmt.Sprintf("%.0f/s", min(aimPicks, o.Picks)), r.Both.Picks >= aimApplied*min(aimPicks, o.Picks) && r.Both.Refused == 0)
		row("  sent to answered, p50 and p99", fmt.Sprintf("%.2f ms, %.2f ms", r.Both.P50, r.Both.P99), fmt.Sprintf("p99 %.0f ms", aimPick), r.Both.P99 <= aimPick)
		row("  due to answered, p99", fmt.Sprintf("%.2f ms", r.Both.Due99), "", true)
	}
	for _, f := range r.Faults {
		row(fmt.Sprintf("%s of %d: true again after", f.Name, f.Members), fmt.Sprintf("%.2f s", f.True), fmt.Sprintf("%.0f s", f.Aim), f.True <= f.Aim)
		row("  picks meanwhile, p99", fmt.Sprintf("%.2f ms, %.2f x of before", f.P99, f.P99/f.Quiet), fmt.Sprintf("%.1f x", aimDisturbed), f.P99 <= aimDisturbed*f.Quiet)
	}
	row("answers that are not what members hold", fmt.Sprintf("%d of %d", r.Wrong, r.Checked), "0", r.Wrong == 0)
	fmt.Fprintf(w, "\n%d missed. The aims are for 1,000 members of 100,000 blocks on 2 cores with nothing else.\n", missed)
	switch needs, full := r.needs(), float64(r.Cores)*.9; {
	case needs > full:
		fmt.Fprintf(w, "TOO FEW CORES: NATS, agents, scheduler and callers need about %.1f of %d for this, short by %.1f with a tenth left free: what is late above is the machine's\n", needs, r.Cores, needs-full)
	case r.Both.Late > 100 || r.Events.Late > 100:
		fmt.Fprintf(w, "A BUSY MACHINE: this needs about %.1f of %d cores, and engines were up to %.0f ms late with their steps: what is late above is the machine's\n", needs, r.Cores, max(r.Events.Late, r.Both.Late))
	}
	for _, s := range r.Said {
		fmt.Fprintln(w, "wrong:", s)
	}
}

// needs estimates how many cores all of the load wants, from what those took that
// did a part of it.
func (r *result) needs() (cores float64) {
	f := &r.Both.flow
	if f.Due == 0 {
		return 0
	}
	published, asked := f.Batches/f.Due, r.Both.Picks/r.Options.Picks
	for name, busy := range f.Cores {
		done := published
		switch {
		case name == "callers":
			done = asked
		case strings.HasPrefix(name, "scheduler"):
			done = min(published*f.Deltas/f.Sent, asked)
		}
		cores += busy / min(1, max(done, .01))
	}
	return cores
}

// loadAverage of the machine; empty where it does not say.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}
