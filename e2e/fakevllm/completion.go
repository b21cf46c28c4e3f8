package fakevllm

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// maxChoices bounds n.
const maxChoices = 1024

// openaiRequest is what counts of a completion or a chat completion. Sampling
// options change nothing here and are ignored.
type openaiRequest struct {
	Model         string       `json:"model"`
	Prompt        prompts      `json:"prompt"`
	Messages      chatMessages `json:"messages"`
	Generate      *bool        `json:"add_generation_prompt"`
	MaxTokens     *int         `json:"max_tokens"`
	MaxCompletion *int         `json:"max_completion_tokens"`
	IgnoreEOS     bool         `json:"ignore_eos"`
	N             *int         `json:"n"`
	Stream        bool         `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Salt     string `json:"cache_salt"`
	Priority int64  `json:"priority"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	TotalTokens      int `json:"total_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	// Details are null without --enable-prompt-tokens-details.
	Details *usageDetails `json:"prompt_tokens_details"`
}

type usageDetails struct {
	CachedTokens  int `json:"cached_tokens"`
	CreatedTokens int `json:"created_cache_tokens"`
}

// resolve finds the adapter that a model name means, if it is not the model's.
func (e *Engine) resolve(model string) (loaded, error) {
	if model == "" || model == e.cfg.Model {
		return loaded{}, nil
	}
	e.mu.Lock()
	a, ok := e.adapters[model]
	e.mu.Unlock()
	if !ok {
		return loaded{}, &apiError{http.StatusNotFound, "NotFoundError", "model",
			fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", model, e.cfg.Model)}
	}
	return a, nil
}

// prompts checks a request and returns its prompts as tokens, and how many
// tokens to generate at most.
func (e *Engine) prompts(req *openaiRequest, chat bool) (list prompts, limit int, err error) {
	list = req.Prompt
	if chat {
		if len(req.Messages) == 0 {
			return nil, 0, badRequest("messages", "messages is empty")
		}
		list = prompts{appendChat(nil, req.Messages, req.Generate == nil || *req.Generate)}
	}
	if len(list) == 0 {
		return nil, 0, badRequest("prompt", "prompt is missing")
	}
	if n := req.N; n != nil && (*n < 1 || *n > maxChoices) {
		return nil, 0, badRequest("n", "n must be 1 to %d, got %d.", maxChoices, *n)
	}
	longest := 0
	for _, tokens := range list {
		if len(tokens) == 0 {
			return nil, 0, badRequest("prompt", "The decoder prompt cannot be empty")
		}
		longest = max(longest, len(tokens))
		for _, t := range tokens {
			if t >= vocabulary {
				return nil, 0, badRequest("prompt", "Token id %d is out of vocabulary", t)
			}
		}
	}
	room := e.cfg.MaxModelLen - longest
	if room < 1 {
		return nil, 0, badRequest("prompt", "This model's maximum context length is %d tokens. However, your prompt has %d.", e.cfg.MaxModelLen, longest)
	}
	limit = room
	if !chat {
		limit = min(16, room)
	}
	if req.MaxTokens != nil {
		limit = *req.MaxTokens
	}
	if chat && req.MaxCompletion != nil {
		limit = *req.MaxCompletion
	}
	if limit < 1 {
		return nil, 0, badRequest("max_tokens", "max_tokens must be at least 1, got %d.", limit)
	}
	if limit > room {
		return nil, 0, badRequest("max_tokens", "max_tokens %d and a prompt of %d exceed the context length %d.", limit, longest, e.cfg.MaxModelLen)
	}
	return list, limit, nil
}

// place chooses the rank: the one that the header names, else the least busy.
func (e *Engine) place(r *http.Request) (*rank, error) {
	if v := r.Header.Get("X-data-parallel-rank"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 || n >= len(e.ranks) {
			return nil, badRequest("", "data_parallel_rank %q is out of range [0, %d).", v, len(e.ranks))
		}
		return e.ranks[n], nil
	}
	best, least := e.ranks[0], -1
	for _, r := range e.ranks {
		r.mu.Lock()
		load := 4*(len(r.waiting)+len(r.incoming)) + len(r.running)
		r.mu.Unlock()
		if least < 0 || load < least {
			best, least = r, load
		}
	}
	return best, nil
}

// generation is one HTTP request inside the engine: n sequences for each prompt.
type generation struct {
	id      string
	chat    bool
	model   string
	created int64
	rank    *rank
	list    []*sequence
	n       int
	wake    chan struct{}
}

func (e *Engine) serve(chat bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		e.requests.Add(1)
		defer e.requests.Done()
		var req openaiRequest
		if err := read(w, r, &req); err != nil {
			fail(w, err)
			return
		}
		g, err := e.generation(r, &req, chat)
		if err != nil {
			fail(w, err)
			return
		}
		e.track(1)
		defer e.track(-1)
		for _, s := range g.list {
			g.rank.add(s)
		}
		if req.Stream {
			g.stream(r.Context(), w, req.StreamOptions.IncludeUsage)
		} else {
			g.collect(r.Context(), w)
		}
	}
}

func (e *Engine) track(n int) {
	e.mu.Lock()
	e.inFlight += n
	e.mu.Unlock()
}

func (e *Engine) requestID(chat bool) string {
	e.mu.Lock()
	e.issued++
	n := e.issued
	e.mu.Unlock()
	if chat {
		return fmt.Sprintf("chatcmpl-%016x", n)
	}
	return fmt.Sprintf("cmpl-%016x", n)
}

func (e *Engine) generation(r *http.Request, req *openaiRequest, chat bool) (*generation, error) {
	adapter, err := e.resolve(req.Model)
	if err != nil {
		return nil, err
	}
	list, limit, err := e.prompts(req, chat)
	if err != nil {
		return nil, err
	}
	rank, err := e.place(r)
	if err != nil {
		return nil, err
	}
	g := &generation{
		id: e.requestID(chat), chat: chat, model: req.Model, created: time.Now().Unix(),
		rank: rank, n: 1, wake: make(chan struct{}, 1),
	}
	if g.model == "" {
		g.model = e.cfg.Model
	}
	every := e.cfg.StreamInterval
	if !req.Stream {
		every = limit + 1
	}
	if req.N != nil {
		g.n = *req.N
	}
	for i := range len(list) * g.n {
		tokens := slices.Clip(list[i/g.n])
		s := &sequence{
			scope:     scope{adapter: adapter.Name, path: adapter.Path, salt: req.Salt},
			adapterID: adapter.id,
			tokens:    tokens,
			prompt:    len(tokens),
			limit:     limit,
			ending:    "length",
			every:     every,
			wake:      g.wake,
		}
		if e.cfg.PriorityScheduling {
			s.order = req.Priority
		}
		if stop := 16 + len(tokens)%48; chat && req.MaxTokens == nil && req.MaxCompletion == nil && !req.IgnoreEOS && stop <= limit {
			s.limit, s.ending = stop, "stop" // what a model would find to say
		}
		g.list = append(g.list, s)
	}
	return g, nil
}

// usage counts over all prompts. Cached is known once a first token came.
func (g *generation) usage(completion int) usage {
	u := usage{CompletionTokens: completion, Details: new(usageDetails)}
	g.rank.mu.Lock()
	defer g.rank.mu.Unlock()
	for i := 0; i < len(g.list); i += g.n {
		s := g.list[i]
		size := g.rank.cfg.BlockSize
		cached := max(0, s.cached)
		u.PromptTokens += s.prompt
		u.Details.CachedTokens += cached
		u.Details.CreatedTokens += s.prompt/size*size - cached
	}
	u.TotalTokens = u.PromptTokens + completion
	if g.rank.cfg.NoPromptDetails {
		u.Details = nil
	}
	return u
}

// wait returns when a sequence has something to read; false when the client,
// or the engine, is gone.
func (g *generation) wait(ctx context.Context) bool {
	select {
	case <-g.wake:
		return true
	case <-ctx.Done():
		for _, s := range g.list {
			g.rank.cancel(s)
		}
		return false
	}
}

func (g *generation) collect(ctx context.Context, w http.ResponseWriter) {
	outputs := make([][]uint32, len(g.list))
	reasons := make([]string, len(g.list))
	for open := len(g.list); open > 0; {
		if !g.wait(ctx) {
			panic(http.ErrAbortHandler)
		}
		open = 0
		for i, s := range g.list {
			outputs[i], reasons[i] = s.read(outputs[i])
			if reasons[i] == "" {
				open++
			}
		}
	}
	if ctx.Err() != nil {
		panic(http.ErrAbortHandler)
	}
	completion := 0
	choices := make([]any, 0, len(g.list))
	for i := range g.list {
		completion += len(outputs[i])
		if g.chat {
			choices = append(choices, map[string]any{
				"index": i, "logprobs": nil, "finish_reason": reasons[i], "stop_reason": nil, "token_ids": nil,
				"message": map[string]any{"role": "assistant", "content": text(outputs[i]), "refusal": nil},
			})
			continue
		}
		choices = append(choices, map[string]any{
			"index": i, "text": text(outputs[i]), "logprobs": nil, "finish_reason": reasons[i], "stop_reason": nil, "token_ids": nil,
		})
	}
	object := "text_completion"
	if g.chat {
		object = "chat.completion"
	}
	answer(w, map[string]any{
		"id": g.id, "object": object, "created": g.created, "model": g.model, "choices": choices,
		"service_tier": nil, "system_fingerprint": nil, "usage": g.usage(completion), "kv_transfer_params": nil,
	})
}

// stream sends server-sent events: a chunk for what came since the last, the
// usage if asked for, and [DONE].
func (g *generation) stream(ctx context.Context, w http.ResponseWriter, withUsage bool) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	out := bufio.NewWriterSize(w, 1024)
	flush := http.NewResponseController(w)
	ended := make([]bool, len(g.list))
	begun := make([]bool, len(g.list))
	completion := 0
	var tokens []uint32
	for open := len(g.list); open > 0; {
		if !g.wait(ctx) {
			panic(http.ErrAbortHandler)
		}
		for i, s := range g.list {
			if ended[i] {
				continue
			}
			var reason string
			tokens, reason = s.read(tokens[:0])
			if len(tokens) == 0 && reason == "" {
				continue
			}
			if g.chat && !begun[i] {
				g.chunk(out, i, true, nil, "")
			}
			begun[i] = true
			completion += len(tokens)
			g.chunk(out, i, false, tokens, reason)
			if reason != "" {
				ended[i] = true
				open--
			}
		}
		if open > 0 && out.Flush() == nil {
			// A client that is gone shows in ctx.
			_ = flush.Flush()
		}
	}
	if ctx.Err() != nil {
		panic(http.ErrAbortHandler)
	}
	if withUsage {
		b, _ := json.Marshal(g.usage(completion))
		g.open(out)
		fmt.Fprintf(out, `[],"usage":%s,"system_fingerprint":null}`+"\n\n", b)
	}
	_, _ = out.WriteString("data: [DONE]\n\n")
	_ = out.Flush()
}

// open writes a chunk up to its choices.
func (g *generation) open(out *bufio.Writer) {
	object := "text_completion"
	if g.chat {
		object = "chat.completion.chunk"
	}
	model, _ := json.Marshal(g.model)
	fmt.Fprintf(out, `data: {"id":%q,"object":%q,"created":%d,"model":%s,"choices":`, g.id, object, g.created, model)
}

func (g *generation) chunk(out *bufio.Writer, index int, role bool, tokens []uint32, reason string) {
	g.open(out)
	content, _ := json.Marshal(text(tokens))
	switch {
	case role:
		fmt.Fprintf(out, `[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`, index)
	case g.chat:
		fmt.Fprintf(out, `[{"index":%d,"delta":{"content":%s},"logprobs":null,%s,"token_ids":null}]`, index, content, ending(reason))
	default:
		fmt.Fprintf(out, `[{"index":%d,"text":%s,"logprobs":null,%s,"token_ids":null}]`, index, content, ending(reason))
	}
	_, _ = out.WriteString("}\n\n")
}

func ending(reason string) string {
	if reason == "" {
		return `"finish_reason":null,"stop_reason":null`
	}
	return `"finish_reason":"` + reason + `","stop_reason":null`
}

// render answers what a request would send into the engine.
func (e *Engine) render(chat bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !e.cfg.ScaleOut {
			fail(w, &apiError{http.StatusForbidden, "PermissionDeniedError", "",
				"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."})
			return
		}
		var req openaiRequest
		if err := read(w, r, &req); err != nil {
			fail(w, err)
			return
		}
		if _, err := e.resolve(req.Model); err != nil {
			fail(w, err)
			return
		}
		list, limit, err := e.prompts(&req, chat)
		if err != nil {
			fail(w, err)
			return
		}
		var salt *string
		if req.Salt != "" {
			salt = &req.Salt
		}
		if req.Model == "" {
			req.Model = e.cfg.Model
		}
		out := make([]any, 0, len(list))
		for _, tokens := range list {
			out = append(out, map[string]any{
				"request_id": e.requestID(chat), "token_ids": tokens, "features": nil,
				"sampling_params": map[string]any{"max_tokens": limit}, "model": req.Model, "stream": req.Stream,
				"stream_options": nil, "cache_salt": salt, "priority": req.Priority, "kv_transfer_params": nil,
			})
		}
		if chat {
			answer(w, out[0])
			return
		}
		answer(w, out)
	}
}
