package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

func TestParse(t *testing.T) {
	env := map[string]string{"KVSCOUT_POOL": "blue", "KVSCOUT_HEARTBEAT": "2s", "KVSCOUT_NATS": "nats://env:4222",
		"KVSCOUT_LABEL": "kvscout.role=decode,zone=a"}
	var out bytes.Buffer
	cfg, err := parse([]string{"-nats", "nats://flag:4222", "-events", "tcp://*:5557", "-events-mode", "bind", "-label", "zone=b=c"}, func(k string) string { return env[k] }, &out)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.NATSURL != "nats://flag:4222" || cfg.Pool != "blue" || cfg.Heartbeat != 2*time.Second || !cfg.EventsBind || cfg.Engine != "http://127.0.0.1:8000" {
		t.Errorf("%+v", cfg)
	}
	if want := map[string]string{"kvscout.role": "decode", "zone": "b=c"}; !maps.Equal(cfg.Labels, want) {
		t.Errorf("labels %v, want %v", cfg.Labels, want)
	}
}

func TestWrongUsage(t *testing.T) {
	none := func(string) string { return "" }
	for _, args := range [][]string{
		{}, {"-nats", "localhost"}, {"-nats", "nats://x", "more"}, {"-nats", "nats://x", "-events-mode", "guess"},
		{"-nats", "nats://x", "-log-format", "xml"}, {"-nats", "nats://x", "-log-level", "loud"}, {"-nats", "nats://x", "-heartbeat", "1ns"}, {"-what"},
		{"-nats", "nats://x", "-label", "role"}, {"-nats", "nats://x", "-label", "kvscout.role=cook"},
	} {
		var out bytes.Buffer
		if code := run(t.Context(), args, none, &out); code != 2 || out.Len() == 0 {
			t.Errorf("%q: status %d, %q", args, code, out.String())
		}
	}
	var out bytes.Buffer
	secrets := func(k string) string {
		return map[string]string{"KVSCOUT_ENGINE_API_KEY": "s3cret", "KVSCOUT_NATS": "nats://x:s3cret@y:1"}[k]
	}
	if code := run(t.Context(), []string{"-help"}, secrets, &out); code != 0 || !strings.Contains(out.String(), "-pod-uid id") || strings.Contains(out.String(), "s3cret") {
		t.Errorf("help: status %d\n%s", code, out.String())
	}
	if code := run(t.Context(), nil, func(k string) string {
		return map[string]string{"KVSCOUT_NATS": "nats://x", "KVSCOUT_BLOCK_SIZE": "many"}[k]
	}, &out); code != 2 {
		t.Errorf("bad variable: status %d", code)
	}
}

// TestStopsInGoodOrder with neither NATS nor an engine in sight.
func TestStopsInGoodOrder(t *testing.T) {
	ctx, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer stop()
	var out bytes.Buffer
	args := []string{"-nats", "nats://127.0.0.1:1", "-engine", "http://127.0.0.1:1", "-listen", "127.0.0.1:0"}
	if code := run(ctx, args, func(string) string { return "" }, &out); code != 0 {
		t.Errorf("status %d\n%s", code, out.String())
	}
	if code := run(t.Context(), append(args, "-listen", "256.0.0.1:1"), func(string) string { return "" }, &out); code != 1 {
		t.Errorf("status %d for an address that cannot be", code)
	}
}

// TestMemoryLimitFollowsTheContainer sets the limit of this process, which is
// that of the test again afterwards.
func TestMemoryLimitFollowsTheContainer(t *testing.T) {
	was := debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetMemoryLimit(was) })
	const container = 1 << 30
	tenths := func(n int64) int64 { return n * container / 10 }
	for _, c := range []struct {
		name      string
		container memlimit.Provider
		env       string // GOMEMLIMIT
		limit     int64
		says      string
	}{
		{"a container", memlimit.Limit(container), "", tenths(9), "msg=\"memory limit\" bytes=966367641"},
		{"the environment", memlimit.Limit(container), "7GiB", was, ""},
		{"no container", func() (uint64, error) { return 0, memlimit.ErrNoLimit }, "", math.MaxInt64, ""},
		{"who knows", func() (uint64, error) { return 0, errors.New("no cgroup") }, "", was, "no cgroup"},
	} {
		t.Run(c.name, func(t *testing.T) {
			debug.SetMemoryLimit(was)
			if c.env != "" {
				t.Setenv("GOMEMLIMIT", c.env) // read by the runtime at the start of a process, and only looked for here
			}
			var out bytes.Buffer
			limitMemory(slog.New(slog.NewTextHandler(&out, nil)), c.container)
			if got := debug.SetMemoryLimit(-1); got != c.limit {
				t.Errorf("limit %d, want %d", got, c.limit)
			}
			if text := out.String(); !strings.Contains(text, c.says) || c.says == "" && c.env == "" && text != "" {
				t.Errorf("%q is said, want %q", text, c.says)
			}
		})
	}
}
