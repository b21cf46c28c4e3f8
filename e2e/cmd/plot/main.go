// Command plot draws the figures of docs/INDEX.md. It reads what
// BenchmarkScale printed from standard input, of several runs the least of each
// value, and keeps it beside them; with -redraw it draws what was kept.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// result is one line of a benchmark: its size, and its values by unit.
type result struct {
	Axis   string             `json:"axis"` // "blocks" or "members"
	Size   float64            `json:"size"`
	Values map[string]float64 `json:"values"`
}

// figure draws some units of the results of an axis against their sizes.
type figure struct {
	file, axis, x, y string
	units, names     []string
}

var figures = []figure{
	{"index-size", "blocks", "blocks in the index", "ns", []string{"min-ns", "p50-ns"}, []string{"best batch", "median batch"}},
	{"index-members", "members", "members that hold the whole chain", "ns", []string{"min-ns", "p50-ns"}, []string{"best batch", "median batch"}},
	{"index-memory", "blocks", "blocks in the index", "bytes a block", []string{"B/block"}, []string{"8 holders a chain"}},
	{"index-gc", "blocks", "blocks in the index", "ms of CPU a collection", []string{"gc-cpu-ms"}, []string{"a forced collection"}},
}

func main() {
	folder := flag.String("folder", "docs/plots", "where the figures are")
	redraw := flag.Bool("redraw", false, "draw what was kept")
	flag.Parse()
	if err := run(*folder, *redraw, os.Stdin); err != nil {
		log.Fatal(err)
	}
}

func run(folder string, redraw bool, in io.Reader) error {
	kept := filepath.Join(folder, "index-scale.json")
	if !redraw {
		results, err := read(in)
		if err != nil {
			return err
		}
		data, err := json.MarshalIndent(results, "", "\t")
		if err != nil {
			return err
		}
		if err := os.WriteFile(kept, append(data, '\n'), 0o644); err != nil {
			return err
		}
	}
	data, err := os.ReadFile(kept)
	if err != nil {
		return err
	}
	var results []result
	if err := json.Unmarshal(data, &results); err != nil {
		return fmt.Errorf("read %s: %w", kept, err)
	}
	for _, f := range figures {
		if err := f.draw(results, filepath.Join(folder, f.file+".svg")); err != nil {
			return fmt.Errorf("draw %s: %w", f.file, err)
		}
	}
	return nil
}

var line = regexp.MustCompile(`^BenchmarkScale/(blocks|members)(\d+)(?:-\d+)?\s+\d+\s+(.*)$`)

func read(in io.Reader) (results []result, err error) {
	for s := bufio.NewScanner(in); s.Scan(); {
		m := line.FindStringSubmatch(s.Text())
		if m == nil {
			continue
		}
		size, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m[0], err)
		}
		at := slices.IndexFunc(results, func(r result) bool { return r.Axis == m[1] && r.Size == size })
		if at < 0 {
			at = len(results)
			results = append(results, result{m[1], size, make(map[string]float64)})
		}
		values := results[at].Values
		for pair := range slices.Chunk(strings.Fields(m[3]), 2) {
			v, err := strconv.ParseFloat(pair[0], 64)
			if err != nil || len(pair) < 2 {
				return nil, fmt.Errorf("%s: %v", m[0], pair)
			}
			if least, ok := values[pair[1]]; !ok || v < least {
				values[pair[1]] = v
			}
		}
	}
	if len(results) == 0 {
		return nil, fmt.Errorf("no BenchmarkScale in the input")
	}
	return results, nil
}

func (f figure) draw(results []result, path string) error {
	p := plot.New()
	p.X.Label.Text, p.Y.Label.Text = f.x, f.y
	p.X.Scale = plot.LogScale{}
	p.Add(plotter.NewGrid())
	var ticks plot.ConstantTicks
	var series []any
	for i, unit := range f.units {
		var points plotter.XYs
		for _, r := range results {
			if v, ok := r.Values[unit]; ok && r.Axis == f.axis {
				points = append(points, plotter.XY{X: r.Size, Y: v})
				ticks = append(ticks, plot.Tick{Value: r.Size, Label: short(r.Size)})
			}
		}
		if len(points) == 0 {
			return fmt.Errorf("no %s", unit)
		}
		series = append(series, f.names[i], points)
	}
	if err := plotutil.AddLinePoints(p, series...); err != nil {
		return err
	}
	p.X.Tick.Marker = ticks
	p.Y.Min, p.Y.Max = 0, p.Y.Max*1.1
	p.X.Max *= 1.3 // room for the last label
	p.Legend.Top, p.Legend.Left, p.Legend.XOffs = true, true, vg.Points(10)
	if len(f.units) == 1 {
		p.Legend = plot.NewLegend()
	}
	return p.Save(14*vg.Centimeter, 8*vg.Centimeter, path)
}

// short is a size as people write it.
func short(n float64) string {
	switch {
	case n >= 1e6:
		return fmt.Sprintf("%g M", n/1e6)
	case n >= 1e4:
		return fmt.Sprintf("%g k", n/1e3)
	}
	return fmt.Sprint(n)
}
