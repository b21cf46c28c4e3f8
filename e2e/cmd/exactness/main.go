// Command exactness plays recordings of real engines through the whole of
// kvscout, real sockets everywhere, and compares the cached tokens that the
// scheduler promises for each isolated request with what the engine counted.
//
// One line a file, the totals last; exit code 1 when anything was promised that
// the engine did not have, or fewer requests were exact than are expected; 2
// when a recording could not be played.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/kvscout/kvscout/e2e/recording"
	"github.com/kvscout/kvscout/e2e/stage"
)

func main() {
	verbose := flag.Bool("v", false, "print every request that was not exact")
	expect := flag.String("expect", "", "`file` with the least number of exact requests by recording, in JSON")
	flag.Usage = func() {
		fmt.Fprintf(os.Stderr, "usage: exactness [-v] [-expect FILE] FILE...\n\nPlays recordings of real engines (JSON lines, plain or .gz) and checks the promised cached tokens.\n\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	least, err := readExpected(*expect)
	if err != nil {
		fmt.Fprintf(os.Stderr, "exactness: -expect: %v\n", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, flag.Args(), *verbose, least)
	stop()
	os.Exit(code)
}

func readExpected(file string) (map[string]int, error) {
	if file == "" {
		return nil, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var least map[string]int
	if err := json.Unmarshal(data, &least); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return least, nil
}

func run(ctx context.Context, files []string, verbose bool, least map[string]int) (code int) {
	var total tally
	for _, file := range files {
		t, err := playFile(ctx, file, verbose)
		if err != nil {
			fmt.Fprintf(os.Stderr, "exactness: %s: %v\n", file, err)
			code = 2
			if errors.Is(err, context.Canceled) {
				return code
			}
			continue
		}
		fmt.Printf("%s %s\n", nameOf(file), &t)
		if n := least[nameOf(file)]; t.Exact < n {
			fmt.Printf("  fewer are exact than the %d expected\n", n)
			code = max(code, 1)
		}
		total.add(t)
	}
	fmt.Printf("total %s\n", &total)
	if code == 0 && total.Over > 0 {
		code = 1
	}
	return code
}

func nameOf(file string) string {
	return strings.TrimSuffix(strings.TrimSuffix(filepath.Base(file), ".gz"), ".jsonl")
}

func playFile(ctx context.Context, file string, verbose bool) (tally, error) {
	rec, err := recording.Open(file)
	if err != nil {
		return tally{}, err
	}
	e, err := newEngine(rec)
	if err != nil {
		return tally{}, err
	}
	s, err := stage.New(ctx, stage.Options{})
	if err != nil {
		return tally{}, err
	}
	defer s.Close()
	for _, p := range e.publishers {
		s.Go(p.Run)
	}
	a, err := s.Agent(stage.AgentOptions{Engine: "http://" + e.address, Pod: "recorded", Ranks: rec.Ranks()})
	if err != nil {
		return tally{}, err
	}
	defer e.server.Close()
	for _, id := range a.Members {
		if err := s.Until(ctx, patience, id, "settle", stage.Settled); err != nil {
			return tally{}, err
		}
	}
	p := &player{rec: rec, engine: e, stage: s, members: a.Members, verbose: verbose}
	return p.play(ctx)
}
