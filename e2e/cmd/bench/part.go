package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/pprof"
	"strconv"
	"time"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/scheduler"
)

// partVariable names the part that a process of this program plays.
const partVariable = "KVSCOUT_BENCH_PART"

const (
	local = "127.0.0.1:0"
	// stopWait bounds the orderly end of a part.
	stopWait = 10 * time.Second
)

// order is what a part is told, on its standard input.
type order struct {
	NATS    string // URL, of an agent
	Engine  string // URL, of an agent
	Profile string // file, empty: none
}

// addresses are what a part answers once it runs, on its standard output.
type addresses struct{ GRPC, NATS string }

// part is a process of its own. It ends when its standard input does, so that
// none outlives this one.
type part struct {
	addresses
	name   string
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr bytes.Buffer
	ended  bool
}

// startPart starts this program once more, on so many cores; 0: on all.
func startPart(ctx context.Context, name string, cores int, what order) (*part, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &part{name: name, cmd: exec.CommandContext(ctx, self)}
	p.cmd.Env = append(os.Environ(), partVariable+"="+name)
	if cores > 0 {
		p.cmd.Env = append(p.cmd.Env, "GOMAXPROCS="+strconv.Itoa(cores))
	}
	p.cmd.Stderr = &p.stderr
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.stdin = stdin
	err = json.NewEncoder(stdin).Encode(what)
	if err == nil {
		err = json.NewDecoder(stdout).Decode(&p.addresses)
	}
	if err != nil {
		_, stopped := p.stop()
		return nil, errors.Join(fmt.Errorf("start %s: %w", name, err), stopped)
	}
	return p, nil
}

// stop ends the part and gives the CPU time of its whole life.
func (p *part) stop() (cpu time.Duration, err error) {
	if p.ended {
		return 0, nil
	}
	p.ended = true
	p.stdin.Close()
	late := time.AfterFunc(stopWait, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	if err := p.cmd.Wait(); err != nil {
		return 0, fmt.Errorf("%s: %w: %s", p.name, err, p.stderr.Bytes())
	}
	return p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime(), nil
}

// runPart is the other end: an agent or a scheduler until the input ends.
func runPart(name string) (err error) {
	in := json.NewDecoder(os.Stdin)
	var what order
	if err := in.Decode(&what); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if what.Profile != "" {
		f, err := os.Create(what.Profile)
		if err != nil {
			return err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer func() {
			pprof.StopCPUProfile()
			err = errors.Join(err, f.Close())
		}()
	}
	switch name {
	case "agent":
		a, err := agent.New(agent.Config{NATSURL: what.NATS, Engine: what.Engine, Pool: pool, Pod: pod})
		if err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(addresses{}); err != nil {
			return err
		}
		return a.Run(ctx)
	case "scheduler":
		s, err := scheduler.New(scheduler.Config{Pool: pool, GRPCAddress: local, AdminAddress: local, NATSAddress: local, StopWait: time.Second})
		if err != nil {
			return err
		}
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		select {
		case <-s.Started():
		case err := <-ended:
			return err
		}
		a := s.Addrs()
		if err := json.NewEncoder(os.Stdout).Encode(addresses{GRPC: a.GRPC, NATS: "nats://" + a.NATS}); err != nil {
			cancel()
			return errors.Join(err, <-ended)
		}
		return <-ended
	}
	return errors.New("no part of this name")
}
