package fakevllm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// maxBody bounds a request body.
const maxBody = 64 << 20

// apiError is an error answer of the OpenAI endpoints.
type apiError struct {
	status  int
	kind    string
	param   string
	message string
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", param, fmt.Sprintf(format, args...)}
}

func (e *Engine) handler() http.Handler {
	mux := http.NewServeMux()
	empty := func(http.ResponseWriter, *http.Request) {}
	mux.HandleFunc("GET /health", empty)
	mux.HandleFunc("GET /ping", empty)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]string{"version": e.cfg.Version})
	})
	mux.HandleFunc("GET /v1/models", e.listModels)
	mux.HandleFunc("GET /kv_event_sources", e.eventSources)
	mux.Handle("GET /metrics", promhttp.HandlerFor(e.metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /load", func(w http.ResponseWriter, _ *http.Request) {
		e.mu.Lock()
		n := e.inFlight
		e.mu.Unlock()
		answer(w, map[string]int{"server_load": n})
	})
	mux.HandleFunc("GET /is_sleeping", func(w http.ResponseWriter, _ *http.Request) {
		r := e.ranks[0]
		r.mu.Lock()
		asleep := r.sleeping > 0
		r.mu.Unlock()
		answer(w, map[string]bool{"is_sleeping": asleep})
	})
	mux.HandleFunc("POST /sleep", func(w http.ResponseWriter, r *http.Request) {
		level := 1
		if v := r.URL.Query().Get("level"); v != "" {
			n, err := strconv.Atoi(v)
			if err != nil || n < 0 || n > 2 {
				fail(w, badRequest("level", "sleep level %q", v))
				return
			}
			level = n
		}
		for _, rank := range e.ranks {
			rank.sleep(level)
		}
	})
	mux.HandleFunc("POST /wake_up", func(http.ResponseWriter, *http.Request) {
		for _, rank := range e.ranks {
			rank.sleep(0)
		}
	})
	pause := func(on bool, status string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if mode := r.URL.Query().Get("mode"); on && mode != "keep" {
				fail(w, badRequest("mode", "only the mode keep is there, not %q", mode))
				return
			}
			for _, rank := range e.ranks {
				rank.pause(on)
			}
			answer(w, map[string]string{"status": status})
		}
	}
	mux.HandleFunc("POST /pause", pause(true, "paused"))
	mux.HandleFunc("POST /resume", pause(false, "resumed"))
	mux.HandleFunc("POST /reset_prefix_cache", func(w http.ResponseWriter, r *http.Request) {
		done := true
		for _, rank := range e.ranks {
			done = rank.reset(r.URL.Query().Get("reset_running_requests") == "true") && done
		}
		answer(w, map[string]bool{"success": done})
	})
	mux.HandleFunc("POST /v1/load_lora_adapter", e.loadAdapter)
	mux.HandleFunc("POST /v1/unload_lora_adapter", e.unloadAdapter)
	mux.HandleFunc("POST /tokenize", e.tokenize)
	mux.HandleFunc("POST /detokenize", e.detokenize)
	mux.HandleFunc("POST /v1/completions", e.serve(false))
	mux.HandleFunc("POST /v1/chat/completions", e.serve(true))
	mux.HandleFunc("POST /v1/completions/render", e.render(false))
	mux.HandleFunc("POST /v1/chat/completions/render", e.render(true))
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		answerStatus(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
	})
	return e.counted(mux)
}

// counted counts requests that were answered, but for those of probes.
func (e *Engine) counted(next http.Handler) http.Handler {
	probes := []string{"/metrics", "/health", "/load", "/ping", "/version", "/server_info"}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if slices.Contains(probes, r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		s := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		// A client that left was answered, too.
		defer func() {
			if s.status != http.StatusNotFound {
				e.metrics.http.WithLabelValues(r.URL.Path, r.Method, fmt.Sprintf("%dxx", s.status/100)).Inc()
			}
		}()
		next.ServeHTTP(s, r)
	})
}

// statusWriter remembers the status.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets a ResponseController reach the writer inside.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func answer(w http.ResponseWriter, v any) { answerStatus(w, http.StatusOK, v) }

func answerStatus(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// The client may be gone; there is nobody else to tell.
	_ = json.NewEncoder(w).Encode(v)
}

func fail(w http.ResponseWriter, err error) {
	var e *apiError
	if !errors.As(err, &e) {
		e = badRequest("", "%v", err)
	}
	var param *string
	if e.param != "" {
		param = &e.param
	}
	answerStatus(w, e.status, map[string]any{"error": map[string]any{
		"message": e.message, "type": e.kind, "param": param, "code": e.status,
	}})
}

// read decodes a JSON body.
func read(w http.ResponseWriter, r *http.Request, v any) error {
	body := http.MaxBytesReader(w, r.Body, maxBody)
	var b []byte
	var err error
	if n := r.ContentLength; n >= 0 && n <= maxBody {
		b = make([]byte, n)
		_, err = io.ReadFull(body, b)
	} else {
		b, err = io.ReadAll(body)
	}
	if err != nil {
		return fmt.Errorf("read body: %w", err)
	}
	return json.Unmarshal(b, v)
}

type modelCard struct {
	ID          string       `json:"id"`
	Object      string       `json:"object"`
	Created     int64        `json:"created"`
	OwnedBy     string       `json:"owned_by"`
	Root        string       `json:"root"`
	Parent      *string      `json:"parent"`
	MaxModelLen *int         `json:"max_model_len"`
	Permission  []permission `json:"permission"`
}

type permission struct {
	ID                 string  `json:"id"`
	Object             string  `json:"object"`
	Created            int64   `json:"created"`
	AllowCreateEngine  bool    `json:"allow_create_engine"`
	AllowSampling      bool    `json:"allow_sampling"`
	AllowLogprobs      bool    `json:"allow_logprobs"`
	AllowSearchIndices bool    `json:"allow_search_indices"`
	AllowView          bool    `json:"allow_view"`
	AllowFineTuning    bool    `json:"allow_fine_tuning"`
	Organization       string  `json:"organization"`
	Group              *string `json:"group"`
	IsBlocking         bool    `json:"is_blocking"`
}

func (e *Engine) listModels(w http.ResponseWriter, _ *http.Request) {
	created := time.Now().Unix()
	card := func(id, root string) modelCard {
		return modelCard{ID: id, Object: "model", Created: created, OwnedBy: "vllm", Root: root, Permission: []permission{{
			ID: "modelperm-" + id, Object: "model_permission", Created: created,
			AllowSampling: true, AllowLogprobs: true, AllowView: true, Organization: "*",
		}}}
	}
	base := card(e.cfg.Model, e.cfg.Model)
	base.MaxModelLen = &e.cfg.MaxModelLen
	list := []modelCard{base}
	for _, a := range e.loadedAdapters() {
		c := card(a.Name, a.Path)
		c.Parent = &e.cfg.Model
		list = append(list, c)
	}
	answer(w, map[string]any{"object": "list", "data": list})
}

// loadedAdapters in the order they were loaded.
func (e *Engine) loadedAdapters() []loaded {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := make([]loaded, 0, len(e.adapters))
	for _, a := range e.adapters {
		list = append(list, a)
	}
	slices.SortFunc(list, func(a, b loaded) int { return a.id - b.id })
	return list
}

type eventSource struct {
	Enable         bool    `json:"enable_kv_cache_events"`
	Publisher      string  `json:"publisher"`
	Endpoint       string  `json:"endpoint"`
	ReplayEndpoint *string `json:"replay_endpoint"`
	BufferSteps    int     `json:"buffer_steps"`
	HWM            int     `json:"hwm"`
	MaxQueueSize   int     `json:"max_queue_size"`
	Topic          string  `json:"topic"`
}

// eventSources names endpoints as an operator would configure them: with a
// host other than * vLLM would connect, not bind.
func (e *Engine) eventSources(w http.ResponseWriter, _ *http.Request) {
	if e.noSources.Load() {
		answerStatus(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
		return
	}
	list := make(map[string]eventSource)
	for i, p := range e.events {
		s := eventSource{
			Enable: true, Publisher: "zmq", Endpoint: fmt.Sprintf("tcp://*:%d", port(p.events)),
			BufferSteps: p.cfg.BufferSteps, HWM: p.cfg.HWM, MaxQueueSize: 100000, Topic: p.cfg.Topic,
		}
		if p.replay != nil {
			replay := fmt.Sprintf("tcp://*:%d", port(p.replay))
			s.ReplayEndpoint = &replay
		}
		list[strconv.Itoa(i)] = s
	}
	answer(w, list)
}

type adapterRequest struct {
	Name    string `json:"lora_name"`
	Path    string `json:"lora_path"`
	Inplace bool   `json:"load_inplace"`
}

func (e *Engine) loadAdapter(w http.ResponseWriter, r *http.Request) {
	var req adapterRequest
	if err := read(w, r, &req); err != nil {
		fail(w, err)
		return
	}
	if req.Name == "" || req.Path == "" {
		fail(w, badRequest("", "Both 'lora_name' and 'lora_path' must be provided."))
		return
	}
	e.mu.Lock()
	_, exists := e.adapters[req.Name]
	e.mu.Unlock()
	if (exists && !req.Inplace) || req.Name == e.cfg.Model {
		fail(w, badRequest("", "The lora adapter '%s' has already been loaded.", req.Name))
		return
	}
	e.load(Adapter{req.Name, req.Path})
	fmt.Fprintf(w, "Success: LoRA adapter '%s' added successfully.", req.Name)
}

func (e *Engine) unloadAdapter(w http.ResponseWriter, r *http.Request) {
	var req adapterRequest
	if err := read(w, r, &req); err != nil {
		fail(w, err)
		return
	}
	e.mu.Lock()
	_, exists := e.adapters[req.Name]
	delete(e.adapters, req.Name)
	e.mu.Unlock()
	if !exists {
		fail(w, &apiError{http.StatusNotFound, "NotFoundError", "", fmt.Sprintf("The lora adapter '%s' cannot be found.", req.Name)})
		return
	}
	fmt.Fprintf(w, "Success: LoRA adapter '%s' removed successfully.", req.Name)
}

func (e *Engine) tokenize(w http.ResponseWriter, r *http.Request) {
	var req struct {
		Model    string       `json:"model"`
		Prompt   *string      `json:"prompt"`
		Messages chatMessages `json:"messages"`
		Generate *bool        `json:"add_generation_prompt"`
		Strings  bool         `json:"return_token_strs"`
	}
	if err := read(w, r, &req); err != nil {
		fail(w, err)
		return
	}
	if _, err := e.resolve(req.Model); err != nil {
		fail(w, err)
		return
	}
	tokens := []uint32{}
	switch {
	case req.Prompt != nil:
		tokens = appendText(tokens, *req.Prompt)
	case req.Messages != nil:
		tokens = appendChat(tokens, req.Messages, req.Generate == nil || *req.Generate)
	default:
		fail(w, badRequest("prompt", "neither prompt nor messages"))
		return
	}
	var list []string
	if req.Strings {
		for _, t := range tokens {
			list = append(list, text([]uint32{t}))
		}
	}
	answer(w, map[string]any{
		"count": len(tokens), "max_model_len": e.cfg.MaxModelLen, "tokens": tokens, "token_strs": list,
	})
}

func (e *Engine) detokenize(w http.ResponseWriter, r *http.Request) {
	var req struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := read(w, r, &req); err != nil {
		fail(w, err)
		return
	}
	answer(w, map[string]string{"prompt": text(req.Tokens)})
}
