// Command compatibility makes docs/COMPATIBILITY.md from the results that the
// tests with real engines keep, one file for each release of vLLM, and prints
// the table of their phases.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvscout/kvscout/e2e/realvllm"
)

func main() {
	results := flag.String("results", "docs/compatibility", "folder with a result for each release")
	page := flag.String("page", "docs/COMPATIBILITY.md", "page to write")
	flag.Parse()
	if err := run(*results, *page); err != nil {
		fmt.Fprintln(os.Stderr, "compatibility:", err)
		os.Exit(1)
	}
}

func run(results, page string) error {
	list, err := read(results)
	if err != nil {
		return err
	}
	fmt.Print(phases(list))
	return os.WriteFile(page, []byte(render(list)), 0o644)
}

// read reads all results, the newest release first.
func read(folder string) ([]realvllm.Result, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.json"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no result in %s: run make test-vllm-all", folder)
	}
	var list []realvllm.Result
	for _, name := range files {
		r, err := realvllm.Read(name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		list = append(list, r)
	}
	sortNewest(list)
	return list, nil
}
