package e2e

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/scheduler"
)

// TestImages reads the files that images are made of: where the programs
// listen, whom they trust, and what goes into the build.
func TestImages(t *testing.T) {
	t.Parallel()
	a, s := agent.Defaults(), scheduler.Defaults()
	a.NATSURL = "nats://nats:4222"
	for name, want := range map[string]struct {
		admin, ports string
		accepts      func(admin string) error
	}{
		"agent":     {":9478", "9478", func(admin string) error { a.AdminAddress = admin; return a.Validate() }},
		"scheduler": {":9479", "50051 9479 4222", func(admin string) error { s.AdminAddress = admin; return s.Validate() }},
	} {
		// Whatever the image says, its program must take.
		everywhere := "0.0.0.0" + want.admin
		if err := want.accepts(everywhere); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		text := read(t, "../Dockerfile."+name)
		stages := strings.Split(text, "\nFROM scratch")[1:]
		if len(stages) != 2 {
			t.Fatalf("%s: %d images from scratch", name, len(stages))
		}
		for i, stage := range stages {
			stage, _, _ = strings.Cut(stage, "\nFROM ")
			for _, line := range []string{
				"ENV KVSCOUT_ADMIN_ADDRESS=" + everywhere, "EXPOSE " + want.ports, "/etc/ssl/certs/", "USER 65532:65532", `ENTRYPOINT ["/kvscout-` + name + `"]`,
			} {
				if !strings.Contains(stage, line) {
					t.Errorf("image %d of %s lacks %s", i, name, line)
				}
			}
		}
		if name == "scheduler" && (!strings.Contains(text, "out/image/kvscout /\n") || !strings.Contains(text, " ./scheduler/cmd/kvscout\n") || !strings.Contains(text, "/kvscout-scheduler /kvscout /\n")) {
			t.Error("the scheduler's image lacks kvscout")
		}
		if strings.Contains(text, "buildvcs=false") {
			t.Errorf("%s: the program will not know its version", name)
		}
		if !strings.Contains(read(t, "../docs/OPERATIONS.md"), `(default "127.0.0.1`+want.admin+`")`) {
			t.Errorf("%s: -admin-address has another default port", name)
		}
	}
	if ignored := strings.Fields(read(t, "../.dockerignore")); !strings.Contains(strings.Join(ignored, " "), "out !out/image") {
		t.Errorf(".dockerignore: %q", ignored)
	}
}

// TestProgramsAnswerAndEndWell runs both programs as an operator's scripts do.
func TestProgramsAnswerAndEndWell(t *testing.T) {
	t.Parallel()
	bin := programs(t, "./agent/cmd/kvscout-agent", "./scheduler/cmd/kvscout-scheduler", "./scheduler/cmd/kvscout")
	// A collector that takes connections and says nothing.
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	git, err := os.Stat("../.git")
	stamped := err == nil && git.IsDir() // the compiler looks no further
	version := regexp.MustCompile(`^kvscout(?:-\w+)? (v\d\S+|\(devel\)) \(commit ([0-9a-f]{40}\+?|unknown), (\d{4}-\d\d-\d\dT\S+Z|unknown), go1\.\S+\)\n$`)
	if out, err := exec.Command(filepath.Join(bin, "kvscout"), "-version").Output(); err != nil || !version.Match(out) {
		t.Errorf("-version says %q, %v", out, err)
	}
	doctor := exec.Command(filepath.Join(bin, "kvscout"), "doctor", "-scheduler", "127.0.0.1:1")
	if out, err := doctor.Output(); doctor.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "MEND  scheduler: nobody listens at 127.0.0.1:1") {
		t.Errorf("without a scheduler doctor says %q, %v", out, err)
	}
	for name, args := range map[string][]string{
		"kvscout-agent":     {"-nats-url", "nats://127.0.0.1:1", "-engine", "http://127.0.0.1:1", "-admin-address", "127.0.0.1:0"},
		"kvscout-scheduler": {"-grpc-address", "127.0.0.1:0", "-admin-address", "127.0.0.1:0", "-nats-address", "127.0.0.1:0"},
	} {
		program := filepath.Join(bin, name)
		out, err := exec.Command(program, "-version").Output() // of stdout alone
		if err != nil || !version.Match(out) || stamped && (strings.Contains(string(out), "devel") || strings.Contains(string(out), "unknown")) {
			t.Errorf("-version says %q, %v", out, err)
		}
		if out, err := exec.Command(program, "-help").Output(); err != nil || !strings.Contains(string(out), "-admin-address") {
			t.Errorf("-help says %.80q, %v", out, err)
		}
		for _, protocol := range []string{"grpc", "http/protobuf"} {
			p := &process{t: t, name: name, cmd: exec.Command(program, args...)}
			p.cmd.Stderr = &p.log
			p.cmd.Env = append(os.Environ(), "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+mute.Addr().String(), "OTEL_EXPORTER_OTLP_PROTOCOL="+protocol,
				"OTEL_RESOURCE_ATTRIBUTES=not a pair")
			if err := p.cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(p.kill)
			p.says(0, "OTEL_RESOURCE_ATTRIBUTES")
			p.says(0, map[string]string{"kvscout-agent": "serving probes", "kvscout-scheduler": "scheduler started"}[name])
			p.signal(syscall.SIGHUP)
			p.signal(syscall.SIGTERM)
			began := time.Now()
			p.end.Do(func() { err = p.cmd.Wait() })
			if err != nil || time.Since(began) > patience/2 {
				t.Errorf("%s over %s ended after %v: %v\n%s", name, protocol, time.Since(began), err, p.log.String())
			}
		}
	}
}
