package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/pprof"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/scheduler"
)

// partVariable names the part that a process of this program plays.
const partVariable = "KVSCOUT_SCALE_PART"

// stopWait bounds the orderly end of a part.
const stopWait = 20 * time.Second

// part is a process of its own. It ends when its standard input does, so that
// none outlives this one.
type part struct {
	name    string
	program bool // another one than this, which knows signals only
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	stderr  bytes.Buffer
	ended   chan struct{} // when it has, and err is why
	err     error

	mu  sync.Mutex // guards both: an order and its answer belong together
	in  *json.Encoder
	out *json.Decoder
}

// startPart starts a program, this one again where path is empty.
func startPart(name, path string, args ...string) (*part, error) {
	p := &part{name: name, program: path != ""}
	if !p.program {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		path = self
	}
	p.cmd = exec.Command(path, args...)
	p.cmd.Env = append(os.Environ(), partVariable+"="+name)
	p.cmd.Stderr = &p.stderr
	p.cmd.SysProcAttr = ownGroup() // an interrupt is for this program, which ends the parts
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
	p.ended = make(chan struct{})
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	p.stdin, p.in, p.out = stdin, json.NewEncoder(stdin), json.NewDecoder(stdout)
	return p, nil
}

// do sends an order and waits for its answer.
func (p *part) do(what, answer any) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.in.Encode(what)
	if err == nil {
		err = p.out.Decode(answer)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", p.name, err, p.stderr.Bytes())
	}
	return nil
}

// stop ends the part.
func (p *part) stop() error {
	if p.program {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
	}
	p.stdin.Close()
	late := time.AfterFunc(stopWait, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	if <-p.ended; p.err != nil {
		return fmt.Errorf("%s: %w: %s", p.name, p.err, p.stderr.Bytes())
	}
	return nil
}

// alive says whether the part has not ended.
func (p *part) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// runPart is the other end, until the input ends.
func runPart(name string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	role, _, _ := strings.Cut(name, "-") // the rest is its number
	switch role {
	case "nats":
		return serveNATS(ctx)
	case "agents":
		return serveAgents(ctx, os.Stdin, os.Stdout)
	case "scheduler":
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			cancel()
		}()
		return serveScheduler(ctx, os.Args[1:])
	}
	return errors.New("no part of this name")
}

// natsAnswer is where the server is.
type natsAnswer struct{ URL string }

func serveNATS(ctx context.Context) error {
	s, err := broker.Open()
	if err != nil {
		return err
	}
	defer s.Close()
	return answer(ctx, os.Stdin, os.Stdout, func(order json.RawMessage) (any, error) {
		return natsAnswer{URL: s.URL()}, nil
	})
}

// answer answers every order until the input or the context ends.
func answer(ctx context.Context, in io.Reader, out io.Writer, each func(json.RawMessage) (any, error)) error {
	orders := make(chan json.RawMessage)
	ended := make(chan error, 1)
	go func() {
		dec := json.NewDecoder(in)
		for {
			var order json.RawMessage
			if err := dec.Decode(&order); err != nil {
				ended <- err
				return
			}
			select {
			case orders <- order:
			case <-ctx.Done():
				return
			}
		}
	}()
	enc := json.NewEncoder(out)
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case order := <-orders:
			what, err := each(order)
			if err == nil {
				err = enc.Encode(what)
			}
			if err != nil {
				return err
			}
		}
	}
}

// serveScheduler is kvscout-scheduler without its file of settings, with a
// CPU profile for whoever wants one.
func serveScheduler(ctx context.Context, args []string) (err error) {
	cfg := scheduler.Defaults()
	fs := flag.NewFlagSet("scheduler", flag.ContinueOnError)
	profile := fs.String("cpuprofile", "", "file for a CPU profile of its whole life")
	cfg.Flags(fs)
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *profile != "" {
		f, err := os.Create(*profile)
		if err != nil {
			return err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer func() {
			pprof.StopCPUProfile()
			f.Close()
		}()
	}
	s, err := scheduler.New(cfg)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}
