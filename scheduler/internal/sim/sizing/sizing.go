// Package sizing finds the smallest simulated fleet that reaches a goal: how
// many pods, with how much host memory, at which cost, under which policy.
package sizing

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
	"github.com/kvscout/kvscout/scheduler/internal/sim/report"
)

// Goal of a fleet.
type Goal struct {
	TTFTP90 float64 // s
	MaxPods int     // beyond which the search gives up
}

// Price of a fleet an hour, in any currency.
type Price struct{ Pod, HostGB float64 }

// Fleet is the smallest that a policy needs with so much host memory.
type Fleet struct {
	Policy string     `json:"policy"`
	HostGB float64    `json:"host_gb"` // of a pod
	Pods   int        `json:"pods"`    // 0: not reached with the most that were tried
	Cost   float64    `json:"cost"`
	Result sim.Result `json:"result"` // of these pods
}

// Smallest finds the fewest pods under which run reaches the goal: twice as
// many until it is reached, then by halves. It takes for granted that more
// pods are not slower.
func Smallest(g Goal, run func(pods int) (sim.Result, error)) (int, sim.Result, error) {
	low, high := 0, 1 // low misses the goal; high is tried next
	var best sim.Result
	for {
		r, err := run(high)
		if err != nil {
			return 0, r, err
		}
		if reached(g, r) {
			best = r
			break
		}
		if high == g.MaxPods {
			return 0, r, nil
		}
		low, high = high, min(2*high, g.MaxPods)
	}
	for high-low > 1 {
		middle := (low + high) / 2
		r, err := run(middle)
		if err != nil {
			return 0, r, err
		}
		if reached(g, r) {
			high, best = middle, r
		} else {
			low = middle
		}
	}
	return high, best, nil
}

func reached(g Goal, r sim.Result) bool { return r.Rejects == 0 && r.TTFTP90 <= g.TTFTP90 }

// Of prices a fleet.
func (p Price) Of(pods int, hostGB float64) float64 { return float64(pods) * (p.Pod + p.HostGB*hostGB) }

// cheapest is the index of the fleet with the lowest cost, of equal ones that
// with the lowest TTFT; -1: none reached the goal.
func cheapest(fleets []Fleet) int {
	best := -1
	for i, f := range fleets {
		if f.Pods > 0 && (best < 0 || cmp.Or(cmp.Compare(f.Cost, fleets[best].Cost), cmp.Compare(f.Result.TTFTP90, fleets[best].Result.TTFTP90)) < 0) {
			best = i
		}
	}
	return best
}

// Table prints the fleets and names the cheapest.
func Table(w io.Writer, g Goal, fleets []Fleet) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "policy\thost GB a pod\tpods\tcost an hour\tTTFT p90 s\tmean s\thit\tfrom host\t\t")
	best := cheapest(fleets)
	for i, f := range fleets {
		if f.Pods == 0 {
			fmt.Fprintf(t, "%s\t%.0f\t> %d\t-\t%.3f\t%.3f\t%.3f\t%.3f\t\t\n", f.Policy, f.HostGB, g.MaxPods, f.Result.TTFTP90, f.Result.TTFTMean, f.Result.TokenHit, f.Result.HostHit)
			continue
		}
		mark := ""
		if i == best {
			mark = "cheapest"
		}
		fmt.Fprintf(t, "%s\t%.0f\t%d\t%.2f\t%.3f\t%.3f\t%.3f\t%.3f\t%s\t\n", f.Policy, f.HostGB, f.Pods, f.Cost, f.Result.TTFTP90, f.Result.TTFTMean, f.Result.TokenHit, f.Result.HostHit, mark)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if best < 0 {
		_, err := fmt.Fprintf(w, "No fleet of up to %d pods has a TTFT p90 of %v s.\n", g.MaxPods, g.TTFTP90)
		return err
	}
	f := fleets[best]
	_, err := fmt.Fprintf(w, "%d pods with %.0f GB of host memory each under %s: %.2f an hour.\n", f.Pods, f.HostGB, f.Policy, f.Cost)
	return err
}

// Plot draws pods and cost over the host memory, a line a policy.
func Plot(w io.Writer, title string, fleets []Fleet) error {
	var pods, cost []report.Line
	for _, f := range fleets {
		if f.Pods == 0 {
			continue
		}
		if n := len(pods); n == 0 || pods[n-1].Policy != f.Policy {
			pods, cost = append(pods, report.Line{Policy: f.Policy}), append(cost, report.Line{Policy: f.Policy})
		}
		p, c := &pods[len(pods)-1], &cost[len(cost)-1]
		p.X, p.Y = append(p.X, f.HostGB), append(p.Y, float64(f.Pods))
		c.X, c.Y = append(c.X, f.HostGB), append(c.Y, f.Cost)
	}
	if len(pods) == 0 {
		return errors.New("no fleet reaches the goal: nothing to draw")
	}
	const x = "host memory a pod, GB"
	return report.Curves(w, strings.TrimSpace(title), report.Panel{Title: "pods needed", X: x, Lines: pods}, report.Panel{Title: "cost an hour", X: x, Lines: cost})
}
