package kvscout

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvscout/kvscout/protocol/client"
)

func TestCaddyfileIsRead(t *testing.T) {
	for text, want := range map[string]string{
		"kvscout a:1 b:2": "",
		"kvscout a:1 {\n timeout 1s\n attempts 2\n tls_ca ca.pem\n tls_client_auth c.pem k.pem\n tls_server_name x\n}": "",
		"kvscout a:1 {\n tls\n}":               "",
		"kvscout":                              "no scheduler",
		"kvscout a:1 {\n timeout\n}":           "timeout: want 1 values",
		"kvscout a:1 {\n timeout -1s\n}":       "timeout: want a duration",
		"kvscout a:1 {\n timeout 0\n}":         "timeout: want a duration",
		"kvscout a:1 {\n attempts x\n}":        "attempts: want a number",
		"kvscout a:1 {\n attempts 0\n}":        "attempts: want a number",
		"kvscout a:1 {\n tls yes\n}":           "tls: want 0 values",
		"kvscout a:1 {\n tls_client_auth x\n}": "tls_client_auth: want 2 values",
		"kvscout a:1 {\n nonsense x\n}":        `no option "nonsense"`,
	} {
		h := new(Handler)
		err := h.UnmarshalCaddyfile(caddyfile.NewTestDispenser(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
		if want == "" && len(h.Schedulers) == 0 {
			t.Errorf("%s: %+v", text, h)
		}
	}
	for text, want := range map[string]string{
		"kvscout":                                        "",
		"kvscout {\n fallback round_robin\n}":            "",
		"kvscout x":                                      "wrong argument count",
		"kvscout {\n fallback\n}":                        "wrong argument count",
		"kvscout {\n fallback nothing\n}":                "not registered",
		"kvscout {\n fallback first\n fallback first\n}": "given twice",
		"kvscout {\n nonsense\n}":                        `no option "nonsense"`,
	} {
		err := new(Selection).UnmarshalCaddyfile(caddyfile.NewTestDispenser(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(strings.ToLower(err.Error()), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// The Caddyfile beside this one is a whole configuration.
func TestTheCaddyfileIsValid(t *testing.T) {
	text, err := os.ReadFile("Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	config, warnings, err := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}.Adapt(text, nil)
	if err != nil || len(warnings) > 0 {
		t.Fatal(err, warnings)
	}
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(config, &cfg); err != nil {
		t.Fatal(err)
	}
	if err := caddy.Validate(&cfg); err != nil {
		t.Error(err)
	}
}

func TestWrongConfigurationsAreRefused(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	notPEM := t.TempDir() + "/x"
	if err := os.WriteFile(notPEM, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, h := range map[string]*Handler{
		"no scheduler":                  {},
		"must be positive":              {Schedulers: []string{"a:1"}, Attempts: -1},
		"ca: open":                      {Schedulers: []string{"a:1"}, TLS: &TLS{CA: "/nowhere"}},
		"there is no certificate in it": {Schedulers: []string{"a:1"}, TLS: &TLS{CA: notPEM}},
		"client_auth":                   {Schedulers: []string{"a:1"}, TLS: &TLS{Certificate: notPEM, Key: notPEM}},
	} {
		if err := h.Provision(ctx); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if err := h.Cleanup(); err != nil {
			t.Error(err)
		}
	}
}

// What is read is what came, and what is not read whole is passed on whole.
func TestBodies(t *testing.T) {
	for name, c := range map[string]struct {
		length    int
		announced bool
		full      bool // there is no memory
		whole     bool
	}{
		"one byte":                   {1, true, false, true},
		"some":                       {100_000, true, false, true},
		"chunked":                    {100_000, false, false, true},
		"all that is read":           {maxBody, true, false, true},
		"too long":                   {maxBody + 1, true, false, false},
		"too long, and says nothing": {maxBody + 2*step, false, false, false},
		"no memory":                  {100_000, true, true, false},
		"none":                       {0, true, false, false},
	} {
		text := bytes.Repeat([]byte("0123456789abcde"), c.length/15+1)[:c.length]
		r := httptest.NewRequest(http.MethodPost, "/", iotest.HalfReader(bytes.NewReader(text)))
		if r.ContentLength = -1; c.announced {
			r.ContentLength = int64(c.length)
		}
		of := new(budget)
		if c.full {
			of.take(maxBodies)
		}
		b := &body{of: of}
		whole, err := b.read(r)
		if err != nil || whole != c.whole || whole && !bytes.Equal(b.bytes, text) {
			t.Errorf("%s: whole %t, %d bytes, %v", name, whole, len(b.bytes), err)
		}
		if rest, err := io.ReadAll(r.Body); !whole && (err != nil || !bytes.Equal(rest, text)) {
			t.Errorf("%s: %d bytes are passed on, %v", name, len(rest), err)
		}
		if whole && (of.held.Load() < int64(c.length) || cap(b.bytes) > 2*c.length+2*step) {
			t.Errorf("%s: %d bytes are held for %d", name, cap(b.bytes), c.length)
		}
		if b.release(); of.held.Load() != 0 && !c.full {
			t.Errorf("%s: %d bytes stay", name, of.held.Load())
		}
	}
	b := &body{of: new(budget)}
	if _, err := b.read(httptest.NewRequest(http.MethodPost, "/", iotest.ErrReader(io.ErrUnexpectedEOF))); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}

func TestSelection(t *testing.T) {
	upstream := func(dial string) *reverseproxy.Upstream {
		return &reverseproxy.Upstream{Dial: dial, Host: new(reverseproxy.Host)}
	}
	pool := reverseproxy.UpstreamPool{upstream("a:1"), upstream("b:1")}
	s := &Selection{fallback: reverseproxy.FirstSelection{}}
	for name, c := range map[string]struct {
		address  string
		picks    []string
		diverted bool
	}{
		"one of the upstreams": {"b:1", []string{"b:1"}, false},
		"another one":          {"c:1", []string{"c:1"}, false},
		"asked again":          {"b:1", []string{"b:1", "a:1"}, true},
		"a placeholder":        {"{env.HOME}:1", []string{"a:1"}, true},
		"no port":              {"c", []string{"a:1"}, true},
	} {
		p := &place{Placement: &client.Placement{Address: c.address}}
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r = r.WithContext(context.WithValue(r.Context(), placeKey{}, p))
		for _, want := range c.picks {
			if got := s.Select(pool, r, nil); got.Dial != want {
				t.Errorf("%s: %s", name, got.Dial)
			}
		}
		if p.left.Load() != c.diverted || !p.taken.Load() {
			t.Errorf("%s: %t", name, p.left.Load())
		}
	}
	if got := s.Select(pool, httptest.NewRequest(http.MethodGet, "/", nil), nil); got.Dial != "a:1" {
		t.Errorf("without a decision: %s", got.Dial)
	}
}

// What is for the scheduler, or comes from it, does not reach the engine as a client
// says it, and what is not the scheduler's is not shown to it.
func TestHeadersGoWhereTheyBelong(t *testing.T) {
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	for _, name := range []string{client.RankHeader, client.PrefillHeader, client.PullHeader, client.ControlHeaders[0], "Authorization", "Cookie", "X-Session-Id"} {
		r.Header.Set(name, "x")
	}
	x := newExchange(nil, r, nil, []byte("{}"))
	if h := x.again(t.Context()).Header; len(h) != 4 || h.Get("Authorization") != "x" || h.Get("Cookie") != "x" || h.Get("X-Session-Id") != "x" || h.Get("Content-Length") != "2" {
		t.Errorf("the engine sees %v", h)
	}
	if h := x.request().GetHeaders(); h["authorization"] != "" || h["cookie"] != "" || h["x-session-id"] != "x" {
		t.Errorf("the scheduler sees %v", h)
	}
}

// A scheduler's own refusals are the client's; all else is for the fallback.
func TestRefusals(t *testing.T) {
	failed := func(code codes.Code, reason string) error {
		s, err := status.New(code, "the queue is full").WithDetails(protoadapt.MessageV1Of(&errdetails.ErrorInfo{Reason: reason}),
			protoadapt.MessageV1Of(&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)}))
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Errorf("pick: %w", s.Err())
	}
	for reason, want := range map[string]int{"QUEUE_FULL": 429, "QUEUE_TIMEOUT": 503, "NO_MEMBERS": 0, "TOO_MANY_CALLS": 0, "": 0} {
		r, ok := refusalOf(failed(codes.ResourceExhausted, reason))
		if ok != (want != 0) || r.status != want {
			t.Errorf("%s: %+v", reason, r)
		}
		if !ok {
			continue
		}
		w := httptest.NewRecorder()
		if err := r.write(w); err != nil || w.Code != want || w.Header().Get("Retry-After") != "2" || !strings.Contains(w.Body.String(), "the queue is full") {
			t.Errorf("%s: %v %v %s", reason, err, w, w.Body)
		}
	}
	if _, ok := refusalOf(errors.New("none of gRPC's")); ok {
		t.Error("refused")
	}
}
