package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
	"github.com/kvscout/kvscout/scheduler/internal/sim/fit"
)

const calibrateIntro = `kvscout-sim calibrate fits an engine's constants to what a real engine did and
prints the engine as JSON, for -engine FILE.json:

  kvscout-sim calibrate -log requests.jsonl > mine.json
  kvscout-sim calibrate -metrics after.txt -since before.txt > mine.json

A log has a JSON object a line: at (s), prompt, cached, output (tokens), ttft, e2e
(s), and pod where several engines wrote it. A good one has long prompts in quiet
moments and many short requests at a time. Pages of /metrics give means only. What
neither tells, such as the size of the cache in a log, stays as it is in -engine.

`

func runCalibrate(args []string, stdout, stderr io.Writer) error {
	var log, page, since, from string
	err := parseFlags("calibrate", calibrateIntro, args, stdout, func(fs *flag.FlagSet) {
		fs.StringVar(&log, "log", "", "`file` with a log of requests")
		fs.StringVar(&page, "metrics", "", "`file` with a page of vLLM's /metrics")
		fs.StringVar(&since, "since", "", "`file` with an earlier page: only what came after it counts")
		fs.StringVar(&from, "engine", sim.DefaultEngine, "`name` of the engine to begin with, or a JSON file with one")
	})
	if err != nil {
		return err
	}
	if (log == "") == (page == "") || since != "" && page == "" {
		return usage(errors.New("give either -log, or -metrics with or without -since"))
	}
	base, err := engine(from)
	if err != nil {
		return err
	}
	base.Name = "calibrated"
	var got fit.Fit
	if log != "" {
		got, err = fitLog(log, base)
	} else {
		got, err = fitMetrics(page, since, base)
	}
	if err != nil {
		return err
	}
	if err := got.Explain(stderr); err != nil {
		return err
	}
	encoder := json.NewEncoder(stdout)
	encoder.SetIndent("", "  ")
	return encoder.Encode(got.Engine)
}

func fitLog(path string, base sim.Profile) (fit.Fit, error) {
	f, err := os.Open(path)
	if err != nil {
		return fit.Fit{}, err
	}
	defer f.Close()
	list, timed, err := fit.ReadLog(f)
	if err != nil {
		return fit.Fit{}, fmt.Errorf("%s: %w", path, err)
	}
	got, err := fit.FromLog(list, timed, base)
	if err != nil {
		return got, fmt.Errorf("%s: %w", path, err)
	}
	return got, nil
}

func fitMetrics(path, since string, base sim.Profile) (fit.Fit, error) {
	counted, err := readMetrics(path)
	if err == nil && since != "" {
		var earlier fit.Counters
		if earlier, err = readMetrics(since); err == nil {
			counted, err = counted.Since(earlier)
		}
	}
	if err != nil {
		return fit.Fit{}, err
	}
	return fit.FromCounters(counted, base)
}

func readMetrics(path string) (fit.Counters, error) {
	f, err := os.Open(path)
	if err != nil {
		return fit.Counters{}, err
	}
	defer f.Close()
	c, err := fit.ReadMetrics(f)
	if err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// served writes the requests of one run as a log.
type served struct {
	file *os.File
	out  *bufio.Writer
	err  error
}

func newServed(path string) (*served, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	return &served{file: f, out: bufio.NewWriter(f)}, nil
}

func (s *served) write(q sim.Served) {
	text, err := json.Marshal(q)
	if err == nil {
		_, err = s.out.Write(append(text, '\n'))
	}
	s.err = errors.Join(s.err, err)
}

func (s *served) close() error { return errors.Join(s.err, s.out.Flush(), s.file.Close()) }
