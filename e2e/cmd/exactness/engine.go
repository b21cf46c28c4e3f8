package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/recording"
)

// engine stands in for the recorded engine: its event sockets, and of its HTTP
// side what an agent asks for.
type engine struct {
	rec        *recording.Recording
	publishers []*fakevllm.Publisher // by rank
	server     *http.Server
	address    string

	mu      sync.Mutex        // guards what follows
	down    bool              // the process is dead
	loras   map[string]string // adapter name -> folder
	metrics string            // as recorded
	resets  int               // of the prefix cache, asked for over HTTP
}

func newEngine(rec *recording.Recording) (*engine, error) {
	e := &engine{rec: rec, loras: map[string]string{}, metrics: firstMetrics(rec)}
	for name, root := range rec.Meta.LoraPaths {
		e.loras[name] = root
	}
	for _, name := range servedFromTheStart(rec) {
		if e.loras[name] == "" {
			e.loras[name] = name
		}
	}
	for range rec.Ranks() {
		p, err := fakevllm.NewPublisher(fakevllm.PublisherConfig{
			ReplayEndpoint:   "tcp://127.0.0.1:0",
			ThreeFrameReplay: before(rec.Meta.Version, 0, 26),
		})
		if err != nil {
			return nil, err
		}
		e.publishers = append(e.publishers, p)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	e.address = listener.Addr().String()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /version", e.version)
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("GET /kv_event_sources", e.sources)
	mux.HandleFunc("GET /metrics", e.page)
	mux.HandleFunc("GET /server_info", e.config)
	e.server = &http.Server{Handler: e.alive(mux)}
	go func() { _ = e.server.Serve(listener) }()
	return e, nil
}

// servedFromTheStart are the adapters that requests name and nothing loads.
func servedFromTheStart(rec *recording.Recording) (names []string) {
	loaded := map[string]bool{rec.Meta.ServedName: true, "": true}
	for _, s := range rec.Steps {
		if m := load.FindStringSubmatch(s.Action); m != nil {
			loaded[m[1]] = true
		}
		if s.Send != nil && !loaded[s.Send.Adapter] {
			loaded[s.Send.Adapter] = true
			names = append(names, s.Send.Adapter)
		}
	}
	return names
}

// alive drops the connection while the engine is dead.
func (e *engine) alive(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		down := e.down
		e.mu.Unlock()
		if down {
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
}

func (e *engine) version(w http.ResponseWriter, _ *http.Request) {
	reply(w, map[string]string{"version": e.rec.Meta.Version})
}

func (e *engine) models(w http.ResponseWriter, _ *http.Request) {
	name := e.rec.Meta.ServedName
	data := []map[string]any{{"id": name, "object": "model", "root": name, "parent": nil}}
	e.mu.Lock()
	for adapter, root := range e.loras {
		data = append(data, map[string]any{"id": adapter, "object": "model", "root": root, "parent": name})
	}
	e.mu.Unlock()
	reply(w, map[string]any{"object": "list", "data": data})
}

func (e *engine) sources(w http.ResponseWriter, _ *http.Request) {
	sources := map[string]any{}
	for rank, p := range e.publishers {
		sources[fmt.Sprint(rank)] = map[string]any{
			"enable_kv_cache_events": true, "publisher": "zmq", "topic": "",
			"endpoint": p.Endpoint(), "replay_endpoint": p.ReplayEndpoint(),
		}
	}
	reply(w, sources)
}

func (e *engine) page(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	fmt.Fprint(w, e.metrics)
	fmt.Fprintf(w, "http_requests_total{handler=\"/%s\",method=\"POST\",status=\"2xx\"} %d\n", reset, e.resets)
}

// config says what a recording tells of the engine's configuration, as an
// engine in development mode does.
func (e *engine) config(w http.ResponseWriter, _ *http.Request) {
	model, config := map[string]any{}, map[string]any{}
	config["model_config"] = model
	if chunk := e.rec.Meta.Rule.Chunk; chunk > 0 {
		model["hf_config"] = fmt.Sprintf("Config {\n  \"attention_chunk_size\": %d\n}", chunk)
	}
	method := speculative.FindStringSubmatch(e.rec.Meta.Args + e.rec.Meta.Options)
	switch {
	case method != nil:
		config["speculative_config"] = map[string]any{"method": method[1]}
	case len(e.rec.Meta.Rule.Drops) > 0:
		config["speculative_config"] = map[string]any{"method": "eagle"}
	}
	reply(w, map[string]any{"vllm_config": config})
}

var speculative = regexp.MustCompile(`"method":\s*"([a-z0-9_]+)"`)

func reply(w http.ResponseWriter, answer any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

var (
	unload = regexp.MustCompile(`^unload (\S+)`)
	load   = regexp.MustCompile(`^load (\S+)(?: from the folder of (\S+))?`)
)

// reset is the action that empties the prefix cache.
const reset = "reset_prefix_cache"

// act repeats what was done to the recorded engine, as far as an agent can see it.
func (e *engine) act(action string) (restarted bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case strings.HasPrefix(action, "restart"):
		e.down = true
		for _, p := range e.publishers {
			p.Restart()
		}
		return true
	case unload.MatchString(action):
		delete(e.loras, unload.FindStringSubmatch(action)[1])
	case load.MatchString(action):
		m := load.FindStringSubmatch(action)
		root := m[2]
		if known, ok := e.rec.Meta.LoraPaths[root]; ok {
			root = known
		}
		if root == "" {
			root = e.rec.Meta.LoraPaths[m[1]]
		}
		e.loras[m[1]] = root
	}
	return false
}

// emptied counts a request to empty the prefix cache, as the HTTP server of the
// recorded engine did: the pages that were recorded leave its series out.
func (e *engine) emptied() {
	e.mu.Lock()
	e.resets++
	e.mu.Unlock()
}

// up ends a restart.
func (e *engine) up() {
	e.mu.Lock()
	e.down = false
	e.mu.Unlock()
}

func (e *engine) setMetrics(page string) {
	e.mu.Lock()
	e.metrics = complete(e.rec, page)
	e.mu.Unlock()
}

// adapters served now.
func (e *engine) adapters() map[string]bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	names := map[string]bool{}
	for name := range e.loras {
		names[name] = true
	}
	return names
}

// firstMetrics gives the first recorded page, or the little that an agent
// needs when none was recorded.
func firstMetrics(rec *recording.Recording) string {
	for _, s := range rec.Steps {
		if s.Metrics != "" {
			return complete(rec, s.Metrics)
		}
	}
	return complete(rec, "")
}

// complete ends the page as a server does, and adds the one series that an
// agent cannot do without where the recorded page was cut.
func complete(rec *recording.Recording, page string) string {
	var whole strings.Builder
	whole.WriteString(strings.TrimRight(page, "\n") + "\n")
	if strings.Contains(page, "vllm:cache_config_info{") {
		return whole.String()
	}
	for rank := range rec.Ranks() {
		fmt.Fprintf(&whole, "vllm:cache_config_info{block_size=\"%d\",num_gpu_blocks=\"%d\",prefix_caching_hash_algo=%q,prefix_match_unit=\"%d\",enable_prefix_caching=\"True\",engine=\"%d\"} 1.0\n",
			rec.Meta.BlockSize, rec.Meta.Blocks, rec.Meta.Algorithm, rec.Meta.Rule.Unit, rank)
	}
	return whole.String()
}

// before compares the first two numbers of a version.
func before(version string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(version, "%d.%d", &a, &b); n < 2 {
		return false
	}
	return a < major || a == major && b < minor
}
