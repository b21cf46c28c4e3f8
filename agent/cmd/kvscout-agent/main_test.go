package main

import (
	"bytes"
	"context"
	"io"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/settings"
)

func TestParse(t *testing.T) {
	env := map[string]string{"KVSCOUT_POOL": "blue", "KVSCOUT_HEARTBEAT": "2s", "KVSCOUT_NATS_URL": "nats://env:4222",
		"KVSCOUT_LABEL": "kvscout.role=decode,zone=a"}
	var out bytes.Buffer
	cfg, err := parse(new(settings.Program), []string{"-nats-url", "nats://flag:4222", "-events", "tcp://*:5557", "-events-mode", "bind", "-label", "zone=b=c"}, func(k string) string { return env[k] }, &out, &out)
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
		{}, {"-nats-url", "localhost"}, {"-nats-url", "nats://x", "more"}, {"-nats-url", "nats://x", "-events-mode", "guess"},
		{"-nats-url", "nats://x", "-log-format", "xml"}, {"-nats-url", "nats://x", "-log-level", "loud"}, {"-nats-url", "nats://x", "-heartbeat", "1ns"}, {"-what"},
		{"-nats-url", "nats://x", "-label", "role"}, {"-nats-url", "nats://x", "-label", "kvscout.role=cook"},
	} {
		var out bytes.Buffer
		if code := run(t.Context(), args, none, io.Discard, &out); code != 2 || out.Len() == 0 {
			t.Errorf("%q: status %d, %q", args, code, out.String())
		}
	}
	var out bytes.Buffer
	secrets := func(k string) string {
		return map[string]string{"KVSCOUT_ENGINE_API_KEY": "s3cret", "KVSCOUT_NATS_URL": "nats://x:s3cret@y:1"}[k]
	}
	if code := run(t.Context(), []string{"-help"}, secrets, &out, io.Discard); code != 0 || !strings.Contains(out.String(), "-pod-uid id") || strings.Contains(out.String(), "s3cret") {
		t.Errorf("help: status %d\n%s", code, out.String())
	}
	if code := run(t.Context(), nil, func(k string) string {
		return map[string]string{"KVSCOUT_NATS_URL": "nats://x", "KVSCOUT_BLOCK_SIZE": "many"}[k]
	}, io.Discard, &out); code != 2 {
		t.Errorf("bad variable: status %d", code)
	}
}

// TestFirstLineSaysWhatRuns, with all settings that there are and no secret.
func TestFirstLineSaysWhatRuns(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out bytes.Buffer
	env := map[string]string{"KVSCOUT_ENGINE_API_KEY": "s3cret", "KVSCOUT_NATS_URL": "nats://x:s3cret@127.0.0.1:1"}
	if code := run(ctx, []string{"-admin-address", "", "-pod", "p"}, func(k string) string { return env[k] }, io.Discard, &out); code != 0 {
		t.Errorf("status %d", code)
	}
	line, _, _ := strings.Cut(out.String(), "\n")
	for _, want := range []string{`msg="kvscout-agent starts"`, "version=", "commit=", "nats-url=nats://127.0.0.1:1", "engine-api-key=REDACTED", "pod-uid=p", "heartbeat=300ms", "log-level=INFO", "state-dir="} {
		if !strings.Contains(line, want) {
			t.Errorf("the first line lacks %q: %s", want, line)
		}
	}
	if strings.Contains(out.String(), "s3cret") {
		t.Error("the log tells a secret")
	}
}

func TestHelpAndVersionGoToStdout(t *testing.T) {
	for _, arg := range []string{"-help", "-version"} {
		var out, log bytes.Buffer
		if code := run(t.Context(), []string{arg}, func(string) string { return "" }, &out, &log); code != 0 || !strings.HasPrefix(out.String(), "kvscout-agent ") || log.Len() != 0 {
			t.Errorf("%s: status %d, stdout %.80q, stderr %.80q", arg, code, out.String(), log.String())
		}
	}
}

// TestStopsInGoodOrder with neither NATS nor an engine in sight.
func TestStopsInGoodOrder(t *testing.T) {
	ctx, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer stop()
	var out bytes.Buffer
	args := []string{"-nats-url", "nats://127.0.0.1:1", "-engine", "http://127.0.0.1:1", "-admin-address", "127.0.0.1:0"}
	if code := run(ctx, args, func(string) string { return "" }, io.Discard, &out); code != 0 {
		t.Errorf("status %d\n%s", code, out.String())
	}
	if code := run(t.Context(), append(args, "-admin-address", "256.0.0.1:1"), func(string) string { return "" }, io.Discard, &out); code != 1 {
		t.Errorf("status %d for an address that cannot be", code)
	}
}
