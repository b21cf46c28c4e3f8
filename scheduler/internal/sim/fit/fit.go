// Package fit fits the constants of a simulated engine to what a real
// one did: to a log of its requests, or to its own counters.
package fit

import (
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// Fit is an engine with how well it explains what was measured.
type Fit struct {
	Engine sim.Profile
	// OverheadMS is what every request takes beyond the engine's steps: HTTP,
	// tokenizer, gateway. It is no constant of the engine.
	OverheadMS      float64
	Prefill, Decode Residual
	Notes           []string
}

// Residual is how far the fit is off, of the rows that were fitted.
type Residual struct {
	Rows        int
	Median, P90 float64 // share of the measured time
}

func (r Residual) String() string {
	if r.Rows == 0 {
		return "means only: no residual"
	}
	return fmt.Sprintf("%d requests, off by %.1f %% (median), %.1f %% (p90)", r.Rows, 100*r.Median, 100*r.P90)
}

// Explain writes the fit in words.
func (f Fit) Explain(w io.Writer) error {
	e := f.Engine
	_, err := fmt.Fprintf(w, "prefill: %.4g us a token, %.3g ms a token and token before it; %v\ndecode: %.4g ms a step, %.3g ms a request, %.3g ms a token of context; %v\n",
		1000*e.TokenMS, e.PairMS, f.Prefill, e.StepMS, e.SequenceMS, e.ContextMS, f.Decode)
	if f.OverheadMS > 0 {
		fmt.Fprintf(w, "beside the engine: %.3g ms a request, which the simulator does not add\n", f.OverheadMS)
	}
	for _, note := range f.Notes {
		fmt.Fprintln(w, "note:", note)
	}
	return err
}

// row is one equation: the columns times the unknowns are y.
type row struct {
	x []float64
	y float64
}

// solve finds the unknowns, none below zero, with the least squares of
// relative errors. It tries every set of unknowns that may differ from zero:
// there are three at most. It says false where the rows do not tell the
// unknowns apart.
func solve(rows []row) ([]float64, bool) {
	if len(rows) == 0 {
		return nil, false
	}
	n := len(rows[0].x)
	var best []float64
	least := math.Inf(1)
	for set := 1; set < 1<<n; set++ {
		var columns []int
		for i := range n {
			if set>>i&1 == 1 {
				columns = append(columns, i)
			}
		}
		v, ok := normal(rows, columns)
		if !ok || slices.Min(v) < 0 {
			continue
		}
		full := make([]float64, n)
		for i, c := range columns {
			full[c] = v[i]
		}
		sum := 0.0
		for _, r := range rows {
			e := off(r, full)
			sum += e * e
		}
		if sum < least {
			best, least = full, sum
		}
	}
	return best, best != nil
}

// off is the relative error of a row.
func off(r row, v []float64) float64 {
	sum := 0.0
	for i, x := range r.x {
		sum += x * v[i]
	}
	return (sum - r.y) / r.y
}

// normal solves the normal equations of some columns by elimination. Columns
// are scaled to one size first, so that a small pivot means that they are not
// independent.
func normal(rows []row, columns []int) ([]float64, bool) {
	n := len(columns)
	scale := make([]float64, n)
	for i, c := range columns {
		for _, r := range rows {
			scale[i] += r.x[c] * r.x[c] / (r.y * r.y)
		}
		if scale[i] = math.Sqrt(scale[i]); scale[i] == 0 {
			return nil, false
		}
	}
	a := make([][]float64, n)
	for i := range a {
		a[i] = make([]float64, n+1)
		for _, r := range rows {
			xi := r.x[columns[i]] / scale[i] / r.y
			for j := range n {
				a[i][j] += xi * r.x[columns[j]] / scale[j] / r.y
			}
			a[i][n] += xi
		}
	}
	for i := range n {
		pivot := i
		for k := i + 1; k < n; k++ {
			if math.Abs(a[k][i]) > math.Abs(a[pivot][i]) {
				pivot = k
			}
		}
		a[i], a[pivot] = a[pivot], a[i]
		if math.Abs(a[i][i]) < 1e-9 {
			return nil, false
		}
		for k := range n {
			if k == i {
				continue
			}
			f := a[k][i] / a[i][i]
			for j := i; j <= n; j++ {
				a[k][j] -= f * a[i][j]
			}
		}
	}
	v := make([]float64, n)
	for i := range v {
		v[i] = a[i][n] / a[i][i] / scale[i]
	}
	return v, true
}

// robust solves, leaves out rows that are far off for a reason of their own
// (a preemption, a pause), and solves again.
func robust(rows []row) ([]float64, Residual, bool) {
	v, ok := solve(rows)
	if !ok {
		return nil, Residual{}, false
	}
	limit := 4 * max(residual(rows, v).Median, .005)
	kept := slices.DeleteFunc(slices.Clone(rows), func(r row) bool { return math.Abs(off(r, v)) > limit })
	if again, ok := solve(kept); ok && len(kept) >= len(rows)/2 {
		v, rows = again, kept
	}
	return v, residual(rows, v), true
}

func residual(rows []row, v []float64) Residual {
	errs := make([]float64, len(rows))
	for i, r := range rows {
		errs[i] = math.Abs(off(r, v))
	}
	slices.Sort(errs)
	return Residual{Rows: len(rows), Median: errs[len(errs)/2], P90: errs[len(errs)*9/10]}
}
