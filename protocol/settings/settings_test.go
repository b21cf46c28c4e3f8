package settings

import (
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

type values struct {
	a, b, c, d string
	wait       time.Duration
	on         bool
	file       string
}

func flags(v *values) *flag.FlagSet {
	fs := flag.NewFlagSet("test", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&v.a, "a", "default", "")
	fs.StringVar(&v.b, "b", "default", "")
	fs.StringVar(&v.c, "c", "default", "")
	fs.StringVar(&v.d, "the-d", "default", "")
	fs.DurationVar(&v.wait, "wait", time.Second, "")
	fs.BoolVar(&v.on, "on", false, "")
	fs.StringVar(&v.file, FileFlag, "", "")
	return fs
}

func write(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "settings.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func env(pairs map[string]string) func(string) string {
	return func(name string) string { return pairs[name] }
}

func TestFlagBeatsEnvironmentBeatsFileBeatsDefault(t *testing.T) {
	file := write(t, "# a comment\na: file\nb: file\nc: file\nwait: 3s\non: true\n")
	want := values{a: "flag", b: "env", c: "file", d: "default", wait: 3 * time.Second, on: true, file: file}
	for name, c := range map[string]struct {
		args []string
		env  map[string]string
	}{
		"file by flag":     {[]string{"-a", "flag", "-config", file}, map[string]string{"KVSCOUT_A": "env", "KVSCOUT_B": "env"}},
		"file by variable": {[]string{"-a=flag"}, map[string]string{"KVSCOUT_B": "env", "KVSCOUT_CONFIG": file}},
		"flag after a switch": {[]string{"-on", "-a", "flag", "--config=" + file},
			map[string]string{"KVSCOUT_B": "env", "KVSCOUT_CONFIG": "elsewhere"}},
	} {
		var got values
		if err := Read(flags(&got), c.args, env(c.env)); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if diff := cmp.Diff(want, got, cmp.AllowUnexported(values{})); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestBadFilesAreRefusedByNameAndLine(t *testing.T) {
	for text, want := range map[string][]string{
		"a: x\nplicy: y\n":         {"line 2", "plicy", "-help"},
		"a: x\na: y\n":             {"line 2", `"a"`},
		"a: [x]\n":                 {"line 1", `"a"`, "one value"},
		"wait: soon-secret\n":      {"line 1", "wait"},
		"config: other.yaml\n":     {"line 1", "config"},
		"- a\n":                    {"line 1"},
		"a: x\n---\nb: y\n":        {"more than one"},
		"a: 'x\n":                  {"yaml"},
		strings.Repeat("#", 1<<21): {"bytes"},
		"a: x\nb: {c: d}\nz: 1\n":  {"line 2", "line 3"},
	} {
		err := Read(flags(new(values)), []string{"-config", write(t, text)}, env(nil))
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%.40q: %v, want %q", text, err, w)
			}
		}
	}
	if err := Read(flags(new(values)), []string{"-config", "nowhere.yaml"}, env(nil)); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	for _, empty := range []string{"", "# nothing\n", "---\n", "a:\n"} {
		if err := Read(flags(new(values)), []string{"-config", write(t, empty)}, env(nil)); err != nil {
			t.Errorf("%q: %v", empty, err)
		}
	}
}

// Whoever reads an error must know where to mend it and how, in one line.
func TestErrorsNameFlagVariableAndFileWithAnExample(t *testing.T) {
	places := []string{"-wait", "KVSCOUT_WAIT", `"wait" in the file`, "for example 1s"}
	for name, c := range map[string]struct {
		args []string
		env  map[string]string
		want []string
	}{
		"zero":         {[]string{"-wait", "0"}, nil, append(places, "0 means nothing")},
		"variable":     {nil, map[string]string{"KVSCOUT_WAIT": "soon-secret"}, places},
		"flag":         {[]string{"-wait", "soon-secret"}, nil, places},
		"no value":     {[]string{"-wait"}, nil, append(places, "needs a value")},
		"file":         {[]string{"-config", write(t, "wait: soon-secret\n")}, nil, append(places, "line 1")},
		"unknown":      {[]string{"-wiat", "1s"}, nil, []string{"no flag -wiat", "did you mean -wait?"}},
		"a part":       {[]string{"-the", "1"}, nil, []string{"no flag -the", "did you mean -the-d?"}},
		"nothing like": {[]string{"-xyzzy"}, nil, []string{"no flag -xyzzy", "-help"}},
		"name in file": {[]string{"-config", write(t, "wiat: 1s\n")}, nil, []string{"line 1", "did you mean wait?"}},
		"switch":       {[]string{"-on=maybe-secret"}, nil, []string{"-on", "KVSCOUT_ON", "for example true"}},
	} {
		fs := flags(new(values))
		var out strings.Builder
		fs.SetOutput(&out)
		fs.Usage = func() {}
		err := Read(fs, c.args, env(c.env))
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", name, err, want)
			}
		}
		if err != nil && (strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "\n")) {
			t.Errorf("%s: %q", name, err)
		}
	}
	if err := Read(flags(new(values)), []string{"-help"}, env(nil)); !errors.Is(err, flag.ErrHelp) {
		t.Error(err)
	}
	if err := Read(flags(new(values)), nil, env(map[string]string{"KVSCOUT_ON": "x"}), "on"); err != nil {
		t.Errorf("a name that is never read from the environment: %v", err)
	}
}

func TestUnknownVariablesAreNoticed(t *testing.T) {
	fs := flags(new(values))
	got := Unknown(fs, []string{
		"PATH=/bin", "KVSCOUT_WAIT=1s", "KVSCOUT_THE_D=secret", "KVSCOUT_CONFIG=x",
		"KVSCOUT_WIAT=secret", "KVSCOUT_the_d=secret", "KVSCOUT_XYZZY=secret", "KVSCOUT_ON=true",
		// Kubernetes makes these for services named kvscout and kvscout-scheduler.
		"KVSCOUT_SERVICE_HOST=10.0.0.1", "KVSCOUT_PORT=tcp://10.0.0.1:4222", "KVSCOUT_SCHEDULER_SERVICE_PORT=1",
		"KVSCOUT_SCHEDULER_SERVICE_PORT_GRPC=1", "KVSCOUT_SCHEDULER_PORT=tcp://10.0.0.1:1", "KVSCOUT_SCHEDULER_PORT_50051_TCP=tcp://10.0.0.1:1",
		"KVSCOUT_SCHEDULER_PORT_50051_TCP_ADDR=10.0.0.1",
	}, "on")
	want := []string{
		"KVSCOUT_ON is not read: there is only the flag -on",
		"there is no setting KVSCOUT_WIAT; did you mean KVSCOUT_WAIT?",
		"there is no setting KVSCOUT_XYZZY; -help lists them",
		"there is no setting KVSCOUT_the_d; did you mean KVSCOUT_THE_D?",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// What is shown can be a file again.
func TestTextReadsBack(t *testing.T) {
	var v values
	fs := flags(&v)
	if err := Read(fs, []string{"-a", "x: y # z", "-b", "yes", "-c", "0x10", "-on"}, env(nil)); err != nil {
		t.Fatal(err)
	}
	text, err := Text(Effective(fs, func(name, value string) string {
		if name == "the-d" {
			return Secret(value)
		}
		return value
	}))
	if err != nil || !strings.Contains(string(text), "the-d: REDACTED") {
		t.Fatalf("%v\n%s", err, text)
	}
	var back values
	shown := strings.ReplaceAll(string(text), "config: \"\"\n", "")
	if err := Read(flags(&back), []string{"-config", write(t, shown)}, env(nil)); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if back.a != v.a || back.b != v.b || back.c != v.c || back.on != v.on || back.wait != v.wait {
		t.Errorf("%+v, want %+v", back, v)
	}
	if Secret("") != "" || RedactURLs("nats://u:p@h:1, tls://t@g") != "nats://h:1,tls://g" {
		t.Error("secrets")
	}
}

func TestWatchSeesChangesAndSignals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := write(t, "a: 1\n")
		change := func(text string) {
			t.Helper()
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * look)
			synctest.Wait()
		}
		calls, fail := 0, error(nil)
		signals := make(chan os.Signal, 1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go Watch(ctx, file, signals, slog.New(slog.DiscardHandler), func() error { calls++; return fail })
		for _, step := range []struct {
			do   func()
			want int
		}{
			{func() { time.Sleep(time.Minute) }, 0},
			{func() { change("a: 2\n") }, 1},
			{func() { fail = errors.New("bad"); change("b\n") }, 2},
			{func() { time.Sleep(time.Minute) }, 2}, // once for a state of the file
			{func() { os.Remove(file); time.Sleep(time.Minute) }, 2},
			{func() { fail = nil; change("a: 3\n") }, 3},
			{func() { signals <- syscall.SIGHUP; synctest.Wait() }, 4},
			{func() { time.Sleep(time.Minute) }, 4},
		} {
			step.do()
			synctest.Wait()
			if calls != step.want {
				t.Fatalf("%d reloads, want %d", calls, step.want)
			}
		}
	})
}
