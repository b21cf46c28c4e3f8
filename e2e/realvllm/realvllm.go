// Package realvllm runs real vLLM engines on CPU with a tiny random model:
// real scheduler, block pool, prefix cache, events, metrics and HTTP. What it
// runs was put into a folder by install.sh.
package realvllm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Model is the served name of the tiny model, and Adapters its LoRA adapters.
const Model = "tiny"

// Adapters are served by engines with Config.Lora.
var Adapters = []string{"ad1", "ad2"}

// Config of an engine.
type Config struct {
	Home      string // folder that install.sh made
	BlockSize int    // 0: 32, what the CPU attention wants
	Blocks    int    // in the pool; 0: 256, so that eviction happens
	Lora      bool
	NoReplay  bool
	Ring      int      // batches that can be replayed; 0: the release's own number
	Args      []string // further arguments
	Env       []string // further environment, KEY=VALUE
	Log       io.Writer
}

// Engine is one engine process. Its ports stay the same over restarts.
type Engine struct {
	cfg    Config
	port   int          // of HTTP; events and replay follow
	claim  net.Listener // keeps the ports for this process
	client http.Client

	mu    sync.Mutex // guards cmd
	cmd   *exec.Cmd
	ended chan struct{} // closed when cmd has ended
}

// New picks free ports for an engine. It is not started.
func New(cfg Config) (*Engine, error) {
	if cfg.BlockSize == 0 {
		cfg.BlockSize = 32
	}
	if cfg.Blocks == 0 {
		cfg.Blocks = 256
	}
	if _, err := os.Stat(filepath.Join(cfg.Home, "ready")); err != nil {
		return nil, fmt.Errorf("no vLLM in %q, run install.sh first: %w", cfg.Home, err)
	}
	port, claim, err := freePorts()
	if err != nil {
		return nil, err
	}
	return &Engine{cfg: cfg, port: port, claim: claim}, nil
}

// freePorts finds three ports in a row: HTTP, events, replay. An engine binds
// them much later, and on all addresses, so they are below those that systems
// give away, and a fourth one is held that keeps others of us away.
func freePorts() (port int, claim net.Listener, err error) {
search:
	for range 1000 {
		port = 20000 + 10*rand.IntN(400)
		if claim, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+3)); err != nil {
			continue
		}
		for offset := range 3 {
			listener, err := net.Listen("tcp", fmt.Sprintf(":%d", port+offset))
			if err != nil {
				claim.Close()
				continue search
			}
			listener.Close()
		}
		return port, claim, nil
	}
	return 0, nil, errors.New("no three free ports in a row")
}

// URL of the engine's HTTP side.
func (e *Engine) URL() string { return fmt.Sprintf("http://127.0.0.1:%d", e.port) }

// Address is URL without the scheme.
func (e *Engine) Address() string { return fmt.Sprintf("127.0.0.1:%d", e.port) }

// Events is where batches are published.
func (e *Engine) Events() string { return fmt.Sprintf("127.0.0.1:%d", e.port+1) }

// Replay is where batches are asked for again.
func (e *Engine) Replay() string { return fmt.Sprintf("127.0.0.1:%d", e.port+2) }

// BlockSize in tokens.
func (e *Engine) BlockSize() int { return e.cfg.BlockSize }

func (e *Engine) command() *exec.Cmd {
	events := map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv",
		"endpoint": fmt.Sprintf("tcp://*:%d", e.port+1),
	}
	if !e.cfg.NoReplay {
		events["replay_endpoint"] = fmt.Sprintf("tcp://*:%d", e.port+2)
	}
	if e.cfg.Ring > 0 {
		events["buffer_steps"] = e.cfg.Ring
	}
	config, err := json.Marshal(events)
	if err != nil {
		panic(err) // a map of strings and booleans
	}
	model := filepath.Join(e.cfg.Home, "tiny")
	args := []string{
		"-m", "vllm.entrypoints.openai.api_server",
		"--model", model, "--load-format", "dummy", "--served-model-name", Model,
		"--host", "127.0.0.1", "--port", fmt.Sprint(e.port),
		"--block-size", fmt.Sprint(e.cfg.BlockSize), "--num-gpu-blocks-override", fmt.Sprint(e.cfg.Blocks),
		"--max-model-len", "4000", "--enforce-eager", "--enable-prompt-tokens-details",
		"--kv-events-config", string(config),
	}
	if e.cfg.Lora {
		args = append(args, "--enable-lora", "--max-loras", "2", "--lora-modules")
		for _, name := range Adapters {
			args = append(args, name+"="+filepath.Join(model, name))
		}
	}
	cmd := exec.Command(filepath.Join(e.cfg.Home, "venv", "bin", "python"), append(args, e.cfg.Args...)...)
	cmd.Env = append(os.Environ(),
		"VLLM_CPU_KVCACHE_SPACE=1", "VLLM_SERVER_DEV_MODE=1", "HF_HUB_OFFLINE=1",
		"VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_NO_USAGE_STATS=1",
		"DO_NOT_TRACK=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
	if strings.Contains(e.cfg.Home, "0.20.") || strings.Contains(e.cfg.Home, "0.16.") || strings.Contains(e.cfg.Home, "0.17.") {
		cmd.Env = append(cmd.Env, "VLLM_CPU_OMP_THREADS_BIND=0-1") // they crash on "nobind"
	}
	cmd.Env = append(cmd.Env, e.cfg.Env...)
	cmd.Stdout, cmd.Stderr = e.cfg.Log, e.cfg.Log
	// A group of its own, so that a kill reaches the engine core too; and none
	// of it outlives this process.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// attempts is how often a process is started that ends before it answers: vLLM
// picks ports for itself that another process may take before it.
const attempts = 3

var errEnded = errors.New("vLLM ended before it answered")

// Start starts the process and waits until it answers. It takes about a minute.
func (e *Engine) Start(ctx context.Context) (err error) {
	for range attempts {
		if err := e.Launch(); err != nil {
			return err
		}
		if err = e.Ready(ctx); !errors.Is(err, errEnded) {
			return err
		}
		e.Kill()
	}
	return err
}

// Launch starts the process and waits for nothing.
func (e *Engine) Launch() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cmd != nil {
		return errors.New("the engine runs already")
	}
	cmd := e.command()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start vLLM: %w", err)
	}
	e.cmd, e.ended = cmd, make(chan struct{})
	go func(ended chan struct{}) {
		_ = cmd.Wait()
		close(ended)
	}(e.ended)
	return nil
}

// Ready waits until the engine answers.
func (e *Engine) Ready(ctx context.Context) error {
	e.mu.Lock()
	ended := e.ended
	e.mu.Unlock()
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, e.URL()+"/health", nil)
		if err != nil {
			return err
		}
		if answer, err := e.client.Do(request); err == nil {
			answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("vLLM did not answer: %w", ctx.Err())
		case <-ended:
			return errEnded
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// Kill ends the process as a crash does, with all its children.
func (e *Engine) Kill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cmd == nil {
		return
	}
	_ = syscall.Kill(-e.cmd.Process.Pid, syscall.SIGKILL)
	<-e.ended
	e.cmd = nil
}

// Request is a completion to ask for.
type Request struct {
	Tokens    []uint32
	MaxTokens int // 0: 4
	Adapter   string
	Salt      string
	Priority  int64 // lower is served first, where the engine goes by it; 0: not sent
}

// Usage is what the engine counted, with the ids that it generated where the
// release returns them.
type Usage struct {
	PromptTokens, CachedTokens int
	Output                     []uint32
}

// Complete runs a completion and gives the engine's own counts.
func (e *Engine) Complete(ctx context.Context, r Request) (Usage, error) {
	body := map[string]any{"model": Model, "prompt": r.Tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": true, "return_token_ids": true}
	if r.MaxTokens > 0 {
		body["max_tokens"] = r.MaxTokens
	}
	if r.Adapter != "" {
		body["model"] = r.Adapter
	}
	if r.Salt != "" {
		body["cache_salt"] = r.Salt
	}
	if r.Priority != 0 {
		body["priority"] = r.Priority
	}
	var answer struct {
		Choices []struct {
			TokenIDs []uint32 `json:"token_ids"`
		} `json:"choices"`
		Usage struct {
			PromptTokens int `json:"prompt_tokens"`
			Details      *struct {
				CachedTokens *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := e.post(ctx, "/v1/completions", body, &answer); err != nil {
		return Usage{}, err
	}
	u := Usage{PromptTokens: answer.Usage.PromptTokens}
	if d := answer.Usage.Details; d != nil && d.CachedTokens != nil {
		u.CachedTokens = *d.CachedTokens
	}
	if len(answer.Choices) > 0 {
		u.Output = slices.Clone(answer.Choices[0].TokenIDs)
	}
	return u, nil
}

// Reset empties the prefix cache. An idle engine tells nobody before its next
// request.
func (e *Engine) Reset(ctx context.Context) error {
	return e.post(ctx, "/reset_prefix_cache", nil, nil)
}

func (e *Engine) post(ctx context.Context, path string, body, answer any) error {
	var raw []byte
	if body != nil {
		var err error
		if raw, err = json.Marshal(body); err != nil {
			return err
		}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+path, bytes.NewReader(raw))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := e.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %.300s", path, response.Status, text)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}
