package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

// patience bounds one start.
const patience = 2 * time.Minute

// idleFor is how long the cost of heartbeats is measured.
const idleFor = 2 * time.Second

// result is what one start took.
type result struct {
	exact       time.Duration // until all are
	cpu         time.Duration // of the processors until then
	first       time.Duration // until one is
	peak, after uint64        // heap in use: at most during the sync, and after it
	rss, settle uint64        // resident: at the moment all are exact, and after
	idle        float64       // processors that heartbeats alone take
}

func run(ctx context.Context, o options, out io.Writer) error {
	agents := exec.CommandContext(ctx, os.Args[0], append(os.Args[1:], "-agents")...)
	agents.Stderr = os.Stderr
	hold, err := agents.StdinPipe()
	if err != nil {
		return err
	}
	said, err := agents.StdoutPipe()
	if err != nil {
		return err
	}
	if err := agents.Start(); err != nil {
		return err
	}
	defer func() {
		hold.Close()
		_ = agents.Wait()
	}()
	url, err := bufio.NewReader(said).ReadString('\n')
	if err != nil {
		return fmt.Errorf("the members did not start: %w", err)
	}
	fmt.Fprintf(out, "%d members x %d blocks, %.0f %% of them shared, heartbeats every %v, %d cores\n",
		o.members, o.blocks, 100*o.shared, o.beat, runtime.GOMAXPROCS(0))
	for n := range o.runs {
		r, err := start(ctx, o, strings.TrimSpace(url))
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "start %d: first exact after %v, all after %v with %v of CPU time; heap %d MiB at most, %d MiB after, %.2f times; RSS %d MiB when all are exact, %d MiB after; heartbeats take %.1f %% of a processor\n",
			n+1, r.first.Round(time.Millisecond), r.exact.Round(time.Millisecond), r.cpu.Round(time.Millisecond), r.peak>>20, r.after>>20, float64(r.peak)/float64(r.after), r.rss>>20, r.settle>>20, 100*r.idle)
	}
	return nil
}

// start runs one scheduler until all are exact.
func start(ctx context.Context, o options, url string) (r result, err error) {
	debug.FreeOSMemory()
	before := heap()
	began, used := time.Now(), cpuTime()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	s, err := stage.New(ctx, stage.Options{NATS: url, Change: func(c *scheduler.Config) { c.IndexBytes = o.index }})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for look := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		r.peak = max(r.peak, heap()-before)
		if time.Since(look) < 20*time.Millisecond {
			continue
		}
		look = time.Now()
		fleet, err := s.Operator.ListMembers(ctx, &api.ListMembersRequest{}, grpc.WaitForReady(true))
		if err != nil {
			return r, err
		}
		exact := 0
		for _, m := range fleet.GetMembers() {
			if m.GetCacheState().GetTrust() == api.Trust_TRUST_EXACT {
				exact++
			}
		}
		if exact > 0 && r.first == 0 {
			r.first = time.Since(began)
		}
		if exact == o.members {
			break
		}
	}
	r.exact, r.cpu = time.Since(began), cpuTime()-used
	r.peak = max(r.peak, heap()-before)
	r.rss = resident()
	debug.FreeOSMemory()
	r.after, r.settle = heap()-before, resident()
	began, used = time.Now(), cpuTime()
	select {
	case <-ctx.Done():
		return r, ctx.Err()
	case <-time.After(idleFor):
	}
	r.idle = float64(cpuTime()-used) / float64(time.Since(began))
	return r, nil
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}

// resident is what the process has in memory now; 0 where the system does not say.
func resident() uint64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	n, _ := strconv.ParseUint(fields[1], 10, 64)
	return n * uint64(os.Getpagesize())
}
