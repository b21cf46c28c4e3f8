package intake

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// exchange is one recorded request to a real engine with its answer.
type exchange struct {
	Path   string
	Body   any
	Status int
	Answer json.RawMessage
}

func recorded(t *testing.T, version string) []exchange {
	t.Helper()
	raw, err := os.ReadFile("testdata/http-" + version + ".json")
	if err != nil {
		t.Fatal(err)
	}
	var all []exchange
	if err := json.Unmarshal(raw, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// standIn is an engine that answers as told and notes what it was asked.
type standIn struct {
	*httptest.Server
	mu    sync.Mutex
	paths []string
	body  []byte // of the last request
}

func newStandIn(t *testing.T, answer func(path string, body []byte) (int, string)) *standIn {
	t.Helper()
	s := &standIn{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.mu.Lock()
		s.paths, s.body = append(s.paths, r.URL.Path), body
		s.mu.Unlock()
		status, text := answer(r.URL.Path, body)
		w.WriteHeader(status)
		io.WriteString(w, text)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *standIn) asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.paths...)
}

func (s *standIn) lastBody() map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	var m map[string]any
	json.Unmarshal(s.body, &m)
	return m
}

// replayed is an engine that gives the recorded answers: a request matches an
// exchange when the recorded fields that reach the tokens are equal.
func replayed(t *testing.T, version string) *standIn {
	all := recorded(t, version)
	relevant := func(body any) map[string]any {
		m, _ := body.(map[string]any)
		out := map[string]any{}
		for _, k := range []string{"model", "prompt", "messages", "cache_salt"} {
			if v, ok := m[k]; ok {
				out[k] = v
			}
		}
		return out
	}
	return newStandIn(t, func(path string, raw []byte) (int, string) {
		var body any
		json.Unmarshal(raw, &body)
		for _, e := range all {
			if e.Path == path && reflect.DeepEqual(relevant(e.Body), relevant(body)) {
				return e.Status, string(e.Answer)
			}
		}
		for _, e := range all {
			if e.Path == path && e.Status == http.StatusForbidden {
				return e.Status, string(e.Answer)
			}
		}
		return http.StatusBadRequest, `{"error":{"message":"not recorded","type":"BadRequestError"}}`
	})
}

func newIntake(t *testing.T, cfg Config, engines ...*standIn) *Intake {
	t.Helper()
	if cfg.Engines == nil {
		cfg.Engines = func(string) ([]string, error) {
			var urls []string
			for _, e := range engines {
				urls = append(urls, e.URL)
			}
			return urls, nil
		}
	}
	i := New(cfg)
	t.Cleanup(i.Close)
	return i
}

// idsOf undoes the wire form.
func idsOf(le []byte) []uint32 {
	var ids []uint32
	for ; len(le) >= 4; le = le[4:] {
		ids = append(ids, binary.LittleEndian.Uint32(le))
	}
	return ids
}

func TestRememberedEnginesAreBounded(t *testing.T) {
	e := engines{known: make(map[string]*engine)}
	for i := range 3 * maxEngines {
		e.learn(fmt.Sprintf("10.0.0.1:%d", i), tokenize, failed)
		if len(e.known) > maxEngines {
			t.Fatalf("%d engines are remembered", len(e.known))
		}
	}
}
