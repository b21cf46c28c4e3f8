package zmtp

import (
	"strings"
	"testing"
)

func TestParseEndpoint(t *testing.T) {
	for s, want := range map[string]Endpoint{
		"tcp://127.0.0.1:5557": {Network: "tcp", Host: "127.0.0.1", Port: 5557},
		"tcp://*:5557":         {Network: "tcp", Host: "*", Port: 5557},
		"tcp://[::]:5557":      {Network: "tcp", Host: "::", Port: 5557},
		"tcp://[::1]:0":        {Network: "tcp", Host: "::1", Port: 0},
		"tcp://vllm.ns.svc:1":  {Network: "tcp", Host: "vllm.ns.svc", Port: 1},
		"ipc:///tmp/kv":        {Network: "unix", Path: "/tmp/kv"},
		"ipc://kv":             {Network: "unix", Path: "kv"},
		"ipc://@kv":            {Network: "unix", Path: "@kv"},
	} {
		got, err := ParseEndpoint(s)
		if err != nil || got != want {
			t.Errorf("%s: got %+v, %v; want %+v", s, got, err, want)
		}
		if got.String() != s {
			t.Errorf("%s comes back as %s", s, got)
		}
	}
	if e, err := ParseEndpoint("tcp://*:*"); err != nil || e.Port != 0 {
		t.Errorf("tcp://*:*: got %+v, %v; want port 0", e, err)
	}
}

func TestBadEndpointIsExplained(t *testing.T) {
	for s, want := range map[string]string{
		"":                                       "no transport",
		"127.0.0.1:5557":                         "no transport",
		"udp://127.0.0.1:5557":                   `transport "udp" is not supported`,
		"inproc://kv":                            `transport "inproc" is not supported`,
		"tcp://127.0.0.1":                        "want host:port",
		"tcp://::1:5557":                         "want host:port",
		"tcp://:5557":                            "no host",
		"tcp://h:65536":                          "is not a number",
		"tcp://h:-1":                             "is not a number",
		"tcp://h:":                               "is not a number",
		"tcp://h:http":                           "is not a number",
		"tcp://10.0.0.1:0;10.0.0.2:5557":         "no source address",
		"tcp://h:5557/":                          "no source address, path",
		"ipc://":                                 "want the path",
		"ipc://*":                                "want the path",
		"ipc://a\x00b":                           "zero byte",
		"ipc:///" + strings.Repeat("long/", 100): "a unix socket allows 107",
	} {
		_, err := ParseEndpoint(s)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", s, err, want)
		}
	}
}
