package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
)

// result is what is printed.
type result struct {
	Machine    string             `json:"machine"`
	Runs       int                `json:"runs"`
	Seconds    float64            `json:"seconds"`
	Latency    []latencyResult    `json:"latency,omitempty"`
	Throughput []throughputResult `json:"throughput,omitempty"`
	Picks      []picksResult      `json:"picks,omitempty"`
}

type latencyResult struct {
	Name      string    `json:"name"`
	PerSecond int       `json:"events_per_second"`
	Runs      []latency `json:"runs"`
}

type throughputResult struct {
	Into string       `json:"into"`
	Name string       `json:"name"`
	Runs []throughput `json:"runs"`
}

type picksResult struct {
	Name      string  `json:"name"`
	PerSecond int     `json:"picks_per_second"`
	Runs      []picks `json:"runs"`
}

// machine says what the figures were measured on, as far as it can be read.
func machine() string {
	parts := []string{fmt.Sprintf("%d cores", runtime.NumCPU())}
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				parts = append(parts, strings.TrimSpace(value))
				break
			}
		}
	}
	parts = append(parts, runtime.Version(), runtime.GOOS+"/"+runtime.GOARCH)
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		if minute, _, ok := strings.Cut(string(load), " "); ok {
			parts = append(parts, "load average at the start "+minute)
		}
	}
	return strings.Join(parts, ", ")
}

// figure is one number over all runs: the median, and the least.
func figure[T any](runs []T, format string, of func(T) float64) string {
	values := make([]float64, len(runs))
	for i, r := range runs {
		values[i] = of(r)
	}
	slices.Sort(values)
	return fmt.Sprintf(format+" ("+format+")", values[len(values)/2], values[0])
}

func (r *result) print(w io.Writer) {
	fmt.Fprintf(w, "%s\n%d runs of %g s; the median of the runs (the least)\n", r.Machine, r.Runs, r.Seconds)
	if len(r.Latency) > 0 {
		fmt.Fprintf(w, "\n%-34s %15s %15s %15s %15s\n", "event written -> Score, ms", "p50", "p90", "p99", "max")
	}
	for _, l := range r.Latency {
		printQuantiles(w, l.Name, l.Runs, func(l latency) quantiles { return l.Total })
		printQuantiles(w, "  of it until on NATS", l.Runs, func(l latency) quantiles { return l.Bus })
		printQuantiles(w, "  one call of Score", l.Runs, func(l latency) quantiles { return l.Call })
	}
	if len(r.Throughput) > 0 {
		fmt.Fprintf(w, "\n%-36s %13s %13s %13s %13s\n", "thousand stored blocks", "a second", "of it on NATS", "agent CPU s", "sched. CPU s")
	}
	for _, t := range r.Throughput {
		fmt.Fprintf(w, "%-36s", "into "+t.Into+", "+t.Name)
		for _, of := range []func(throughput) float64{
			func(t throughput) float64 { return t.PerWall },
			func(t throughput) float64 { return t.PerWall * float64(t.Keys) / float64(t.Blocks) },
			func(t throughput) float64 { return t.PerAgent },
		} {
			fmt.Fprintf(w, " %13s", figure(t.Runs, "%.0f", func(t throughput) float64 { return of(t) / 1000 }))
		}
		scheduler := "-"
		if t.Into == "scheduler" {
			scheduler = figure(t.Runs, "%.0f", func(t throughput) float64 { return t.PerScheduler / 1000 })
		}
		fmt.Fprintf(w, " %13s\n", scheduler)
	}
	if len(r.Picks) > 0 {
		fmt.Fprintf(w, "\n%-34s %15s %15s %15s %15s\n", "pick due -> answered, ms", "p50", "p90", "p99", "max")
	}
	for _, p := range r.Picks {
		printQuantiles(w, fmt.Sprintf("%s, %d a second", p.Name, p.PerSecond), p.Runs, func(p picks) quantiles { return p.Due })
		printQuantiles(w, "  sent -> answered", p.Runs, func(p picks) quantiles { return p.Sent })
		fmt.Fprintf(w, "%-34s %15s\n", "  scheduler CPU, us a pick", figure(p.Runs, "%.0f", func(p picks) float64 { return p.CPU }))
	}
}

// printQuantiles prints a row.
func printQuantiles[T any](w io.Writer, name string, runs []T, of func(T) quantiles) {
	fmt.Fprintf(w, "%-34s", name)
	for _, at := range []func(quantiles) float64{
		func(q quantiles) float64 { return q.P50 }, func(q quantiles) float64 { return q.P90 },
		func(q quantiles) float64 { return q.P99 }, func(q quantiles) float64 { return q.Max },
	} {
		fmt.Fprintf(w, " %15s", figure(runs, "%.2f", func(run T) float64 { return at(of(run)) }))
	}
	fmt.Fprintln(w)
}

func (r *result) printJSON(w io.Writer) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, string(text))
	return err
}
