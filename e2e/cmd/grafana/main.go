// Grafana writes the dashboards of deploy/grafana from the one description in
// dashboards.go.
//
//	go run ./e2e/cmd/grafana
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

const folder = "deploy/grafana"

func main() {
	for _, d := range dashboards {
		if err := os.WriteFile(filepath.Join(folder, d.uid+".json"), d.json(), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
