package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// table prints the results, aligned.
func table(out io.Writer, results []sim.Result) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "policy\tseed\trequests\tTTFT mean\tp50\tp90\tp99 s\tITL ms\thit\tof\tgoodput\ttok/s\tload CV\trejects\tsticky broken\terror ms\theadroom\t")
	for i := range results {
		r := &results[i]
		headroom := "-"
		if r.HeadroomShare != nil {
			headroom = fmt.Sprintf("%.0f%%", 100**r.HeadroomShare)
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%.3f\t%.3f\t%.3f\t%.3f\t%.1f\t%.3f\t%.3f\t%.3f\t%.0f\t%.3f\t%d\t%.3f\t%.0f\t%s\t\n",
			r.Policy, r.Seed, r.Requests, r.TTFTMean, r.TTFTP50, r.TTFTP90, r.TTFTP99, r.ITLMean, r.TokenHit, r.TokenHitCeiling,
			r.Goodput, r.Throughput, r.LoadCV, r.Rejects, r.StickyBroken, r.PredictedError, headroom)
	}
	return w.Flush()
}
