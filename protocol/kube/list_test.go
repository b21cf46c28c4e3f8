package kube_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/kubeapi"
	"github.com/kvscout/kvscout/protocol/kube"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// thing is what these tests read of an object.
type thing struct {
	Metadata struct{ Name, UID string }
	Status   struct{ Phase string }
}

// mirror is a list that is followed.
type mirror struct {
	mu     sync.Mutex
	things map[string]string // phase by name
	lists  int
	lost   []error
}

func (m *mirror) has(names ...string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Equal(slices.Sorted(maps.Keys(m.things)), names)
}

func (m *mirror) phase(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.things[name]
}

// follow a path for the time of a test.
func follow(t *testing.T, api *kubeapi.Objects, path string, selector url.Values) *mirror {
	t.Helper()
	m := &mirror{things: make(map[string]string)}
	locked := func(do func()) { m.mu.Lock(); defer m.mu.Unlock(); do() }
	client := kube.New(api.URL, api.Folder)
	list := kube.List[thing]{Client: client, Path: path, Selector: selector,
		All: func(all []thing) {
			locked(func() {
				m.lists++
				clear(m.things)
				for _, o := range all {
					m.things[o.Metadata.Name] = o.Status.Phase
				}
			})
		},
		Put:      func(o thing) { locked(func() { m.things[o.Metadata.Name] = o.Status.Phase }) },
		Gone:     func(o thing) { locked(func() { delete(m.things, o.Metadata.Name) }) },
		Lost:     func(err error) { locked(func() { m.lost = append(m.lost, err) }) },
		Followed: func() {},
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); list.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done; client.Close() })
	return m
}

func TestListFollowsChanges(t *testing.T) {
	api := kubeapi.NewObjects(t)
	api.Put("pods", kubeapi.Pod("prod", "a", "1", "10.0.0.1", "n"))
	api.Put("pods", kubeapi.Pod("dev", "x", "9", "10.0.0.9", "n"))
	m := follow(t, api, "/api/v1/namespaces/prod/pods", nil)
	await.True(t, "the list is there", func() bool { return m.has("a") })
	api.Put("pods", kubeapi.Pod("prod", "b", "2", "10.0.0.2", "n"))
	api.Put("pods", kubeapi.Pod("dev", "y", "8", "10.0.0.8", "n"))
	await.True(t, "one came", func() bool { return m.has("a", "b") })
	api.Change("pods", "prod", "a", func(o kubeapi.Object) { o["status"].(kubeapi.Object)["phase"] = "Failed" })
	api.Delete("pods", "prod", "b")
	await.True(t, "one went", func() bool { return m.has("a") && m.phase("a") == "Failed" })
}

// A server that was away is watched from where it was left, and one that has
// forgotten that place is listed anew: what went meanwhile is gone.
func TestListSurvivesItsServer(t *testing.T) {
	api := kubeapi.NewObjects(t)
	api.Put("pods", kubeapi.Pod("prod", "a", "1", "10.0.0.1", "n"))
	m := follow(t, api, "/api/v1/pods", nil)
	await.True(t, "the list is there", func() bool { return m.has("a") })
	api.Down(true)
	await.True(t, "that it is away is said", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return len(m.lost) > 0 })
	api.Put("pods", kubeapi.Pod("prod", "b", "2", "10.0.0.2", "n"))
	api.Down(false)
	await.True(t, "what came meanwhile is there", func() bool { return m.has("a", "b") })
	if m.mu.Lock(); m.lists != 1 {
		t.Errorf("listed %d times, want once: nothing was forgotten", m.lists)
	}
	m.mu.Unlock()
	api.Down(true)
	api.Delete("pods", "prod", "a")
	api.Forget()
	api.Down(false)
	await.True(t, "what went meanwhile is gone", func() bool { return m.has("b") })
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lists != 2 {
		t.Errorf("listed %d times, want twice", m.lists)
	}
}

func TestForbiddenListIsNotAskedAllTheTime(t *testing.T) {
	api := kubeapi.NewObjects(t)
	api.Forbid("list nodes", true)
	began := time.Now()
	m := follow(t, api, "/api/v1/nodes", url.Values{"fieldSelector": {"spec.unschedulable=true"}})
	await.True(t, "it is said", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return len(m.lost) > 0 })
	await.True(t, "it is asked again, later and later", func() bool { return api.Count("list nodes") == 5 })
	if lasted := time.Since(began); lasted < 750*time.Millisecond { // half of 100 + 200 + 400 + 800 ms
		t.Errorf("asked 5 times within %v", lasted)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.lost[0]; !kube.IsCode(err, http.StatusForbidden) || !strings.Contains(err.Error(), "cannot list resource") {
		t.Errorf("said: %v", err)
	}
}

// Long lists come in pages.
func TestListReadsPages(t *testing.T) {
	const each, pages = 3, 4
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		page := 0
		_, _ = fmt.Sscan(q.Get("continue"), &page)
		switch {
		case q.Get("watch") != "":
			<-r.Context().Done()
		case q.Get("limit") == "":
			http.Error(w, "no limit", http.StatusBadRequest)
		default:
			next := ""
			if page+1 < pages {
				next = fmt.Sprint(page + 1)
			}
			fmt.Fprintf(w, `{"metadata":{"resourceVersion":"7","continue":%q},"items":[`, next)
			for i := range each {
				fmt.Fprintf(w, `{"metadata":{"name":"p%d-%d"}},`, page, i)
			}
			fmt.Fprint(w, `{"metadata":{"name":"z"}}]}`)
		}
	}))
	t.Cleanup(server.Close) // behind the end of the list
	m := follow(t, &kubeapi.Objects{URL: server.URL, Folder: folder(t, server)}, "/api/v1/pods", nil)
	await.True(t, "all pages are there", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return len(m.things) == each*pages+1 })
}

// What a server sends that is no watch ends in an error and a pause, never in a
// panic or a loop without one.
func TestNonsenseIsAnError(t *testing.T) {
	for name, answer := range map[string]string{
		"no JSON":      "<html>\n",
		"no version":   `{"type":"ADDED","object":{"metadata":{"name":"a"}}}` + "\n",
		"wrong type":   `{"type":"ADDED","object":{"metadata":{"name":1,"resourceVersion":"8"}}}` + "\n",
		"an error":     `{"type":"ERROR","object":{"code":500,"message":"etcd"}}` + "\n",
		"over at once": "",
		"no object":    `{"type":"ADDED"}` + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			asked := 0
			server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Query().Get("watch") == "" {
					fmt.Fprint(w, `{"metadata":{"resourceVersion":"7"},"items":[]}`)
					return
				}
				mu.Lock()
				asked++
				mu.Unlock()
				fmt.Fprint(w, answer)
			}))
			t.Cleanup(server.Close) // behind the end of the list
			m := follow(t, &kubeapi.Objects{URL: server.URL, Folder: folder(t, server)}, "/api/v1/pods", nil)
			await.True(t, "it is said", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return len(m.lost) > 1 })
			mu.Lock()
			defer mu.Unlock()
			if asked > 10 {
				t.Errorf("asked %d times already", asked)
			}
		})
	}
}

// folder of a service account for a server.
func folder(t *testing.T, server *httptest.Server) string {
	t.Helper()
	dir := t.TempDir()
	api := kubeapi.CA(server)
	for name, text := range map[string][]byte{"token": []byte("t"), "ca.crt": api} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestClientReadsItsFilesAgain(t *testing.T) {
	api := kubeapi.NewObjects(t)
	api.Put("pods", kubeapi.Pod("prod", "a", "1", "10.0.0.1", "n"))
	c := kube.New(api.URL, api.Folder)
	defer c.Close()
	var o thing
	get := func() error { return c.Do(t.Context(), http.MethodGet, "/api/v1/namespaces/prod/pods/a", "", nil, &o) }
	if err := get(); err != nil || o.Metadata.UID != "1" {
		t.Fatal(o, err)
	}
	name := filepath.Join(api.Folder, "token")
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte("expired"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := get(); !kube.IsCode(err, http.StatusUnauthorized) {
		t.Errorf("with a wrong token: %v", err)
	}
	if err := os.WriteFile(name, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := get(); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(api.Folder, "ca.crt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := get(); err == nil || !strings.Contains(err.Error(), "holds no certificate") {
		t.Errorf("without a CA: %v", err)
	}
	if err := c.Do(t.Context(), http.MethodGet, "/x", "", func() {}, nil); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("what is no JSON: %v", err)
	}
}

func TestDiscover(t *testing.T) {
	env := func(list ...string) func(string) string {
		return func(name string) string {
			if i := slices.Index(list, name); i >= 0 {
				return list[i+1]
			}
			return ""
		}
	}
	in := env("KUBERNETES_SERVICE_HOST", "fd00::1", "KUBERNETES_SERVICE_PORT", "443")
	for _, c := range []struct {
		given, want string
		env         func(string) string
	}{{"", "https://[fd00::1]:443", in}, {"https://a:1/", "https://a:1", in}, {"http://a:1", "", in}, {"", "", env()}, {"a:1", "", env()}} {
		if got, err := kube.Discover(c.given, c.env); got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%q: %q, %v", c.given, got, err)
		}
	}
}
