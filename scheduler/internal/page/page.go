// Package page holds the page that a scheduler shows people in a browser, as
// files of the program, and serves them. What the page shows it asks of the API
// as HTTP/JSON, by paths that are relative to its own; this package knows none of
// it.
package page

import (
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
)

// index.html is the page at /, and what it loads lies in page/.
//
//go:embed static
var static embed.FS

// policy of what a browser may do with the page: load what came with it, ask
// where it came from, and make no markup of text.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// file of the page.
type file struct {
	text []byte
	kind string
	tag  string // quoted
}

// Handler serves the page at / and what it loads under /page/, by GET and HEAD.
// Nothing else is there. Files are asked for again each time and sent when they
// changed, so that a page never mixes those of two releases.
func Handler() http.Handler {
	mux := http.NewServeMux()
	err := fs.WalkDir(static, "static", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := static.ReadFile(name)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(text)
		f := &file{text: text, kind: kind(name), tag: `"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`}
		at := strings.TrimPrefix(name, "static")
		if at == "/index.html" {
			at = "/{$}"
		}
		mux.Handle("GET "+at, f)
		return nil
	})
	if err != nil {
		panic(err) // the files are part of the program
	}
	return mux
}

// kind of a file. What the machine thinks of endings does not count.
func kind(name string) string {
	switch path.Ext(name) {
	case ".html":
		return "text/html; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".json":
		return "application/json"
	case ".svg":
		return "image/svg+xml"
	}
	return mime.TypeByExtension(path.Ext(name))
}

func (f *file) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-cache")
	h.Set("ETag", f.tag)
	for tag := range strings.SplitSeq(r.Header.Get("If-None-Match"), ",") {
		if tag = strings.TrimPrefix(strings.TrimSpace(tag), "W/"); tag == f.tag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
	}
	h.Set("Content-Type", f.kind)
	_, _ = w.Write(f.text)
}
