package vllm

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// serve answers paths with texts, everything else with 404.
func serve(t *testing.T, pages map[string]string) *Engine {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page, ok := pages[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if page == "locked" && r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = w.Write([]byte(page))
	}))
	t.Cleanup(s.Close)
	e, err := NewEngine(EngineConfig{URL: s.URL, Key: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func TestModels(t *testing.T) {
	e := serve(t, map[string]string{"/version": `{"version":"0.32.0"}`, "/v1/models": `{"object":"list","data":[
		{"id":"llama","root":"/models/llama","parent":null,"max_model_len":4000},
		{"id":"llama-alias","root":"/models/llama","parent":null,"max_model_len":4000},
		{"id":"sql","root":"/adapters/sql","parent":"llama","max_model_len":null}]}`})
	m, err := e.Models(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := Models{Names: []string{"llama", "llama-alias"}, Root: "/models/llama", MaxModelLen: 4000, Adapters: []Adapter{{"sql", "/adapters/sql"}}}
	if diff := cmp.Diff(want, m); diff != "" {
		t.Error(diff)
	}
	if v, err := e.Version(t.Context()); v != "0.32.0" || err != nil {
		t.Errorf("version %q, %v", v, err)
	}
}

func TestModelsRefusesGarbage(t *testing.T) {
	for _, page := range []string{"", "[]", `{"data":[]}`, `{"data":[{"id":"x","parent":"y"}]}`, `{"data":5}`, "<html>", `{"data":[` + strings.Repeat(`{"id":"x"},`, maxModels) + `{}]}`} {
		if m, err := serve(t, map[string]string{"/v1/models": page}).Models(t.Context()); err == nil {
			t.Errorf("%.20q gave %+v", page, m)
		}
	}
	if _, err := serve(t, nil).Models(t.Context()); err == nil {
		t.Error("a missing page gave models")
	}
	if _, err := serve(t, map[string]string{"/metrics": strings.Repeat("x", maxPage+1)}).Metrics(t.Context()); err == nil {
		t.Error("an endless page was read")
	}
}

func TestSources(t *testing.T) {
	for _, c := range []struct {
		name, page string
		want       map[int]Source
		ok         bool
	}{
		{name: "before 0.31", ok: false},
		{name: "nothing published", page: `{}`, want: map[int]Source{}, ok: true},
		{name: "0.32", page: `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5732","replay_endpoint":"tcp://*:5832","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"}}`,
			want: map[int]Source{0: {Endpoint: "tcp://127.0.0.1:5732", Replay: "tcp://127.0.0.1:5832", Topic: "kv"}}, ok: true},
		{name: "ports of the system", page: `{"sources":{"0":{"endpoint":"tcp://10.0.0.1:41233","replay_endpoint":null},"1":{"endpoint":"tcp://10.0.0.1:41240","topic":"kv"}}}`,
			want: map[int]Source{0: {Endpoint: "tcp://10.0.0.1:41233"}, 1: {Endpoint: "tcp://10.0.0.1:41240", Topic: "kv"}}, ok: true},
		{name: "as configured for all ranks", page: `{"0":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"},"1":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}}`,
			want: map[int]Source{0: {Endpoint: "tcp://127.0.0.1:5557", Replay: "tcp://127.0.0.1:5657"}, 1: {Endpoint: "tcp://127.0.0.1:5558", Replay: "tcp://127.0.0.1:5658"}}, ok: true},
		{name: "off, and another publisher", page: `{"0":{"enable_kv_cache_events":false,"endpoint":"tcp://*:1"},"1":{"publisher":"null","endpoint":"tcp://*:1"}}`, want: map[int]Source{}, ok: true},
		{name: "out of reach", page: `{"0":{"endpoint":"inproc://kv"},"1":{"endpoint":"epgm://eth0;239.1.1.1:5557"},"2":{"endpoint":"tcp://"},"3":{"endpoint":"tcp://h:0"},"4":{"endpoint":"tcp://h:7","replay_endpoint":"inproc://r"}}`,
			want: map[int]Source{
				0: {Unusable: `endpoint "inproc://kv": transport "inproc" is not supported: want tcp or ipc`},
				1: {Unusable: `endpoint "epgm://eth0;239.1.1.1:5557": transport "epgm" is not supported: want tcp or ipc`},
				2: {Unusable: `endpoint "tcp://": want host:port, with an IPv6 address in brackets`},
				3: {Unusable: `endpoint "tcp://h:0" has no port`},
				4: {Endpoint: "tcp://h:7"},
			}, ok: true},
		{name: "a socket file for two ranks", page: `{"0":{"endpoint":"ipc://a"},"1":{"endpoint":"ipc://a"}}`,
			want: map[int]Source{0: {Endpoint: "ipc://a"}, 1: {Unusable: `endpoint "ipc://a" has no port to which rank 1 could be added`}}, ok: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			answers := map[string]string{}
			if c.page != "" {
				answers["/kv_event_sources"] = c.page
			}
			got, ok, err := serve(t, answers).Sources(t.Context())
			if err != nil || ok != c.ok {
				t.Fatalf("ok %v, %v", ok, err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	for _, page := range []string{"[]", `{"x":{}}`, `{"-1":{}}`, `{"0":5}`, `{"0":{"endpoint":7}}`, `{"70000":{}}`, "{"} {
		if got, said, err := serve(t, map[string]string{"/kv_event_sources": page}).Sources(t.Context()); err == nil || !said {
			t.Errorf("%s gave %+v, said %v", page, got, said)
		}
	}
}

func TestEngineKeyAndAddress(t *testing.T) {
	e := serve(t, map[string]string{"/metrics": "locked"})
	if _, err := e.Metrics(t.Context()); err == nil || strings.Contains(err.Error(), "401") {
		t.Errorf("with the key: %v", err)
	}
	for url, address := range map[string]string{"http://h": "h:80", "https://h/": "h:443", "http://[::1]:8000": "[::1]:8000"} {
		e, err := NewEngine(EngineConfig{URL: url})
		if err != nil || e.Address() != address {
			t.Errorf("%s: %v", url, err)
		}
	}
	for _, url := range []string{"", "localhost:8000", "ftp://x", "http://", "http://a b"} {
		if _, err := NewEngine(EngineConfig{URL: url}); err == nil {
			t.Errorf("%q was accepted", url)
		}
	}
}

func TestRankEndpoint(t *testing.T) {
	for _, c := range []struct {
		endpoint string
		rank     int
		want     string
	}{
		{"tcp://*:5557", 0, "tcp://*:5557"}, {"tcp://h:5557", 3, "tcp://h:5560"}, {"ipc:///tmp/x", 0, "ipc:///tmp/x"},
		{"ipc:///tmp/x", 1, ""}, {"tcp://h:65535", 1, ""}, {"nonsense", 1, ""},
	} {
		got, err := RankEndpoint(c.endpoint, c.rank)
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%s for %d: %q, %v", c.endpoint, c.rank, got, err)
		}
	}
}

// FuzzAnswers takes what an engine says of itself over HTTP.
func FuzzAnswers(f *testing.F) {
	for _, page := range []string{
		`{"data":[{"id":"m","root":"/m","parent":null,"max_model_len":10},{"id":"a","root":"/a","parent":"m"}]}`,
		`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","topic":""}}`,
		`{"sources":{"7":{"endpoint":"ipc:///tmp/x"},"1":{"endpoint":"tcp://[::]:1"}}}`,
	} {
		f.Add([]byte(page))
	}
	f.Fuzz(func(t *testing.T, page []byte) {
		if m, err := parseModels(page); err == nil && (len(m.Names) == 0 || m.MaxModelLen < 0 || len(m.Names)+len(m.Adapters) > maxModels) {
			t.Fatalf("%+v", m)
		}
		if sources, err := parseSources(page, "host"); err == nil && len(sources) > MaxRanks {
			t.Fatalf("%d ranks", len(sources))
		}
	})
}
