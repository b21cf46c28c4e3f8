package report

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// Run is a finished run as it is kept.
type Run struct {
	Cell string `json:"cell"`
	// Command plays the run's cell; Code names the code that played it. A run
	// whose command or code differs from the plan's is played again.
	Command string `json:"command"`
	Code    string `json:"code"`
	sim.Result
}

// maxRun bounds the line of a run.
const maxRun = 1 << 20

// ReadRuns reads runs, one JSON object a line.
func ReadRuns(r io.Reader) ([]Run, error) {
	var list []Run
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxRun)
	for n := 1; lines.Scan(); n++ {
		var run Run
		if err := json.Unmarshal(lines.Bytes(), &run); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		list = append(list, run)
	}
	return list, lines.Err()
}

// WriteRuns writes what ReadRuns reads, in the order of the field and the
// seeds.
func WriteRuns(w io.Writer, list []Run) error {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b Run) int {
		if c := place(a.Policy) - place(b.Policy); c != 0 {
			return c
		}
		return int(a.Seed) - int(b.Seed)
	})
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	for _, run := range list {
		if err := encoder.Encode(run); err != nil {
			return err
		}
	}
	_, err := w.Write(text.Bytes())
	return err
}

// Results of runs, with the headroom between them.
func Results(list []Run) []sim.Result {
	results := make([]sim.Result, len(list))
	for i := range list {
		results[i] = list[i].Result
	}
	sim.Headroom(results)
	return results
}
