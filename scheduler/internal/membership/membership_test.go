package membership

import (
	"strings"
	"testing"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

func TestRightsOfNamespaces(t *testing.T) {
	r, err := parseRights("# comment\nprod llama,qwen-* default,big\nprod only-here special\n* public-*-chat\n\n")
	if err != nil {
		t.Fatal(err)
	}
	for c, want := range map[[3]string]string{
		{"prod", "default", "llama"}:         "",
		{"prod", "big", "qwen-3"}:            "",
		{"prod", "special", "only-here"}:     "",
		{"prod", "special", "llama"}:         `may not serve model "llama"`,
		{"prod", "default", "only-here"}:     "may not serve model",
		{"prod", "default", "llama-x"}:       "may not serve model",
		{"prod", "default", "xllama"}:        "may not serve model",
		{"prod", "other", "llama"}:           `may not serve pool "other"`,
		{"prod", "default", "public-a-chat"}: "may not serve model", // '*' is for others
		{"dev", "default", "public-a-chat"}:  "",
		{"dev", "default", "public-chat"}:    "may not serve model", // the parts do not overlap
		{"dev", "other", "public-a/b-chat"}:  "",
	} {
		err := r.admit(c[1], &fleet.Info{Namespace: c[0], Models: []string{c[2]}})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", c, err, want)
		}
	}
	for text, want := range map[string]string{
		"prod": "line 1", "a b c d": "line 1", "ok m\n\na.b m": "line 3", "a_b m": "no namespace", "prod a,,b": "not empty", "prod a*b*": "one *", "p* m": "no namespace",
	} {
		if _, err := parseRights(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestAllowedAddresses(t *testing.T) {
	a, err := parseAllowed("10.0.0.0/8, 192.168.1.7,2001:db8::/32,.prod.svc, Vllm.example.com")
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]bool{
		"10.1.2.3:1": true, "11.0.0.1:1": false, "192.168.1.7:1": true, "192.168.1.8:1": false, "[2001:db8::5]:1": true, "[2001:db9::5]:1": false,
		"a.prod.svc:1": true, "prod.svc:1": true, "aprod.svc:1": false, "a.prod.svc.:1": true, "A.PROD.SVC:1": true, "prod.svc.evil.com:1": false,
		"vllm.example.com:1": true, "x.vllm.example.com:1": true, "example.com:1": false,
	} {
		address, err := protocol.ParseAddress(text)
		if err != nil || a.has(address) != want {
			t.Errorf("%s: %v, %v", text, a.has(address), err)
		}
	}
	for _, bad := range []string{"10.0.0.1/8", "10.0.0.0/33", "fe80::1%eth0", "a b", "*.svc", "http://x", "x:80", ",", "1234"} {
		if got, err := parseAllowed(bad); err == nil {
			t.Errorf("%q passed: %+v", bad, got)
		}
	}
}

// With a NATS server of others nobody says where members connect from: nothing
// is sent anywhere but on this machine, if that server is here too.
func TestWithoutKnowledgeNobodyIsAsked(t *testing.T) {
	for here, want := range map[bool]map[string]bool{
		false: {"127.0.0.1:1": false, "10.0.0.1:1": false, "x.svc:1": false},
		true:  {"127.0.0.1:1": true, "localhost:1": true, "10.0.0.1:1": false, "x.svc:1": false},
	} {
		a := &addresses{loopback: here}
		for address, may := range want {
			if got := a.askable(&fleet.Info{Name: "n_p_0", Address: address}); got != may {
				t.Errorf("%s, here %v: %v", address, here, got)
			}
		}
	}
}
