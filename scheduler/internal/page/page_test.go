package page

import (
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
)

func serve(t *testing.T, method, path string, header http.Header) (*http.Response, string) {
	t.Helper()
	r := httptest.NewRequest(method, path, nil)
	r.Header = header.Clone()
	if r.Header == nil {
		r.Header = http.Header{}
	}
	w := httptest.NewRecorder()
	Handler().ServeHTTP(w, r)
	answer := w.Result()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer, string(text)
}

// Whatever the page consists of is named relative to it, comes with the policy that
// forbids all else, and is sent again only when it changed.
func TestThePageIsWholeUnderAnyPathAndItsPolicy(t *testing.T) {
	kinds := map[string]string{"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "json": "application/json"}
	loads := regexp.MustCompile(`(?:src|href)="([^"#]+)"|from '([^']+)'|fetch\('([^']+)'`)
	seen, open := map[string]bool{}, []string{"/"}
	for len(open) > 0 {
		path := open[0]
		open = open[1:]
		if seen[path] {
			continue
		}
		seen[path] = true
		answer, text := serve(t, "GET", path, nil)
		if answer.StatusCode != http.StatusOK || text == "" {
			t.Fatalf("%s: %s", path, answer.Status)
		}
		ending := "html"
		if at := strings.LastIndexByte(path, '.'); at > 0 {
			ending = path[at+1:]
		}
		h := answer.Header
		if !strings.HasPrefix(h.Get("Content-Type"), kinds[ending]) {
			t.Errorf("%s is %q", path, h.Get("Content-Type"))
		}
		for _, rule := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "require-trusted-types-for 'script'"} {
			if !strings.Contains(h.Get("Content-Security-Policy"), rule) {
				t.Errorf("%s: the policy lacks %s", path, rule)
			}
		}
		if strings.Contains(h.Get("Content-Security-Policy"), "unsafe") || h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Referrer-Policy") != "no-referrer" || h.Get("Cache-Control") != "no-cache" {
			t.Errorf("%s: %v", path, h)
		}
		tag := h.Get("ETag")
		for _, known := range []string{tag, "W/" + tag, `"other", ` + tag} {
			if again, text := serve(t, "GET", path, http.Header{"If-None-Match": {known}}); again.StatusCode != http.StatusNotModified || text != "" {
				t.Errorf("%s known as %s: %s, %d bytes", path, known, again.Status, len(text))
			}
		}
		if again, _ := serve(t, "GET", path, http.Header{"If-None-Match": {`"other"`}}); again.StatusCode != http.StatusOK {
			t.Errorf("%s changed: %s", path, again.Status)
		}
		if strings.Contains(text, "innerHTML") || strings.Contains(text, " style=") || regexp.MustCompile(`<script[^>]*>[^<]|\son[a-z]+="`).MatchString(text) {
			t.Errorf("%s has markup made of text, or scripts or styles in it", path)
		}
		for _, found := range loads.FindAllStringSubmatch(text, -1) {
			name := found[1] + found[2] + found[3]
			switch {
			case strings.Contains(name, "://") || strings.HasPrefix(name, "/"):
				t.Errorf("%s loads %s: not relative to it", path, name)
			case strings.HasPrefix(name, "./"):
				open = append(open, "/page/"+name[2:])
			default:
				open = append(open, "/"+name)
			}
		}
	}
	for _, name := range []string{"/", "/page/app.js", "/page/fleet.js", "/page/style.css", "/page/icon.svg", "/page/advice.json"} {
		if !seen[name] {
			t.Errorf("%s is not loaded: %v", name, seen)
		}
	}
	files, err := static.ReadDir("static/page")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !seen["/page/"+f.Name()] {
			t.Errorf("%s is served and not used", f.Name())
		}
	}
}

func TestThePageIsReadOnly(t *testing.T) {
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH"} {
		if answer, _ := serve(t, method, "/", nil); answer.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("%s: %s", method, answer.Status)
		}
	}
	for _, path := range []string{"/index.html", "/page/", "/page", "/page/none.js", "/page/../page.go", "/static/page/app.js"} {
		if answer, _ := serve(t, "GET", path, nil); answer.StatusCode == http.StatusOK {
			t.Errorf("%s: %s", path, answer.Status)
		}
	}
	if answer, _ := serve(t, "HEAD", "/", nil); answer.StatusCode != http.StatusOK || answer.Header.Get("ETag") == "" {
		t.Errorf("HEAD: %s", answer.Status)
	}
}
