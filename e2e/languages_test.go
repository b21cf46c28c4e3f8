package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/journal"
	"github.com/kvscout/kvscout/e2e/stage"
)

// The languages' tools come by make test-languages; without them the tests are
// skipped, unless they are required.
const (
	requirePython = "KVSCOUT_REQUIRE_PYTHON" // not empty: fail without grpcio-tools
	nodeModules   = "KVSCOUT_NODE_MODULES"   // folder of what package.json asks for
)

// python is the interpreter that has the modules.
func python(t *testing.T, modules string) string {
	t.Helper()
	if out, err := exec.Command("python3", "-c", "import "+modules).CombinedOutput(); err != nil {
		if os.Getenv(requirePython) != "" {
			t.Fatalf("no %s: %v %s", modules, err, out)
		}
		t.Skipf("no %s (make test-languages): %v", modules, err)
	}
	return "python3"
}

// output of a program that runs in a folder.
func output(t *testing.T, folder string, env []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = folder, append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// example is a fleet for the examples of languages, whose prompt is 1 to 160: the
// engine holds it, and the promise is its own count.
func example(t *testing.T) (p *play, e *engine, says string) {
	t.Helper()
	p = open(t, stage.Options{})
	e = p.engine(fakevllm.Config{}).watched("pod")
	q := prompt{tokens: make([]uint32, 160)}
	for i := range q.tokens {
		q.tokens[i] = uint32(i + 1)
	}
	e.complete(q)
	e.truth(patience, q)
	return p, e, fmt.Sprintf("picked %s %d\nreported REPORT_STATUS_RECORDED\n", e.member(e.id()).GetMember().GetAddress(), e.held(q))
}

// protos are the files of the one folder that a generator needs.
func protos(t *testing.T) (folder string, files []string) {
	t.Helper()
	folder, err := filepath.Abs("../protocol")
	if err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"kvscout/scheduler/v1/*.proto", "google/*/*.proto"} {
		found, err := filepath.Glob(filepath.Join(folder, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %v", pattern, err)
		}
		files = append(files, found...)
	}
	return folder, files
}

func TestLanguagesPython(t *testing.T) {
	t.Parallel()
	py := python(t, "grpc_tools.protoc")
	folder, files := protos(t)
	gen := t.TempDir()
	output(t, gen, nil, py, append([]string{"-m", "grpc_tools.protoc", "-I", folder, "--python_out=.", "--grpc_python_out=."}, files...)...)
	p, e, says := example(t)
	script, err := filepath.Abs("languages/python/example.py")
	if err != nil {
		t.Fatal(err)
	}
	if got := output(t, gen, []string{"PYTHONPATH=" + gen}, py, script, p.GRPC, model); got != says {
		t.Errorf("%q, want %q", got, says)
	}
	if m := p.member(e.id()); m.GetReportedRequests() != 1 || m.GetReservedRequests() != 0 {
		t.Errorf("%v", m)
	}
}

// TestLanguagesPythonPackage runs the tests of the package that is installed, and
// checks its types and those of the example.
func TestLanguagesPythonPackage(t *testing.T) {
	t.Parallel()
	py := python(t, "kvscout, aiohttp, mypy")
	folder, err := filepath.Abs("../protocol/python")
	if err != nil {
		t.Fatal(err)
	}
	work := t.TempDir() // elsewhere than the sources, which are not what is installed
	said := output(t, work, []string{"PYTHONDONTWRITEBYTECODE=1"}, py, "-m", "unittest", "discover", "-s", filepath.Join(folder, "tests"), "-v")
	if !strings.Contains(said, "Ran 9 tests") {
		t.Error(said)
	}
	output(t, work, nil, py, "-m", "mypy", "--config-file", filepath.Join(folder, "pyproject.toml"), "-p", "kvscout")
}

// TestLanguagesPythonProxy: the example is a proxy that streams, keeps to the
// holder of a prompt, and serves while engines and scheduler come and go.
func TestLanguagesPythonProxy(t *testing.T) {
	t.Parallel()
	py := python(t, "kvscout, aiohttp")
	p := open(t, stage.Options{})
	one, two := p.engine(fakevllm.Config{}).watched("one"), p.engine(fakevllm.Config{}).watched("two")
	q := random(1, 160)
	one.complete(q)
	one.truth(patience, q)
	p.ready()

	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	free.Close()
	cmd := exec.Command(py, "../protocol/python/example_proxy.py", strings.TrimPrefix(address, "127.0.0.1:"), p.GRPC, one.Addr()+","+two.Addr())
	log := &journal.Journal{}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	ask := func(q prompt, stream bool) (engine, text string) {
		body, err := json.Marshal(object{"model": model, "prompt": q.tokens, "max_tokens": 3, "stream": stream, "stream_options": object{"include_usage": stream}})
		if err != nil {
			t.Fatal(err)
		}
		answer, err := p.http.Post("http://"+address+"/v1/completions", "application/json", bytes.NewReader(body))
		if err != nil {
			return "", err.Error()
		}
		defer answer.Body.Close()
		all, err := io.ReadAll(answer.Body)
		if err != nil || answer.StatusCode != http.StatusOK {
			return "", fmt.Sprint(answer.Status, err)
		}
		return answer.Header.Get("X-Engine"), string(all)
	}
	p.until("it serves", func() bool { engine, _ := ask(random(2, 16), false); return engine != "" })
	for _, stream := range []bool{false, true} {
		before := p.member(one.id()).GetReportedCachedTokens()
		p.until("the holder serves, and its count is reported", func() bool {
			engine, text := ask(q, stream)
			return engine == one.Addr() && strings.Contains(strings.ReplaceAll(text, " ", ""), `"cached_tokens":144`) &&
				strings.HasPrefix(text, "data: ") == stream && p.member(one.id()).GetReportedCachedTokens() >= before+144
		})
	}
	one.stop()
	if engine, text := ask(q, false); engine != two.Addr() {
		t.Errorf("the holder is dead: %q %s", engine, text)
	}
	p.StopScheduler()
	if engine, text := ask(q, true); engine != two.Addr() {
		t.Errorf("the scheduler is away: %q %s", engine, text)
	}
}

func TestLanguagesTypeScript(t *testing.T) {
	t.Parallel()
	modules := os.Getenv(nodeModules)
	if modules == "" {
		t.Skip("no " + nodeModules + " (make test-languages)")
	}
	folder, _ := protos(t)
	work := t.TempDir()
	if err := os.CopyFS(work, os.DirFS("languages/typescript")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(modules, filepath.Join(work, "node_modules")); err != nil {
		t.Fatal(err)
	}
	template := fmt.Sprintf(`{"version":"v2","plugins":[{"local":%q,"out":%q,"opt":["target=ts","import_extension=js"]}]}`,
		filepath.Join(modules, ".bin", "protoc-gen-es"), filepath.Join(work, "gen"))
	buf, err := filepath.Abs("../bin/buf")
	if err != nil {
		t.Fatal(err)
	}
	output(t, folder, nil, buf, "generate", "--template", template, "--path", "kvscout", "--path", "google")
	output(t, work, nil, filepath.Join(modules, ".bin", "tsc"), "-p", ".")
	p, e, says := example(t)
	says = strings.ReplaceAll(says, "REPORT_STATUS_", "") // the generator leaves an enum's name out
	if got := output(t, work, nil, "node", "js/example.js", p.GRPC, model); got != says {
		t.Errorf("%q, want %q", got, says)
	}
	if m := p.member(e.id()); m.GetReportedRequests() != 1 || m.GetReservedRequests() != 0 {
		t.Errorf("%v", m)
	}
}
