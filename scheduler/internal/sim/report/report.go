// Package report says what simulated runs came to: averages over seeds,
// tables, plots, and the page that compares every policy on every workload.
// What its sentences claim is computed from the results they stand beside.
// It runs nothing and opens nothing; it writes to who asks.
package report

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// Row is one policy's mean over seeds.
type Row struct {
	sim.Result
	Seeds     int
	Low, High float64 // of the seeds' mean TTFT
}

// Rows averages the results of one workload by policy, in the order of the
// field: what looks at nothing, at load, at content, the default, the bounds.
func Rows(results []sim.Result) []Row {
	var rows []Row
	for _, r := range results {
		i := slices.IndexFunc(rows, func(row Row) bool { return row.Policy == r.Policy })
		if i < 0 {
			rows = append(rows, Row{Result: r, Low: math.Inf(1), High: math.Inf(-1)})
			i = len(rows) - 1
			rows[i].Stages = slices.Clone(r.Stages)
			rows[i].Seeds = 1
		} else {
			rows[i].add(r)
		}
		rows[i].Low, rows[i].High = min(rows[i].Low, r.TTFTMean), max(rows[i].High, r.TTFTMean)
	}
	slices.SortStableFunc(rows, func(a, b Row) int { return cmp.Compare(place(a.Policy), place(b.Policy)) })
	return rows
}

// add moves the means by one more seed's result.
func (w *Row) add(r sim.Result) {
	w.Seeds++
	n := float64(w.Seeds)
	move := func(to *float64, v float64) { *to += (v - *to) / n }
	for _, f := range []struct {
		to *float64
		v  float64
	}{
		{&w.TTFTMean, r.TTFTMean}, {&w.TTFTP50, r.TTFTP50}, {&w.TTFTP90, r.TTFTP90}, {&w.TTFTP99, r.TTFTP99}, {&w.ITLMean, r.ITLMean},
		{&w.TokenHit, r.TokenHit}, {&w.TokenHitCeiling, r.TokenHitCeiling}, {&w.LoadCV, r.LoadCV}, {&w.Goodput, r.Goodput},
		{&w.Throughput, r.Throughput}, {&w.StickyBroken, r.StickyBroken}, {&w.PredictedError, r.PredictedError}, {&w.Span, r.Span},
	} {
		move(f.to, f.v)
	}
	w.Rejects, w.Resent, w.Preemptions = w.Rejects+r.Rejects, w.Resent+r.Resent, w.Preemptions+r.Preemptions
	for i := range min(len(w.Stages), len(r.Stages)) {
		s, o := &w.Stages[i], r.Stages[i]
		move(&s.TTFTMean, o.TTFTMean)
		move(&s.TTFTP50, o.TTFTP50)
		move(&s.TTFTP90, o.TTFTP90)
		move(&s.Throughput, o.Throughput)
	}
}

// field lists the policies from the simplest to the bounds, with what the
// field calls those that are others' ideas. One that is not listed stands
// beside the default and is called by its own name.
var field = []struct{ name, label string }{
	{"random", "random"},
	{"round-robin", "round robin"},
	{"least-requests", "least requests"},
	{"p2c", "two choices"},
	{"least-tokens", "least tokens"},
	{"session", "session"},
	{"prefix-hash", "prefix hash (CHWBL)"},
	{"approx", "approximate"},
	{"weighted", "weighted (llm-d 3/2/2)"},
	{"dynamo-cost", "Dynamo cost"},
	{"conductor", "Mooncake conductor"},
	{"sticky", "sticky"},
	{"e2", "E2 (Preble)"},
	{"longest-prefix", "longest prefix"},
	{"slo", "targets (slo)"},
	{"slo-least-load-pulling", "targets (slo)"},
	{"slo-pack-load", "targets, packed (slo)"},
	{"slo-least-load", "targets, least load (slo)"},
	{policy.Default, "default"},
	{sim.PooledLRU, "pooled LRU"},
	{sim.CapacityOracle, "capacity oracle"},
	{sim.Oracle, "oracle"},
}

// place in the field; names with parameters stand behind their plain one.
func place(name string) int {
	plain, _, _ := strings.Cut(name, ":")
	beside := 0
	for i, f := range field {
		if f.name == plain {
			return i
		}
		if f.name == policy.Default {
			beside = i
		}
	}
	return beside
}

// Label is what a reader knows a policy by.
func Label(name string) string {
	plain, parameters, _ := strings.Cut(name, ":")
	if f := field[place(name)]; f.name == plain {
		plain = f.label
	}
	if parameters != "" {
		return plain + " " + parameters
	}
	return plain
}

// number shows a value with three digits.
func number(v float64) string {
	if v >= 100 || v <= -100 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}
