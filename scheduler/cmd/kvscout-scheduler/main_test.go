package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvscout/kvscout/scheduler"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func env(pairs ...string) func(string) string {
	return func(name string) string {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1]
			}
		}
		return ""
	}
}

func TestFlagBeatsEnvironmentBeatsDefault(t *testing.T) {
	cfg, err := parse([]string{"-pool", "flag", "--index-memory=2GiB"},
		env("KVSCOUT_POOL", "env", "KVSCOUT_GRACE", "7s", "KVSCOUT_TOKENIZE_CACHE", "-1", "KVSCOUT_LOG_FORMAT", "json"), io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Pool != "flag" || cfg.Grace != 7*time.Second || cfg.IndexBytes != 2<<30 || cfg.TokenizeCacheBytes != -1 ||
		cfg.GRPCAddress != "127.0.0.1:50051" || cfg.NATSURL != "" {
		t.Errorf("%+v", cfg)
	}
}

func TestHelpNamesEveryFlagAndTellsNoSecret(t *testing.T) {
	var out bytes.Buffer
	if code := run(t.Context(), []string{"--help"}, env("KVSCOUT_ENGINE_API_KEY", "hunter2", "KVSCOUT_NATS_URL", "nats://x:hunter2@y:1"), nil, &out, io.Discard); code != 0 {
		t.Errorf("exit %d", code)
	}
	text := out.String()
	for _, want := range []string{"-grpc-address", "-nats-url", "-engine-api-key", "KVSCOUT_NATS_URL", "127.0.0.1:50051", "1GiB", "Exit status"} {
		if !strings.Contains(text, want) {
			t.Errorf("help lacks %q", want)
		}
	}
	if strings.Contains(text, "hunter2") {
		t.Error("help tells a secret")
	}
}

func TestWrongUsage(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		env  func(string) string
		want string
	}{
		"unknown flag":  {[]string{"-x"}, env(), "-x"},
		"like a flag":   {[]string{"-polciy", "x"}, env(), "did you mean -policy?"},
		"argument":      {[]string{"x"}, env(), `"x"`},
		"environment":   {nil, env("KVSCOUT_GRACE", "soon"), "KVSCOUT_GRACE"},
		"size":          {[]string{"-index-memory", "1TB"}, env(), "1GiB"},
		"huge size":     {[]string{"-index-memory", "9999999999GiB"}, env(), "1GiB"},
		"no size":       {[]string{"-index-memory", ""}, env(), "1GiB"},
		"objectives":    {[]string{"-extproc-objectives", "x"}, env(), "-extproc-objectives"},
		"log format":    {[]string{"-log-format", "xml"}, env(), "xml"},
		"policy":        {[]string{"-policy", "nope"}, env(), "nope"},
		"log level":     {[]string{"-log-level", "loud"}, env(), "log-level"},
		"plain beyond":  {[]string{"-grpc-address", "0.0.0.0:1"}, env(), "-insecure"},
		"configuration": {[]string{"-pool", "a.b", "-grpc-address", "x"}, env(), "-grpc-address"},
	} {
		var out bytes.Buffer
		if code := run(t.Context(), tc.args, tc.env, nil, io.Discard, &out); code != 2 || !strings.Contains(out.String(), tc.want) {
			t.Errorf("%s: exit %d, %s", name, code, out.String())
		}
		// A line for each setting that is wrong, and nothing else.
		if lines := strings.Count(out.String(), "\n"); lines != 1 && (name != "configuration" || lines != 2) {
			t.Errorf("%s: %d lines\n%s", name, lines, out.String())
		}
	}
}

func TestUnknownVariablesAreWarnedOf(t *testing.T) {
	t.Setenv("KVSCOUT_POLCIY", "x")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	free := []string{"-admin-address", "127.0.0.1:0", "-nats-address", "127.0.0.1:0", "-grpc-address", "127.0.0.1:0"}
	var out bytes.Buffer
	if code := run(ctx, free, env(), nil, io.Discard, &out); code != 0 || !strings.Contains(out.String(), "did you mean KVSCOUT_POLICY?") || strings.Count(out.String(), "POLCIY") != 1 {
		t.Errorf("exit %d, %s", code, out.String())
	}
}

func TestVersion(t *testing.T) {
	var out bytes.Buffer
	if _, err := parse([]string{"-version"}, env(), &out, io.Discard); !errors.Is(err, flag.ErrHelp) || !strings.HasPrefix(out.String(), "kvscout-scheduler ") {
		t.Error(err, out.String())
	}
}

func TestFailureAndGoodEnd(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	free := []string{"-admin-address", "127.0.0.1:0", "-nats-address", "127.0.0.1:0", "-grpc-address"}
	var out bytes.Buffer
	if code := run(t.Context(), append(free, l.Addr().String()), env(), nil, io.Discard, &out); code != 1 || !strings.Contains(out.String(), "in use") {
		t.Errorf("exit %d, %s", code, out.String())
	}

	// The end of the context stands for a signal; the log says where it listens.
	out.Reset()
	ctx, cancel := context.WithCancel(t.Context())
	listens := regexp.MustCompile(`grpc=127\.0\.0\.1:\d+ .*admin=127\.0\.0\.1:\d+ .*nats=127\.0\.0\.1:\d+`)
	w := writer(func(p []byte) {
		if out.Write(p); listens.Match(p) {
			cancel()
		}
	})
	if code := run(ctx, append(free, "127.0.0.1:0"), env(), nil, io.Discard, w); code != 0 {
		t.Errorf("exit %d, %s", code, out.String())
	}
}

type writer func([]byte)

func (w writer) Write(p []byte) (int, error) { w(p); return len(p), nil }

// A changed file is followed: what is live changes, what is not is refused with
// its name, and nothing of that file is taken.
func TestFileIsFollowed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kvscout.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const fixed = "admin-address: 127.0.0.1:0\nnats-address: 127.0.0.1:0\ngrpc-address: 127.0.0.1:0\nengine-api-key: hush\n"
	write(fixed + "policy: random\n")
	lines := make(chan string, 1000)
	w := writer(func(p []byte) { lines <- string(p) })
	wait := func(what string) string {
		t.Helper()
		for {
			select {
			case line := <-lines:
				if strings.Contains(line, "hush") {
					t.Errorf("the log tells a secret: %s", line)
				}
				if strings.Contains(line, what) {
					return line
				}
			case <-time.After(20 * time.Second):
				t.Fatalf("the log never says %q", what)
			}
		}
	}
	again := make(chan os.Signal)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	go func() { done <- run(ctx, []string{"-config", file}, env(), again, io.Discard, w) }()
	line := wait("")
	for _, want := range []string{`msg="kvscout-scheduler starts"`, "version=", "commit=", "policy=random", "engine-api-key=REDACTED", "log-level=", "config="} {
		if !strings.Contains(line, want) {
			t.Errorf("the first line lacks %q: %s", want, line)
		}
	}
	admin := regexp.MustCompile(`admin=(\S+)`).FindStringSubmatch(wait("scheduler started"))[1]
	config := func() string {
		t.Helper()
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get("http://" + admin + "/config")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}

	write(fixed + "policy: least-requests\ncall-timeout: 7s\nlog-level: debug\n")
	for line, want := wait("settings changed"), []string{"policy.old=random", "policy.new=least-requests", "call-timeout.new=7s", "log-level.old=INFO", "log-level.new=DEBUG"}; len(want) > 0; want = want[1:] {
		if !strings.Contains(line, want[0]) {
			t.Errorf("the change lacks %q: %s", want[0], line)
		}
	}
	wait("configuration read again")
	if text := config(); !strings.Contains(text, "log-level: DEBUG\n") || !strings.Contains(text, "policy: least-requests\n") || !strings.Contains(text, "call-timeout: 7s\n") || strings.Contains(text, "hush") {
		t.Errorf("in force:\n%s", text)
	}
	write(fixed + "policy: round-robin\npool: other\n")
	if line := wait("not changed"); !strings.Contains(line, "pool: needs a restart") {
		t.Error(line)
	}
	write(fixed + "policy: round-robin\nplicy: random\n")
	again <- syscall.SIGHUP
	if line := wait("not changed"); !strings.Contains(line, "plicy") {
		t.Error(line)
	}
	if text := config(); !strings.Contains(text, "policy: least-requests\n") || !strings.Contains(text, "pool: default\n") {
		t.Errorf("a refused file is in force:\n%s", text)
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit %d", code)
	}
}

func TestIndexLeavesHalfOfTheMemory(t *testing.T) {
	const index = 256 << 20
	for limit, warns := range map[int64]bool{math.MaxInt64: false, 2 * index: false, 2*index - 1<<20: true} {
		var out bytes.Buffer
		checkIndex(scheduler.Config{IndexBytes: index, Log: slog.New(slog.NewTextHandler(&out, nil))}, limit)
		if strings.Contains(out.String(), "the index may take more than half") != warns {
			t.Errorf("of %d bytes: %q", limit, out.String())
		}
	}
}
