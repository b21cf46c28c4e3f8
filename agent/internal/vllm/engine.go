package vllm

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kvscout/kvscout/agent/internal/zmtp"
)

// Bounds of what is read from an engine's HTTP server.
const (
	maxPage   = 8 << 20
	maxModels = 4096
	// configWithin is the time for an engine's configuration: with it, it collects
	// what there is to know of its machine.
	configWithin = 30 * time.Second
)

// EngineConfig says where an engine's HTTP server is.
type EngineConfig struct {
	URL string // http://host:port
	Key string // API key of the engine; empty: none
	// TLS says whom to believe, where the URL begins with https; nil: the system's
	// authorities.
	TLS *tls.Config
	// Within is how long an answer may take; 0: 2 s.
	Within time.Duration
}

// Engine asks an engine's HTTP server.
type Engine struct {
	base *url.URL
	key  string
	http *http.Client
	slow *http.Client // the same connections, with more patience
}

// NewEngine checks the URL.
func NewEngine(cfg EngineConfig) (*Engine, error) {
	// The URL may hold a password: it is never quoted whole.
	base, err := url.Parse(cfg.URL)
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return nil, errors.New("engine URL: want http://host:port")
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute, TLSClientConfig: cfg.TLS}
	return &Engine{
		base: base, key: cfg.Key,
		http: &http.Client{Timeout: cmp.Or(cfg.Within, 2*time.Second), Transport: transport},
		slow: &http.Client{Timeout: configWithin, Transport: transport},
	}, nil
}

// Host is the engine's host name.
func (e *Engine) Host() string { return e.base.Hostname() }

// TLS tells whether the engine speaks it.
func (e *Engine) TLS() bool { return e.base.Scheme == "https" }

// Address is the engine's host and port.
func (e *Engine) Address() string {
	if e.base.Port() != "" {
		return e.base.Host
	}
	port := "80"
	if e.TLS() {
		port = "443"
	}
	return net.JoinHostPort(e.base.Hostname(), port)
}

// Close drops idle connections.
func (e *Engine) Close() { e.http.CloseIdleConnections() }

// errAbsent says that the engine has no such page.
var errAbsent = errors.New("no such page")

func (e *Engine) get(ctx context.Context, path string) ([]byte, error) {
	return e.getBy(ctx, e.http, path)
}

func (e *Engine) getBy(ctx context.Context, client *http.Client, path string) ([]byte, error) {
	path, query, _ := strings.Cut(path, "?")
	at := e.base.JoinPath(path)
	at.RawQuery = query
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return nil, err
	}
	if e.key != "" {
		req.Header.Set("Authorization", "Bearer "+e.key)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPage+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", path, err)
	case resp.StatusCode == http.StatusNotFound:
		return nil, errAbsent
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answered %s", path, resp.Status)
	case len(body) > maxPage:
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxPage)
	}
	return body, nil
}

func (e *Engine) getJSON(ctx context.Context, path string, v any) error {
	body, err := e.get(ctx, path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// Version of the engine.
func (e *Engine) Version(ctx context.Context) (string, error) {
	var v struct{ Version string }
	err := e.getJSON(ctx, "/version", &v)
	return v.Version, err
}

// Adapter is a LoRA adapter that an engine has loaded.
type Adapter struct{ Name, Root string }

// Models is what an engine serves.
type Models struct {
	Names       []string // of the base model; the first is its identity
	Root        string   // folder or repository of the base model
	MaxModelLen int      // 0: not said
	Adapters    []Adapter
}

// Models lists the base model's names and the adapters.
func (e *Engine) Models(ctx context.Context) (Models, error) {
	body, err := e.get(ctx, "/v1/models")
	if err != nil {
		return Models{}, err
	}
	m, err := parseModels(body)
	if err != nil {
		return Models{}, fmt.Errorf("read /v1/models: %w", err)
	}
	return m, nil
}

func parseModels(body []byte) (Models, error) {
	var list struct {
		Data []struct {
			ID          string
			Root        string
			Parent      *string
			MaxModelLen int `json:"max_model_len"`
		}
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return Models{}, err
	}
	if len(list.Data) > maxModels {
		return Models{}, fmt.Errorf("%d models, at most %d", len(list.Data), maxModels)
	}
	var m Models
	for _, d := range list.Data {
		switch {
		case d.ID == "":
		case d.Parent != nil:
			m.Adapters = append(m.Adapters, Adapter{Name: d.ID, Root: d.Root})
		default:
			if len(m.Names) == 0 {
				m.Root, m.MaxModelLen = d.Root, max(d.MaxModelLen, 0)
			}
			m.Names = append(m.Names, d.ID)
		}
	}
	if len(m.Names) == 0 {
		return Models{}, errors.New("no model is named")
	}
	return m, nil
}

// Source is where one rank publishes its events.
type Source struct {
	Endpoint string // empty: nowhere that could be listened to
	Replay   string // empty: none
	Topic    string
	// Unusable says why there is no Endpoint; empty: there is one.
	Unusable string
}

// Sources asks for the streams by rank. said is false when the engine cannot
// say or did not answer; an empty map means that it publishes nothing. With an
// error beside it, what was said has no meaning.
func (e *Engine) Sources(ctx context.Context) (sources map[int]Source, said bool, err error) {
	body, err := e.get(ctx, "/kv_event_sources")
	if errors.Is(err, errAbsent) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	sources, err = parseSources(body, e.Host())
	if err != nil {
		return nil, true, fmt.Errorf("read /kv_event_sources: %w", err)
	}
	return sources, true, nil
}

type sourceEntry struct {
	Enabled   *bool `json:"enable_kv_cache_events"`
	Publisher string
	Endpoint  string
	Replay    string `json:"replay_endpoint"`
	Topic     string
}

func parseSources(body []byte, host string) (map[int]Source, error) {
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(body, &entries); err != nil {
		return nil, err
	}
	if inner, ok := entries["sources"]; ok {
		entries = nil
		if err := json.Unmarshal(inner, &entries); err != nil {
			return nil, err
		}
	}
	sources := make(map[int]Source)
	for name, raw := range entries {
		rank, err := strconv.Atoi(name)
		if err != nil || rank < 0 || rank > maxRank {
			return nil, fmt.Errorf("rank %q", name)
		}
		var s sourceEntry
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, fmt.Errorf("rank %d: %w", rank, err)
		}
		if s.Enabled != nil && !*s.Enabled || s.Publisher != "" && s.Publisher != "zmq" || s.Endpoint == "" {
			continue
		}
		if len(sources) == MaxRanks {
			return nil, fmt.Errorf("more than %d ranks", MaxRanks)
		}
		sources[rank] = Source{Endpoint: s.Endpoint, Replay: s.Replay, Topic: s.Topic}
	}
	// An engine may repeat what was configured for rank 0.
	first, shared := sources[0]
	for rank, s := range sources {
		if rank > 0 && shared && s.Endpoint == first.Endpoint {
			s = s.ofRank(rank)
		}
		sources[rank] = s.onHost(host)
	}
	return sources, nil
}

// ofRank makes the source of a rank from that of rank 0.
func (s Source) ofRank(rank int) Source {
	endpoint, err := RankEndpoint(s.Endpoint, rank)
	if err != nil {
		return Source{Unusable: err.Error()}
	}
	s.Endpoint = endpoint
	if s.Replay, err = RankEndpoint(s.Replay, rank); err != nil {
		s.Replay = ""
	}
	return s
}

// onHost replaces wildcards by the engine's host, and gives up what nobody could
// connect to.
func (s Source) onHost(host string) Source {
	if s.Unusable != "" {
		return s
	}
	s.Endpoint, s.Replay = onHost(s.Endpoint, host), onHost(s.Replay, host)
	if err := CheckEndpoint(s.Endpoint, false); err != nil {
		return Source{Unusable: err.Error()}
	}
	if s.Replay != "" && CheckEndpoint(s.Replay, false) != nil {
		s.Replay = ""
	}
	return s
}

// onHost replaces a wildcard host by the engine's.
func onHost(endpoint, host string) string {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return endpoint
	}
	name, port, err := net.SplitHostPort(rest)
	if err != nil || name != "*" && name != "0.0.0.0" && name != "::" {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(host, port)
}

// CheckEndpoint says what is wrong with an endpoint to connect to or to listen on.
func CheckEndpoint(endpoint string, listen bool) error {
	e, err := zmtp.ParseEndpoint(endpoint)
	switch {
	case err != nil:
		return err
	case e.Network == "tcp" && e.Port == 0:
		return fmt.Errorf("endpoint %q has no port", endpoint)
	case e.Host == "*" && !listen:
		return fmt.Errorf("endpoint %q names no host to connect to", endpoint)
	}
	return nil
}

// ReplayBeside guesses a replay endpoint: on the given host, so many ports
// above the events. Empty: the events have no port.
func ReplayBeside(events, host string, above int) string {
	e, err := zmtp.ParseEndpoint(events)
	if err != nil || e.Network != "tcp" || e.Port+above > 65535 {
		return ""
	}
	e.Host, e.Port = host, e.Port+above
	return e.String()
}

// RankEndpoint gives the endpoint of a rank from that of rank 0: vLLM adds the
// rank to the port.
func RankEndpoint(endpoint string, rank int) (string, error) {
	if rank == 0 {
		return endpoint, nil
	}
	e, err := zmtp.ParseEndpoint(endpoint)
	if err != nil {
		return "", err
	}
	if e.Network != "tcp" || e.Port == 0 {
		return "", fmt.Errorf("endpoint %q has no port to which rank %d could be added", endpoint, rank)
	}
	if e.Port += rank; e.Port > 65535 {
		return "", fmt.Errorf("endpoint %q has no port for rank %d", endpoint, rank)
	}
	return e.String(), nil
}
