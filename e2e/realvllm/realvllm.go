// Package realvllm runs real vLLM engines on CPU with a tiny random model:
// real scheduler, block pool, prefix cache, events, metrics and HTTP. What it
// runs was put into a folder by install.sh.
package realvllm

import (
	"bytes"
	"cmp"
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
	"regexp"
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
	Model     string // folder of the model inside Home; empty: "tiny", full attention
	BlockSize int    // 0: 32, what the CPU attention wants
	Blocks    int    // in the pool; 0: 256, so that eviction happens
	Ranks     int    // data-parallel; 0: 1
	Lora      bool
	Offload   bool // to host memory, by a worker that only says that it copied
	ScaleOut  bool // the render endpoint is on, whatever the release's default
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
	cfg.Model = cmp.Or(cfg.Model, "tiny")
	cfg.Ranks = max(cfg.Ranks, 1)
	if _, err := os.Stat(filepath.Join(cfg.Home, "ready")); err != nil {
		return nil, fmt.Errorf("no vLLM in %q, run install.sh first: %w", cfg.Home, err)
	}
	port, claim, err := freePorts(1 + 2*cfg.Ranks)
	if err != nil {
		return nil, err
	}
	return &Engine{cfg: cfg, port: port, claim: claim}, nil
}

// freePorts finds n ports in a row: HTTP, each rank's events, each rank's
// replay. An engine binds them much later, and on all addresses, so they are
// below those that systems give away, and the tenth is held, which keeps others
// of us away.
func freePorts(n int) (port int, claim net.Listener, err error) {
search:
	for range 1000 {
		port = 20000 + 10*rand.IntN(400)
		if claim, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+9)); err != nil {
			continue
		}
		for offset := range n {
			listener, err := net.Listen("tcp", fmt.Sprintf(":%d", port+offset))
			if err != nil {
				claim.Close()
				continue search
			}
			listener.Close()
		}
		return port, claim, nil
	}
	return 0, nil, fmt.Errorf("no %d free ports in a row", n)
}

// URL of the engine's HTTP side.
func (e *Engine) URL() string { return fmt.Sprintf("http://127.0.0.1:%d", e.port) }

// Address is URL without the scheme.
func (e *Engine) Address() string { return fmt.Sprintf("127.0.0.1:%d", e.port) }

// Events is where rank 0 publishes its batches; the others follow.
func (e *Engine) Events() string { return fmt.Sprintf("127.0.0.1:%d", e.port+1) }

// Replay is where rank 0 is asked for batches again; the others follow.
func (e *Engine) Replay() string { return fmt.Sprintf("127.0.0.1:%d", e.port+1+e.cfg.Ranks) }

// Ranks is the number of data-parallel ranks.
func (e *Engine) Ranks() int { return e.cfg.Ranks }

// Model is the folder of the model, with its adapters.
func (e *Engine) Model() string { return filepath.Join(e.cfg.Home, e.cfg.Model) }

// BlockSize in tokens.
func (e *Engine) BlockSize() int { return e.cfg.BlockSize }

func (e *Engine) command() *exec.Cmd {
	events := map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv",
		"endpoint": fmt.Sprintf("tcp://*:%d", e.port+1),
	}
	if !e.cfg.NoReplay {
		events["replay_endpoint"] = fmt.Sprintf("tcp://*:%d", e.port+1+e.cfg.Ranks)
	}
	if e.cfg.Ring > 0 {
		events["buffer_steps"] = e.cfg.Ring
	}
	config, err := json.Marshal(events)
	if err != nil {
		panic(err) // a map of strings and booleans
	}
	model := e.Model()
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
	if e.cfg.Ranks > 1 {
		args = append(args, "--data-parallel-size", fmt.Sprint(e.cfg.Ranks))
	}
	if e.cfg.ScaleOut && !scalesOut.MatchString(e.Release()) {
		args = append(args, "--enable-scale-out")
	}
	if e.cfg.Offload {
		args = append(args, "--kv-transfer-config", offload)
	}
	cmd := exec.Command(filepath.Join(e.cfg.Home, "venv", "bin", "python"), append(args, e.cfg.Args...)...)
	cmd.Env = append(os.Environ(),
		"VLLM_CPU_KVCACHE_SPACE=1", "VLLM_SERVER_DEV_MODE=1", "HF_HUB_OFFLINE=1",
		"VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_NO_USAGE_STATS=1",
		"DO_NOT_TRACK=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
	if crashesUnbound.MatchString(e.Release()) {
		processors := "0-1"
		if e.cfg.Ranks > 1 {
			processors = strings.Repeat("0|", e.cfg.Ranks-1) + "0" // one list for each rank
		}
		cmd.Env = append(cmd.Env, "VLLM_CPU_OMP_THREADS_BIND="+processors)
	}
	if e.cfg.Offload {
		cmd.Env = append(cmd.Env, "PYTHONPATH="+e.cfg.Home)
	}
	cmd.Env = append(cmd.Env, e.cfg.Env...)
	cmd.Stdout, cmd.Stderr = e.cfg.Log, e.cfg.Log
	// A group of its own, so that a kill reaches the engine core too; and none
	// of it outlives this process.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// offload hands blocks to a tier of 256 blocks of the tiny model in host memory,
// by the spec in instant_offload.py.
const offload = `{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":` +
	`{"spec_module_path":"instant_offload","spec_name":"InstantOffloadingSpec","cpu_bytes_to_use":2097152,"self_describing_kv_events":true}}`

// crashesUnbound are the releases that end on VLLM_CPU_OMP_THREADS_BIND=nobind.
var crashesUnbound = regexp.MustCompile(`^0\.(1\d|20)\.`)

// scalesOut are the releases that render, if they can, without being asked to.
var scalesOut = regexp.MustCompile(`^0\.[12]\d\.`)

// Release of vLLM: the name of the folder that it was installed into.
func (e *Engine) Release() string { return filepath.Base(e.cfg.Home) }

// ExplicitEndpoints are the endpoints of events and replay that an agent must be given,
// because the release does not tell them itself; empty since 0.31.
func (e *Engine) ExplicitEndpoints(ctx context.Context) (events, replay string, err error) {
	status, _, err := e.Do(ctx, http.MethodGet, "/kv_event_sources", nil)
	if err != nil || status == http.StatusOK {
		return "", "", err
	}
	return "tcp://" + e.Events(), "tcp://" + e.Replay(), nil
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
	Rank      int   // that must serve it, of an engine with several
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
	var headers []string
	if e.cfg.Ranks > 1 {
		headers = []string{"X-data-parallel-rank", fmt.Sprint(r.Rank)}
	}
	status, text, err := e.Do(ctx, http.MethodPost, "/v1/completions", body, headers...)
	if err != nil {
		return Usage{}, err
	}
	if status != http.StatusOK {
		return Usage{}, fmt.Errorf("/v1/completions: %d: %.300s", status, text)
	}
	return ReadUsage(text)
}

// ReadUsage reads the answer to a completion or a chat completion.
func ReadUsage(text []byte) (Usage, error) {
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
	if err := json.Unmarshal(text, &answer); err != nil {
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
	status, text, err := e.Do(ctx, http.MethodPost, path, body)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("%s: %d: %.300s", path, status, text)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}

// Do asks the engine's HTTP side for anything: body, unless nil, as JSON.
func (e *Engine) Do(ctx context.Context, method, path string, body any, headers ...string) (status int, answer []byte, err error) {
	var raw []byte
	if body != nil {
		if raw, err = json.Marshal(body); err != nil {
			return 0, nil, err
		}
	}
	request, err := http.NewRequestWithContext(ctx, method, e.URL()+path, bytes.NewReader(raw))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := e.client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	answer, err = io.ReadAll(response.Body)
	return response.StatusCode, answer, err
}
