package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"
)

// report collects what is said at the end.
type report struct {
	o        options
	out      io.Writer
	terminal bool
	start    time.Time
	printed  time.Time

	done    int
	kinds   map[string]*kind
	faulty  []string // what was wrong, one line each
	resyncs int
	served  int64
	failed  int64
	blind   int64
	heap    uint64 // peaks
	rss     uint64

	goroutinesBefore, goroutinesAfter int
}

// kind is what happened with one kind of faults.
type kind struct {
	name         string
	count, bad   int
	sum, longest time.Duration
	lie          time.Duration
}

func newReport(o options, out io.Writer) *report {
	r := &report{o: o, out: out, kinds: make(map[string]*kind)}
	if file, ok := out.(*os.File); ok {
		r.terminal = term.IsTerminal(int(file.Fd())) && os.Getenv("TERM") != "dumb"
	}
	return r
}

func (r *report) begin(f *fleet) {
	r.start = time.Now()
	r.printed = r.start
	fmt.Fprintf(r.out, "%d engines of %d blocks, %d faults, seed %d; again with: -seed %d -faults %d\n",
		len(f.members), poolBlocks, r.o.faults, r.o.seed, r.o.seed, r.o.faults)
}

func (r *report) end(f *fleet) {
	r.resyncs = f.allResyncs()
	r.served, r.failed, r.blind = f.load.served.Load(), f.load.failed.Load(), f.load.blind.Load()
	if r.terminal {
		fmt.Fprint(r.out, "\r\x1b[K")
	}
}

func (r *report) add(n int, s *strike, g result) {
	r.done++
	k := r.kinds[s.fault.name]
	if k == nil {
		k = &kind{name: s.fault.name}
		r.kinds[k.name] = k
	}
	k.count++
	k.sum += g.truth
	k.longest = max(k.longest, g.truth)
	k.lie = max(k.lie, g.lie)
	line := fmt.Sprintf("fault %d, %s: true after %v", n+1, s, g.truth.Round(time.Millisecond))
	if !g.ended {
		line = fmt.Sprintf("fault %d, %s: not true after %v", n+1, s, g.truth.Round(time.Millisecond))
	}
	if g.lie > 0 {
		line += fmt.Sprintf(", %v of wrong answers called EXACT (%s)", g.lie.Round(time.Millisecond), s.lie.note)
	}
	if g.wrong > 0 {
		line += fmt.Sprintf(", %d wrong answers after %v", g.wrong, g.limit)
	}
	if g.note != "" {
		line += "; last: " + g.note
	}
	bad := g.bad() || g.lie > s.lies()
	if bad {
		k.bad++
		r.faulty = append(r.faulty, line)
	}
	if bad || r.o.verbose {
		if r.terminal {
			fmt.Fprint(r.out, "\r\x1b[K")
		}
		fmt.Fprintln(r.out, line)
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	r.heap = max(r.heap, m.HeapInuse)
	r.progress(n + 1)
}

func (r *report) progress(n int) {
	every := 5 * time.Second
	if r.terminal {
		every = 100 * time.Millisecond
	}
	if time.Since(r.printed) < every {
		return
	}
	r.printed = time.Now()
	took := time.Since(r.start)
	left := time.Duration(float64(took) / float64(n) * float64(r.o.faults-n))
	if !r.terminal {
		fmt.Fprintf(r.out, "%d of %d faults, %d bad, %v to go\n", n, r.o.faults, len(r.faulty), left.Round(time.Second))
		return
	}
	const width = 40
	full := width * n / r.o.faults
	fmt.Fprintf(r.out, "\r\x1b[K[%s%s] %d of %d faults, %d bad, %v to go", strings.Repeat("=", full), strings.Repeat(" ", width-full),
		n, r.o.faults, len(r.faulty), left.Round(time.Second))
}

func (r *report) good() bool {
	return len(r.faulty) == 0 && r.done == r.o.faults && r.goroutinesAfter <= r.goroutinesBefore
}

func (r *report) print() {
	r.rss = peakRSS()
	var list []*kind
	for _, k := range r.kinds {
		list = append(list, k)
	}
	slices.SortFunc(list, func(a, b *kind) int { return strings.Compare(a.name, b.name) })
	ms := func(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }
	w := tabwriter.NewWriter(r.out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "faults\tbad\tmean to truth\tlongest\twrong but EXACT\t  kind\t")
	var longest, lie time.Duration
	for _, k := range list {
		fmt.Fprintf(w, "%d\t%d\t%s\t%s\t%s\t  %s\t\n", k.count, k.bad, ms(k.sum/time.Duration(k.count)), ms(k.longest), ms(k.lie), k.name)
		longest, lie = max(longest, k.longest), max(lie, k.lie)
	}
	_ = w.Flush()
	fmt.Fprintf(r.out, "%d faults in %v with seed %d, %d bad; longest time to the truth %s, longest wrong answer that called itself EXACT %s\n",
		r.done, time.Since(r.start).Round(time.Second), r.o.seed, len(r.faulty), ms(longest), ms(lie))
	fmt.Fprintf(r.out, "%d requests served, %d failed, %d sent without a pick; %d resyncs\n", r.served, r.failed, r.blind, r.resyncs)
	fmt.Fprintf(r.out, "peak heap %d MiB, peak RSS %d MiB; goroutines %d before, %d after\n", r.heap>>20, r.rss>>20, r.goroutinesBefore, r.goroutinesAfter)
	for _, line := range r.faulty {
		fmt.Fprintln(r.out, "BAD:", line)
	}
}

// peakRSS of this process in bytes; 0 where the system does not say.
func peakRSS() uint64 {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, _ := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return n << 10
		}
	}
	return 0
}

func goroutines() int { return runtime.NumGoroutine() }

// settled waits until no more goroutines run than before, for a while.
func settled(before int) int {
	for end := time.Now().Add(readyTime); goroutines() > before && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	return goroutines()
}
