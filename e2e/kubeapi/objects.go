package kubeapi

import (
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
	"time"
)

// Object is one of Kubernetes', as JSON has it.
type Object = map[string]any

// Objects stands in for the API server where objects are listed, watched and
// patched. Of selectors it knows fields that equal a value. What is deleted or no
// longer selected leaves a watch by DELETED, as there.
type Objects struct {
	URL string
	// Folder is that of a service account.
	Folder string
	// Review answers a TokenReview: what stands in its status. Set before the first
	// request.
	Review func(token string, audiences []string) Object

	server *httptest.Server

	mu        sync.Mutex // guards what follows
	version   int
	forgotten int // versions up to it are
	objects   map[string]Object
	history   []change
	news      chan struct{} // closed by the next change
	down      bool
	forbidden map[string]bool
	counts    map[string]int // requests by verb and resource
	patches   []Object
}

// change of an object; was or is may be nil.
type change struct {
	version  int
	resource string
	was, is  Object
}

// NewObjects starts a server for the time of a test.
func NewObjects(t testing.TB) *Objects {
	t.Helper()
	s := &Objects{version: 1, objects: make(map[string]Object), news: make(chan struct{}), forbidden: make(map[string]bool), counts: make(map[string]int), Folder: t.TempDir()}
	s.server = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	s.server.EnableHTTP2 = true
	s.server.StartTLS()
	t.Cleanup(func() { s.server.CloseClientConnections(); s.server.Close() })
	s.URL = s.server.URL
	ca := CA(s.server)
	for name, text := range map[string][]byte{"token": []byte(token + "\n"), "namespace": []byte(Namespace), "ca.crt": ca} {
		if err := os.WriteFile(filepath.Join(s.Folder, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// Pod is one that serves.
func Pod(namespace, name, uid, ip, node string) Object {
	return Object{
		"metadata": Object{"namespace": namespace, "name": name, "uid": uid},
		"spec":     Object{"nodeName": node},
		"status": Object{"phase": "Running", "podIP": ip, "podIPs": []any{Object{"ip": ip}},
			"conditions": []any{Object{"type": "Ready", "status": "True"}}},
	}
}

func at(o Object, path ...string) any {
	var v any = o
	for _, key := range path {
		m, _ := v.(Object)
		v = m[key]
	}
	return v
}

func keyOf(resource string, o Object) string {
	return fmt.Sprint(resource, "/", at(o, "metadata", "namespace"), "/", at(o, "metadata", "name"))
}

// clone is a deep copy, as JSON has it.
func clone(o Object) (c Object) {
	text, _ := json.Marshal(o)
	_ = json.Unmarshal(text, &c)
	return c
}

// Put creates or replaces an object of a resource, like pods.
func (s *Objects) Put(resource string, o Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o = clone(o)
	key := keyOf(resource, o)
	s.changeLocked(resource, s.objects[key], o)
	s.objects[key] = o
}

// Change an object that is there.
func (s *Objects) Change(resource, namespace, name string, edit func(Object)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := fmt.Sprint(resource, "/", namespace, "/", name)
	if namespace == "" {
		key = fmt.Sprint(resource, "/<nil>/", name)
	}
	was := s.objects[key]
	is := clone(was)
	edit(is)
	s.changeLocked(resource, was, is)
	s.objects[key] = is
}

// Delete an object.
func (s *Objects) Delete(resource, namespace, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := fmt.Sprint(resource, "/", namespace, "/", name)
	if was := s.objects[key]; was != nil {
		s.changeLocked(resource, was, nil)
		delete(s.objects, key)
	}
}

func (s *Objects) changeLocked(resource string, was, is Object) {
	s.version++
	if is != nil {
		is["metadata"].(Object)["resourceVersion"] = strconv.Itoa(s.version)
	}
	s.history = append(s.history, change{s.version, resource, was, is})
	close(s.news)
	s.news = make(chan struct{})
}

// Down cuts all connections and makes the server answer 503, or serve again.
func (s *Objects) Down(down bool) {
	s.mu.Lock()
	s.down = down
	s.mu.Unlock()
	if down {
		s.server.CloseClientConnections()
	}
}

// Forget all history: watches from before get 410.
func (s *Objects) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgotten, s.history = s.version, nil
}

// Forbid a verb, in lower case, on a resource, like "list nodes", or allow it.
func (s *Objects) Forbid(what string, forbid bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forbidden[what] = forbid
}

// Count of requests, like "list pods".
func (s *Objects) Count(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[what]
}

// Patches that came, with the path of each as its field "path".
func (s *Objects) Patches() []Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Object(nil), s.patches...)
}

// selects tells whether an object is one of a request's.
func selects(r *http.Request, namespace string, o Object) bool {
	if o == nil || namespace != "" && at(o, "metadata", "namespace") != namespace {
		return false
	}
	for part := range strings.SplitSeq(r.URL.Query().Get("fieldSelector"), ",") {
		if field, value, is := strings.Cut(part, "="); is && fmt.Sprint(at(o, strings.Split(field, ".")...)) != value {
			return false
		}
	}
	return true
}

func (s *Objects) serve(w http.ResponseWriter, r *http.Request) {
	fail := func(code int, message string) {
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(Object{"kind": "Status", "code": code, "message": message})
	}
	// /api/v1/namespaces/prod/pods/a or /apis/group/v1/things
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	skip := 2
	if parts[0] == "apis" {
		skip = 3
	}
	parts = parts[min(skip, len(parts)):]
	namespace, resource, name := "", "", ""
	if len(parts) > 2 && parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	if len(parts) > 0 {
		resource = parts[0]
	}
	if len(parts) > 1 {
		name = parts[1]
	}
	verb := strings.ToLower(r.Method)
	switch {
	case r.URL.Query().Get("watch") == "true":
		verb = "watch"
	case verb == "get" && name == "":
		verb = "list"
	}
	body, err := io.ReadAll(r.Body)
	s.mu.Lock()
	s.counts[verb+" "+resource]++
	down, forbidden := s.down, s.forbidden[verb+" "+resource]
	s.mu.Unlock()
	switch {
	case err != nil:
		fail(http.StatusBadRequest, err.Error())
	case down:
		fail(http.StatusServiceUnavailable, "down")
	case r.Header.Get("Authorization") != "Bearer "+token:
		fail(http.StatusUnauthorized, "Unauthorized")
	case forbidden:
		fail(http.StatusForbidden, fmt.Sprintf("%s is forbidden: cannot %s resource", resource, verb))
	case verb == "watch":
		s.watch(w, r, resource, namespace, fail)
	case verb == "list":
		s.list(w, r, resource, namespace)
	case verb == "get":
		s.mu.Lock()
		o := clone(s.objects[resource+"/"+namespace+"/"+name])
		s.mu.Unlock()
		if o == nil {
			fail(http.StatusNotFound, resource+" "+name+" not found")
			return
		}
		_ = json.NewEncoder(w).Encode(o)
	case verb == "patch":
		s.patch(w, r, resource, namespace, name, body, fail)
	case verb == "post" && resource == "tokenreviews" && s.Review != nil:
		var in struct {
			APIVersion, Kind string
			Spec             struct {
				Token     string
				Audiences []string
			}
		}
		if err := json.Unmarshal(body, &in); err != nil || in.APIVersion != "authentication.k8s.io/v1" || in.Kind != "TokenReview" {
			fail(http.StatusBadRequest, fmt.Sprintf("%v in %s", err, body))
			return
		}
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(Object{"status": s.Review(in.Spec.Token, in.Spec.Audiences)})
	default:
		fail(http.StatusMethodNotAllowed, r.Method)
	}
}

func (s *Objects) list(w http.ResponseWriter, r *http.Request, resource, namespace string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	items := []Object{}
	for key, o := range s.objects {
		if strings.HasPrefix(key, resource+"/") && selects(r, namespace, o) {
			items = append(items, o)
		}
	}
	_ = json.NewEncoder(w).Encode(Object{"metadata": Object{"resourceVersion": strconv.Itoa(s.version)}, "items": items})
}

func (s *Objects) watch(w http.ResponseWriter, r *http.Request, resource, namespace string, fail func(int, string)) {
	version, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	seconds, e := strconv.Atoi(r.URL.Query().Get("timeoutSeconds"))
	if err != nil || e != nil {
		fail(http.StatusBadRequest, "want numbers")
		return
	}
	end := time.After(time.Duration(seconds) * time.Second)
	w.WriteHeader(http.StatusOK)
	out := json.NewEncoder(w)
	for {
		_ = http.NewResponseController(w).Flush()
		s.mu.Lock()
		news, old := s.news, version < s.forgotten
		var events []Object
		for _, c := range s.history {
			if c.version <= version || c.resource != resource {
				continue
			}
			was, is := selects(r, namespace, c.was), selects(r, namespace, c.is)
			switch {
			case is && was:
				events = append(events, Object{"type": "MODIFIED", "object": clone(c.is)})
			case is:
				events = append(events, Object{"type": "ADDED", "object": clone(c.is)})
			case was:
				gone := clone(c.was)
				gone["metadata"].(Object)["resourceVersion"] = strconv.Itoa(c.version)
				events = append(events, Object{"type": "DELETED", "object": gone})
			}
		}
		if !old {
			version = s.version
			events = append(events, Object{"type": "BOOKMARK", "object": Object{"metadata": Object{"resourceVersion": strconv.Itoa(version)}}})
		}
		s.mu.Unlock()
		if old {
			_ = out.Encode(Object{"type": "ERROR", "object": Object{"kind": "Status", "code": http.StatusGone, "message": "too old resource version"}})
			return
		}
		for _, e := range events {
			if out.Encode(e) != nil {
				return
			}
		}
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-end:
			return
		case <-news:
		}
	}
}

func (s *Objects) patch(w http.ResponseWriter, r *http.Request, resource, namespace, name string, body []byte, fail func(int, string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := resource + "/" + namespace + "/" + name
	was := s.objects[key]
	var patch Object
	switch err := json.Unmarshal(body, &patch); {
	case err != nil || r.Header.Get("Content-Type") != "application/merge-patch+json":
		fail(http.StatusBadRequest, fmt.Sprintf("%v in %s", err, body))
	case was == nil:
		fail(http.StatusNotFound, resource+" "+name+" not found")
	default:
		if uid := at(patch, "metadata", "uid"); uid != nil && uid != at(was, "metadata", "uid") {
			fail(http.StatusConflict, "the UID in the precondition does not match")
			return
		}
		is := clone(was)
		merge(is, patch)
		s.changeLocked(resource, was, is)
		s.objects[key] = is
		patch["path"] = r.URL.Path
		s.patches = append(s.patches, patch)
		_ = json.NewEncoder(w).Encode(is)
	}
}

// merge applies a JSON merge patch.
func merge(to, patch Object) {
	for k, v := range patch {
		inner, is := v.(Object)
		switch {
		case v == nil:
			delete(to, k)
		case is:
			old, _ := to[k].(Object)
			if old == nil {
				old = make(Object)
			}
			merge(old, inner)
			to[k] = old
		default:
			to[k] = v
		}
	}
}

// CA is the certificate of a server, as PEM.
func CA(s *httptest.Server) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}
