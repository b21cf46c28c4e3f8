// Package kubeapi stands in for Kubernetes' API server where a test needs the
// little of it that the webhook asks for: the version, a Secret with optimistic
// locking, a MutatingWebhookConfiguration with JSON Patch, and a token that is
// checked. Nothing else of Kubernetes is in it.
package kubeapi

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Namespace, and the names of the objects that are there.
const (
	Namespace     = "kvscout"
	Secret        = "kvscout-webhook"
	Configuration = "kvscout"
	token         = "token-of-the-pod"
)

// Server is the API server.
type Server struct {
	URL string
	// Folder is that of a service account.
	Folder string

	mu      sync.Mutex
	minor   string
	down    bool
	data    map[string][]byte // of the Secret
	version int
	bundles [2]string // of the configuration's webhooks, base64
	counts  map[string]int
}

// New starts a server of Kubernetes 1.minor for the time of a test.
func New(t testing.TB, minor string) *Server {
	t.Helper()
	s := &Server{minor: minor, data: make(map[string][]byte), version: 1, counts: make(map[string]int)}
	server := httptest.NewTLSServer(http.HandlerFunc(s.serve))
	t.Cleanup(server.Close)
	s.URL, s.Folder = server.URL, t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	for name, text := range map[string][]byte{"token": []byte(token + "\n"), "namespace": []byte(Namespace), "ca.crt": ca} {
		if err := os.WriteFile(filepath.Join(s.Folder, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// Down makes the server answer 503, or serve again.
func (s *Server) Down(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
}

// SetData replaces what the Secret holds.
func (s *Server) SetData(key string, value []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.data[key] = value
	s.version++
}

// Data is what the Secret holds.
func (s *Server) Data(key string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.data[key]
}

// Bundle is what the ith webhook of the configuration trusts, as PEM.
func (s *Server) Bundle(i int) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, _ := base64.StdEncoding.DecodeString(s.bundles[i])
	return text
}

// Count of requests by method.
func (s *Server) Count(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[method]
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[r.Method]++
	fail := func(code int, message string) {
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "message": message})
	}
	body, err := io.ReadAll(r.Body)
	switch path := strings.TrimPrefix(r.URL.Path, "/"); {
	case err != nil:
		fail(http.StatusBadRequest, err.Error())
	case s.down:
		fail(http.StatusServiceUnavailable, "down")
	case r.Header.Get("Authorization") != "Bearer "+token:
		fail(http.StatusUnauthorized, "Unauthorized")
	case r.Method == http.MethodGet && path == "version":
		_ = json.NewEncoder(w).Encode(map[string]string{"major": "1", "minor": s.minor})
	case path == "api/v1/namespaces/"+Namespace+"/secrets/"+Secret:
		s.secret(w, r, body, fail)
	case path == "apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/"+Configuration:
		s.configuration(w, r, body, fail)
	default:
		fail(http.StatusForbidden, r.Method+" "+path+" is forbidden")
	}
}

func (s *Server) secret(w http.ResponseWriter, r *http.Request, body []byte, fail func(int, string)) {
	if r.Method == http.MethodPut {
		var in struct {
			APIVersion, Kind string
			Metadata         struct{ Name, ResourceVersion string }
			Data             map[string][]byte
		}
		if err := json.Unmarshal(body, &in); err != nil || in.APIVersion != "v1" || in.Kind != "Secret" || in.Metadata.Name != Secret {
			fail(http.StatusBadRequest, fmt.Sprintf("%v in %s", err, body))
			return
		}
		if in.Metadata.ResourceVersion != strconv.Itoa(s.version) {
			fail(http.StatusConflict, "the object has been modified")
			return
		}
		s.data = in.Data
		s.version++
	} else if r.Method != http.MethodGet {
		fail(http.StatusMethodNotAllowed, r.Method)
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": s.data,
		"metadata": map[string]any{"name": Secret, "namespace": Namespace, "resourceVersion": strconv.Itoa(s.version)},
	})
}

func (s *Server) configuration(w http.ResponseWriter, r *http.Request, body []byte, fail func(int, string)) {
	name := func(i int) string { return fmt.Sprintf("w%d.kvscout.io", i) }
	switch r.Method {
	case http.MethodGet:
	case http.MethodPatch:
		var patch []struct{ Op, Path, Value string }
		if err := json.Unmarshal(body, &patch); err != nil || r.Header.Get("Content-Type") != "application/json-patch+json" {
			fail(http.StatusBadRequest, fmt.Sprintf("%v in %s", err, body))
			return
		}
		bundles := s.bundles
		for _, p := range patch {
			var i int
			var field string
			_, _ = fmt.Sscanf(strings.ReplaceAll(p.Path, "/", " "), " webhooks %d %s", &i, &field)
			switch {
			case i < 0 || i >= len(bundles):
				fail(http.StatusUnprocessableEntity, p.Path)
				return
			case p.Op == "test" && p.Path == fmt.Sprintf("/webhooks/%d/name", i) && p.Value == name(i):
			case p.Op == "add" && p.Path == fmt.Sprintf("/webhooks/%d/clientConfig/caBundle", i):
				bundles[i] = p.Value
			default:
				fail(http.StatusUnprocessableEntity, p.Op+" "+p.Path)
				return
			}
		}
		s.bundles = bundles
	default:
		fail(http.StatusMethodNotAllowed, r.Method)
		return
	}
	var list []any
	for i, bundle := range s.bundles {
		client := map[string]any{"service": map[string]any{"name": "kvscout-webhook", "namespace": Namespace}}
		if bundle != "" {
			client["caBundle"] = bundle
		}
		list = append(list, map[string]any{"name": name(i), "clientConfig": client})
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"webhooks": list})
}
