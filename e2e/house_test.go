// Package e2e holds the tests that see kvscout from outside, and the rules of
// the house that no single package can hold.
package e2e

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kvscout/kvscout/"

// packages lists, for each package, the packages of ours that it may import. What
// stands under a package's folder and is not listed itself belongs to that package.
var packages = map[string][]string{
	"protocol":                        {"protocol/pb", "protocol/blockkey"},
	"protocol/blockkey":               {},
	"protocol/pb":                     {},
	"protocol/kvscout/scheduler/v1":   {},
	"protocol/buffers":                {},
	"protocol/client":                 {"protocol/buffers", "protocol/completion", "protocol/kvscout/scheduler/v1"},
	"protocol/completion":             {},
	"protocol/telemetry":              {},
	"protocol/settings":               {},
	"protocol/tlsclient":              {},
	"protocol/logging":                {},
	"protocol/admin":                  {},
	"protocol/bus":                    {},
	"agent/internal/zmtp":             {},
	"agent/internal/vllm":             {"agent/internal/zmtp", "agent/internal/mirror", "protocol/blockkey"},
	"agent/internal/blockhash":        {},
	"agent/internal/mirror":           {"agent/internal/blockhash", "protocol/blockkey"},
	"agent/internal/reconcile":        {},
	"agent/internal/publish":          {"protocol", "protocol/pb", "protocol/blockkey", "agent/internal/mirror"},
	"agent/internal/rank":             {"agent/internal/vllm", "agent/internal/mirror", "agent/internal/publish", "agent/internal/reconcile", "protocol/pb", "protocol/blockkey"},
	"agent/internal/watch":            {"agent/internal/vllm", "agent/internal/rank", "protocol", "protocol/pb"},
	"agent":                           {"agent/internal/vllm", "agent/internal/mirror", "agent/internal/publish", "agent/internal/rank", "agent/internal/watch", "protocol", "protocol/pb", "protocol/telemetry", "protocol/settings", "protocol/logging", "protocol/admin", "protocol/bus", "protocol/tlsclient"},
	"agent/synthetic":                 {"agent/internal/publish", "agent/internal/mirror", "protocol", "protocol/pb", "protocol/blockkey"},
	"agent/internal/inject":           {},
	"agent/internal/manifest":         {"agent/internal/inject"},
	"agent/internal/webhook":          {"agent/internal/inject", "protocol/kube", "protocol/admin", "protocol/logging", "protocol/telemetry"},
	"agent/cmd/kvscout-agent":         {"agent", "agent/internal/inject", "agent/internal/manifest", "agent/internal/webhook", "protocol/kube", "protocol/settings"},
	"protocol/kube":                   {},
	"scheduler/internal/cluster":      {"protocol", "protocol/kube", "scheduler/internal/fleet"},
	"scheduler/internal/fleet":        {},
	"scheduler/internal/learn":        {},
	"scheduler/internal/certs":        {},
	"scheduler/internal/textfile":     {},
	"scheduler/internal/bus":          {"protocol", "protocol/bus", "scheduler/internal/certs", "scheduler/internal/textfile"},
	"scheduler/internal/membership":   {"protocol", "scheduler/internal/fleet", "scheduler/internal/textfile"},
	"scheduler/internal/profile":      {"scheduler/internal/textfile"},
	"scheduler/internal/index":        {"protocol/blockkey"},
	"scheduler/internal/approx":       {"protocol/blockkey", "scheduler/internal/index", "scheduler/internal/fleet", "scheduler/internal/learn"},
	"scheduler/internal/predict":      {"protocol/blockkey", "scheduler/internal/index"},
	"scheduler/internal/estimate":     {"scheduler/internal/fleet", "scheduler/internal/index", "scheduler/internal/learn"},
	"scheduler/internal/outbox":       {"protocol/blockkey", "scheduler/internal/fleet", "scheduler/internal/predict"},
	"scheduler/internal/books":        {"protocol/blockkey"},
	"scheduler/internal/policy":       {"scheduler/internal/fleet", "scheduler/internal/learn"},
	"scheduler/internal/pick":         {"protocol/blockkey", "scheduler/internal/books", "scheduler/internal/approx", "scheduler/internal/predict", "scheduler/internal/estimate", "scheduler/internal/outbox", "scheduler/internal/index", "scheduler/internal/fleet", "scheduler/internal/learn", "scheduler/internal/policy", "scheduler/internal/profile"},
	"scheduler/internal/intake":       {"protocol/blockkey"},
	"scheduler/internal/ingest":       {"protocol", "protocol/pb", "protocol/blockkey", "scheduler/internal/index", "scheduler/internal/fleet"},
	"scheduler/internal/sim/arrival":  {"protocol/blockkey"},
	"scheduler/internal/replica":      {"protocol", "protocol/pb", "protocol/blockkey", "scheduler/internal/fleet", "scheduler/internal/index", "scheduler/internal/outbox", "scheduler/internal/predict"},
	"scheduler/internal/admission":    {"scheduler/internal/fleet", "scheduler/internal/pick"},
	"scheduler/internal/rpc":          {"scheduler/internal/chronicle", "protocol/kvscout/scheduler/v1", "protocol/blockkey", "scheduler/internal/books", "scheduler/internal/intake", "scheduler/internal/admission", "scheduler/internal/pick", "scheduler/internal/policy", "scheduler/internal/fleet", "scheduler/internal/learn"},
	"scheduler/internal/edge":         {},
	"scheduler/internal/extproc":      {"scheduler/internal/edge", "protocol/client", "protocol/kvscout/scheduler/v1", "protocol/completion", "scheduler/internal/fleet"},
	"scheduler/internal/gateway":      {"protocol/client", "protocol/completion", "protocol/kvscout/scheduler/v1", "scheduler/internal/edge", "scheduler/internal/fleet"},
	"scheduler/internal/rest":         {"protocol/kvscout/scheduler/v1"},
	"scheduler/internal/chronicle":    {"protocol/kvscout/scheduler/v1"},
	"scheduler/internal/page":         {},
	"scheduler/internal/observe":      {"protocol/kvscout/scheduler/v1", "protocol/telemetry", "scheduler/internal/pick", "scheduler/internal/rpc"},
	"scheduler/internal/serve":        {"scheduler/internal/extproc", "scheduler/internal/gateway", "scheduler/internal/fleet", "protocol/admin", "protocol/buffers", "protocol/kvscout/scheduler/v1", "protocol/telemetry", "scheduler/internal/observe", "scheduler/internal/page", "scheduler/internal/rest", "scheduler/internal/rpc"},
	"scheduler":                       {"protocol/kube", "scheduler/internal/cluster", "scheduler/internal/extproc", "scheduler/internal/gateway", "scheduler/internal/books", "scheduler/internal/bus", "scheduler/internal/certs", "scheduler/internal/admission", "scheduler/internal/fleet", "scheduler/internal/index", "scheduler/internal/pick", "scheduler/internal/policy", "scheduler/internal/profile", "scheduler/internal/intake", "scheduler/internal/ingest", "scheduler/internal/membership", "scheduler/internal/observe", "scheduler/internal/outbox", "scheduler/internal/predict", "scheduler/internal/replica", "scheduler/internal/rest", "scheduler/internal/rpc", "scheduler/internal/serve", "protocol/kvscout/scheduler/v1", "protocol/telemetry", "protocol/settings", "protocol/logging", "protocol/tlsclient"},
	"scheduler/cmd/kvscout-scheduler": {"scheduler", "protocol/settings"},
	"scheduler/internal/cli":          {"protocol/kvscout/scheduler/v1", "scheduler/internal/chronicle", "protocol/bus", "protocol/settings", "protocol/tlsclient"},
	"scheduler/cmd/kvscout":           {"scheduler/internal/cli"},
	"scheduler/internal/sim":          {"protocol/blockkey", "scheduler/internal/index", "scheduler/internal/fleet", "scheduler/internal/learn", "scheduler/internal/policy", "scheduler/internal/pick", "scheduler/internal/profile", "scheduler/internal/admission", "scheduler/internal/sim/arrival"},
	"scheduler/internal/sim/report":   {"scheduler/internal/policy", "scheduler/internal/sim"},
	"scheduler/internal/sim/fit":      {"scheduler/internal/sim"},
	"scheduler/internal/sim/sizing":   {"scheduler/internal/sim", "scheduler/internal/sim/report"},
	"scheduler/cmd/kvscout-sim":       {"scheduler/internal/policy", "scheduler/internal/profile", "scheduler/internal/sim", "scheduler/internal/sim/arrival", "scheduler/internal/sim/report", "scheduler/internal/sim/sizing", "scheduler/internal/sim/fit"},
	"deploy/proxies/caddy":            {"protocol/client", "protocol/completion", "protocol/kvscout/scheduler/v1", "protocol/tlsclient"},
	"e2e/fakevllm":                    {},
	"e2e":                             {"agent", "agent/synthetic", "scheduler", "protocol", "protocol/bus", "protocol/pb", "protocol/buffers", "protocol/client", "protocol/tlsclient", "protocol/kvscout/scheduler/v1", "protocol/blockkey", "e2e/fakevllm"},
}

// edges names third-party code (and the two networked parts of the standard
// library) with the only packages that may touch it. Packages under e2e are free.
var edges = map[string][]string{
	"github.com/vmihailenco/msgpack":        {"agent/internal/vllm"},
	"github.com/prometheus/client_model":    {"scheduler/internal/sim/fit"},
	"github.com/prometheus/common":          {"scheduler/internal/sim/fit", "agent/internal/vllm"},
	"github.com/nats-io/nats.go":            {"protocol/bus", "agent/internal/publish", "agent/synthetic", "agent", "scheduler/internal/bus", "scheduler/internal/ingest", "scheduler/internal/replica"},
	"github.com/nats-io/nats-server":        {"scheduler/internal/bus"},
	"github.com/nats-io/nkeys":              {"scheduler/internal/bus"},
	"github.com/envoyproxy":                 {"scheduler/internal/extproc"},
	"google.golang.org/grpc":                {"deploy/proxies/caddy", "protocol/kvscout/scheduler/v1", "protocol/buffers", "protocol/client", "protocol/telemetry", "scheduler/internal/edge", "scheduler/internal/gateway", "scheduler/internal/extproc", "scheduler/internal/rpc", "scheduler/internal/rest", "scheduler/internal/observe", "scheduler/internal/serve", "scheduler/internal/cli"},
	"google.golang.org/genproto":            {"deploy/proxies/caddy", "protocol/kvscout/scheduler/v1", "scheduler/internal/edge", "scheduler/internal/rpc", "scheduler/internal/rest", "scheduler/internal/cli"},
	"github.com/grpc-ecosystem":             {"scheduler/internal/rest"},
	"google.golang.org/protobuf":            {"protocol", "protocol/pb", "protocol/kvscout/scheduler/v1", "protocol/buffers", "protocol/client", "agent/internal/publish", "agent/internal/rank", "agent/internal/watch", "scheduler/internal/ingest", "scheduler/internal/replica", "scheduler/internal/extproc", "scheduler/internal/rpc", "scheduler/internal/rest", "scheduler/internal/serve", "scheduler/internal/cli", "scheduler"},
	"go.opentelemetry.io":                   {"protocol/telemetry", "agent", "agent/internal/publish", "agent/internal/webhook", "scheduler/internal/observe", "scheduler/internal/serve", "scheduler", "scheduler/internal/rpc", "scheduler/internal/ingest"},
	"github.com/prometheus/client_golang":   {"protocol/telemetry", "agent", "scheduler"},
	"github.com/zeebo/xxh3":                 {"agent/internal/blockhash"},
	"github.com/cespare/xxhash":             {"protocol/blockkey", "agent/internal/vllm", "agent/internal/mirror", "scheduler/internal/intake", "scheduler/internal/fleet", "scheduler/internal/pick"},
	"github.com/caddyserver/caddy":          {"deploy/proxies/caddy"},
	"go.uber.org/zap":                       {"deploy/proxies/caddy"},
	"github.com/go-logr/logr":               {"protocol/telemetry"},
	"golang.org/x/sync":                     {"agent/internal/vllm", "agent/internal/publish", "agent/internal/rank", "agent/internal/watch", "agent/internal/webhook", "agent", "scheduler/internal/intake", "scheduler/internal/ingest", "scheduler/internal/replica", "scheduler/internal/serve", "scheduler", "scheduler/cmd/kvscout-sim"},
	"golang.org/x/term":                     {"scheduler/cmd/kvscout-sim", "scheduler/internal/cli"},
	"github.com/schollz/progressbar":        {"scheduler/cmd/kvscout-sim"},
	"gonum.org/v1/plot":                     {"scheduler/internal/sim/report"},
	"go.yaml.in/yaml/v3":                    {"scheduler/internal/profile", "protocol/settings", "agent/internal/manifest"},
	"mvdan.cc/sh/v3":                        {"agent/internal/inject"},
	"github.com/KimMachineGun/automemlimit": {"protocol/settings"},
	"net/http":                              {"deploy/proxies/caddy", "protocol/admin", "protocol/kube", "agent/internal/webhook", "agent/internal/vllm", "agent", "protocol/telemetry", "scheduler/internal/intake", "scheduler/internal/gateway", "scheduler/internal/page", "scheduler/internal/rest", "scheduler/internal/serve", "scheduler/internal/cli", "scheduler"},
}

// pure packages know no socket, clock, logger or context. They may name times
// and durations, which are arguments, but never ask what time it is. The one
// file of a pure package that may is its shell: it waits for the core, or feeds it.
var (
	shells    = []string{"../scheduler/internal/admission/wait.go", "../scheduler/internal/profile/file.go", "../scheduler/internal/extproc/extproc.go"}
	pure      = []string{"protocol/blockkey", "agent/internal/blockhash", "agent/internal/mirror", "agent/internal/reconcile", "agent/internal/inject", "agent/internal/manifest", "scheduler/internal/index", "scheduler/internal/approx", "scheduler/internal/books", "scheduler/internal/policy", "scheduler/internal/learn", "scheduler/internal/profile", "scheduler/internal/predict", "scheduler/internal/estimate", "scheduler/internal/outbox", "scheduler/internal/pick", "scheduler/internal/admission", "protocol/completion", "scheduler/internal/chronicle", "scheduler/internal/edge", "scheduler/internal/extproc", "scheduler/internal/sim", "scheduler/internal/sim/arrival", "scheduler/internal/sim/report", "scheduler/internal/sim/sizing", "scheduler/internal/sim/fit"}
	unclean   = []string{"context", "log", "log/slog", "net", "net/http", "os"}
	clockwork = []string{"time.Now(", "time.Since(", "time.Sleep(", "time.After(", "time.NewTimer(", "time.NewTicker("}
)

// packageOf gives the longest listed package that holds the folder.
func packageOf(folder string) string {
	best := ""
	for pkg := range packages {
		if (folder == pkg || strings.HasPrefix(folder, pkg+"/")) && len(pkg) > len(best) {
			best = pkg
		}
	}
	return best
}

type source struct {
	path, pkg string
	imports   []string
	text      string
}

func sources(t *testing.T) []source {
	t.Helper()
	var found []source
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != ".." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "out" || d.Name() == "bin") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.ImportsOnly)
		if err != nil {
			return err
		}
		s := source{path: path, pkg: packageOf(strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), "../")), text: string(text)}
		for _, spec := range file.Imports {
			s.imports = append(s.imports, strings.Trim(spec.Path.Value, `"`))
		}
		found = append(found, s)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(found) < 20 {
		t.Fatalf("only %d source files seen: the test looks in the wrong place", len(found))
	}
	return found
}

func TestEveryFileHasARoom(t *testing.T) {
	for _, s := range sources(t) {
		if s.pkg == "" {
			t.Errorf("%s stands in no package of the house: give it one in house_test.go", s.path)
		}
	}
}

func TestRoomsImportOnlyWhatTheHouseAllows(t *testing.T) {
	for _, s := range sources(t) {
		for _, path := range s.imports {
			if !strings.HasPrefix(path, module) {
				continue
			}
			other := packageOf(strings.TrimPrefix(path, module))
			if other != s.pkg && !slices.Contains(packages[s.pkg], other) {
				t.Errorf("%s: package %s may not import package %s", s.path, s.pkg, other)
			}
		}
	}
}

func TestThirdPartyCodeStaysInItsEdgeRooms(t *testing.T) {
	for _, s := range sources(t) {
		if strings.HasPrefix(s.pkg, "e2e") {
			continue
		}
		for _, path := range s.imports {
			first, _, _ := strings.Cut(path, "/")
			known := !strings.Contains(first, ".") || strings.HasPrefix(path, module)
			for edge, allowed := range edges {
				if path != edge && !strings.HasPrefix(path, edge+"/") {
					continue
				}
				known = true
				if !slices.Contains(allowed, s.pkg) {
					t.Errorf("%s: %s may be used in %v only, not in %s", s.path, edge, allowed, s.pkg)
				}
			}
			if !known {
				t.Errorf("%s: %s has no edge package: name one in house_test.go or do without", s.path, path)
			}
		}
	}
}

func TestPureRoomsKnowNoWorld(t *testing.T) {
	for _, s := range sources(t) {
		if !slices.Contains(pure, s.pkg) || slices.Contains(shells, filepath.ToSlash(s.path)) {
			continue
		}
		for _, path := range s.imports {
			if slices.Contains(unclean, path) {
				t.Errorf("%s: the pure package %s imports %s", s.path, s.pkg, path)
			}
		}
		for _, call := range clockwork {
			if strings.Contains(s.text, call) {
				t.Errorf("%s: the pure package %s calls %s)", s.path, s.pkg, call)
			}
		}
	}
}

// The package list itself must not rot.
func TestEveryRoomExists(t *testing.T) {
	for pkg := range packages {
		if _, err := os.Stat(filepath.Join("..", pkg)); err != nil {
			t.Errorf("package %s: %v", pkg, err)
		}
	}
}
