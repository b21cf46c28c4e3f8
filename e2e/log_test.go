package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/journal"
)

// process is one of our programs at work, and its log.
type process struct {
	t    *testing.T
	name string
	cmd  *exec.Cmd
	log  journal.Journal
	end  sync.Once
}

// programs builds commands of this module into one folder.
func programs(t *testing.T, packages ...string) (folder string) {
	t.Helper()
	folder = t.TempDir()
	build := exec.Command("go", append([]string{"build", "-buildvcs=auto", "-o", folder + string(filepath.Separator)}, packages...)...)
	build.Dir = ".."
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return folder
}

// launch starts a program.
func launch(t *testing.T, path string, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: filepath.Base(path), cmd: exec.Command(path, args...)}
	p.cmd.Stderr = &p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	return p
}

func (p *process) kill() {
	p.end.Do(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		if p.t.Failed() {
			p.t.Logf("log of %s:\n%s", p.name, p.log.String())
		}
	})
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// mark is where the log is now.
func (p *process) mark() int { return len(p.log.Since(0)) }

// says waits for a line behind the mark.
func (p *process) says(from int, with ...string) {
	p.t.Helper()
	start := time.Now()
	for len(p.log.Since(from, with...)) == 0 {
		if time.Since(start) > patience {
			p.t.Fatalf("%s does not say %q", p.name, with)
		}
		time.Sleep(5 * time.Millisecond)
	}
	p.t.Logf("%s says %q after %v", p.name, with, time.Since(start).Round(time.Millisecond))
}

// TestLogTellsEachFault runs the real programs through what befalls them, and
// reads what somebody would read who was woken up.
func TestLogTellsEachFault(t *testing.T) {
	t.Parallel()
	bin := programs(t, "./agent/cmd/kvscout-agent", "./scheduler/cmd/kvscout-scheduler", "./e2e/cmd/fakevllm")
	ns := broker.New(t, nil)
	scheduler := launch(t, filepath.Join(bin, "kvscout-scheduler"), "-nats-url", ns.URL(), "-grpc-address", "127.0.0.1:0", "-admin-address", "127.0.0.1:0")
	engine, url := launchEngine(t, bin)
	beside := func(url, pod string) *process {
		return launch(t, filepath.Join(bin, "kvscout-agent"), "-nats-url", ns.URL(), "-engine", url, "-pod", pod, "-admin-address", "")
	}
	agent := beside(url, "pod-a")
	member := "member=default_pod-a_0"
	scheduler.says(0, "level=INFO", "member is EXACT", member)
	agent.says(0, "level=INFO", "cache state is EXACT", member)

	at := scheduler.mark()
	agent.kill()
	scheduler.says(at, "level=WARN", "member missed its heartbeats", member, "pod=pod-a", "do=")
	at = scheduler.mark()
	agent = beside(url, "pod-a")
	scheduler.says(at, "level=INFO", "member sends heartbeats again", member)

	agent.says(0, "cache state is EXACT")
	at, from := scheduler.mark(), agent.mark()
	engine.signal(syscall.SIGSTOP)
	agent.says(from, "level=WARN", "cache state is SYNCING", "does not answer", member, "do=")
	scheduler.says(at, "level=WARN", "member is SYNCING", "does not answer", member, "do=")
	agent.says(from, "level=WARN", "engine does not answer", "do=")
	scheduler.says(at, "level=WARN", "engine does not answer its agent", member, "do=")
	at = scheduler.mark()
	engine.signal(syscall.SIGCONT)
	scheduler.says(at, "level=INFO", "member is EXACT", member)
	scheduler.says(at, "level=INFO", "engine answers its agent again", member)

	at, from = scheduler.mark(), agent.mark()
	engine.kill()
	agent.says(from, "level=WARN", "cache state is SYNCING", "do=")
	scheduler.says(at, "level=WARN", "member is SYNCING", member)
	agent.kill()

	_, other := launchEngine(t, bin)
	at = scheduler.mark()
	first, second := beside(other, "pod-b"), beside(other, "pod-b")
	scheduler.says(at, "level=ERROR", "two agents publish for one member", "member=default_pod-b_0", "do=")
	first.kill()
	second.kill()

	_, silent := launchEngine(t, bin, "-no-events")
	at = scheduler.mark()
	mute := beside(silent, "pod-c")
	mute.says(0, "level=WARN", "cache state is UNKNOWN", "do=")
	scheduler.says(at, "level=WARN", "member is UNKNOWN", "member=default_pod-c_0", "do=")

	at, from = scheduler.mark(), mute.mark()
	ns.Stop()
	scheduler.says(at, "level=WARN", "connection to NATS lost", "do=")
	mute.says(from, "level=WARN", "connection to NATS lost", "do=")
	scheduler.says(at, "level=ERROR", "cannot connect to NATS", "connection refused", "do=")
	mute.says(from, "level=ERROR", "cannot connect to NATS", "connection refused", "do=")
	time.Sleep(5 * time.Second) // the fault stands
	for _, p := range []*process{scheduler, mute} {
		if lines := p.log.Since(map[*process]int{scheduler: at, mute: from}[p]); len(lines) > 5 {
			t.Errorf("%d lines of %s in 5 s without NATS", len(lines), p.name)
		}
	}
	ns.Start()
	scheduler.says(at, "level=INFO", "connected to NATS again", "attempts=")
	mute.says(from, "level=INFO", "connected to NATS again", "attempts=")
	at = scheduler.mark()
	mute.signal(syscall.SIGTERM)
	scheduler.says(at, "level=INFO", "member leaves", "member=default_pod-c_0")
}

// launchEngine starts a fake engine as a process of its own.
func launchEngine(t *testing.T, bin string, args ...string) (*process, string) {
	t.Helper()
	p := &process{t: t, name: "fakevllm", cmd: exec.Command(filepath.Join(bin, "fakevllm"), append([]string{"-port", "0", "-events-port", "0", "-replay-port", "0"}, args...)...)}
	p.cmd.Stderr = &p.log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	var url string
	if _, err := fmt.Fscanf(out, "http %s\n", &url); err != nil {
		t.Fatal(err)
	}
	return p, url
}
