package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/e2e/loopback"
)

// needHAProxy skips a test where there is no HAProxy, unless it must be there.
func needHAProxy(t *testing.T) string {
	t.Helper()
	return needProgram(t, "HAProxy", "HAPROXY", "haproxy", "make test-haproxy")
}

// needProgram is the path of a program: the one that the variable names, or that of
// the usual name. Without it a test is skipped, unless KVSCOUT_REQUIRE_ and the
// program's name say that it must be there.
func needProgram(t *testing.T, name, variable, usual, hint string) string {
	t.Helper()
	program := os.Getenv(variable)
	if program == "" {
		program = usual
	}
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	if os.Getenv("KVSCOUT_REQUIRE_"+strings.ToUpper(name)) != "" {
		t.Fatalf("no %s: %v", name, err)
	}
	t.Skipf("skipped: no %s: %s (%v)", name, hint, err)
	return ""
}

// adapt copies a file of deploy/proxies into a folder, with changes of what stands in
// it exactly once.
func adapt(t *testing.T, file, folder string, changes ...[2]string) {
	t.Helper()
	text := read(t, filepath.Join("../deploy/proxies", file))
	for _, change := range changes {
		if strings.Count(text, change[0]) != 1 {
			t.Fatalf("deploy/proxies/%s has not exactly one %q", file, change[0])
		}
		text = strings.Replace(text, change[0], change[1], 1)
	}
	if err := os.WriteFile(filepath.Join(folder, filepath.Base(file)), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

var throughHAProxy = haproxyWith()

// haproxyWith is the real HAProxy with the configuration of deploy/proxies/haproxy,
// and with these changes of the script.
func haproxyWith(script ...[2]string) reverseProxy {
	return reverseProxy{
		name: "HAProxy",
		need: func(t *testing.T) { needHAProxy(t) },
		lacks: map[feature]string{
			hidesUsage: "a script reads what passes, and does not change it",
			readsLarge: "a body is read as far as `tune.bufsize` goes",
		},
		start: func(t *testing.T, s *site) served {
			host, folder := loopback.Host(t), t.TempDir()
			address := net.JoinHostPort(host, "28080")
			engines := ""
			for i, e := range s.engines {
				engines += fmt.Sprintf("    server engine%d %s\n", i, e)
			}
			changes := [][2]string{
				{"bind 127.0.0.1:8080", "bind " + address},
				{"    server engine0 127.0.0.1:8000\n    server engine1 127.0.0.1:8001\n", engines},
				{"server scheduler0 127.0.0.1:9003", "server scheduler0 " + s.HTTP},
				{"bind abns@kvscout", "bind abns@" + host}, // a name is one for the whole machine
			}
			if s.plain {
				changes = append(changes, [2]string{"    filter lua.kvscout\n", ""}, [2]string{"    option http-buffer-request\n", ""},
					[2]string{"    http-request lua.kvscout engines if", "    http-request set-var(txn.plain) bool(true) if"}, [2]string{"balance leastconn", "balance roundrobin"})
			}
			adapt(t, "haproxy/haproxy.cfg", folder, changes...)
			adapt(t, "haproxy/kvscout.lua", folder, append([][2]string{{"abns@kvscout", "abns@" + host}}, script...)...)
			cmd := runProgram(t, needHAProxy(t), "-C", folder, "-f", "haproxy.cfg")
			return served{url: "http://" + address, http2: "http://" + address, pid: cmd.Process.Pid}
		},
	}
}

func TestProxyHAProxy(t *testing.T) { runProxyCases(t, throughHAProxy) }

func TestProxyScriptHAProxy(t *testing.T) {
	runScriptCases(t, throughHAProxy, haproxyWith([2]string{"ranks = false", "ranks = true"}))
}

func TestProxyLatencyHAProxy(t *testing.T) { measureProxy(t, throughHAProxy) }
