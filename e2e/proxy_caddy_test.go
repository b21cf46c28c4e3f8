package e2e

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvscout/kvscout/e2e/loopback"
)

// findCaddy is the path of a Caddy with kvscout, or why there is none.
var findCaddy = sync.OnceValues(func() (string, error) {
	name := os.Getenv("CADDY")
	if name == "" {
		name = "caddy"
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}
	modules, err := exec.Command(path, "list-modules").Output()
	if err == nil && !bytes.Contains(modules, []byte("http.handlers.kvscout\n")) {
		err = fmt.Errorf("%s is without kvscout", path)
	}
	return path, err
})

// needCaddy skips a test where there is no such Caddy, unless it must be there.
func needCaddy(t *testing.T) string {
	t.Helper()
	path, err := findCaddy()
	if err != nil {
		if os.Getenv("KVSCOUT_REQUIRE_CADDY") != "" {
			t.Fatalf("no Caddy: %v", err)
		}
		t.Skipf("skipped: no Caddy: make test-caddy (%v)", err)
	}
	return path
}

// throughCaddy is Caddy with the configuration of deploy/proxies/caddy.
var throughCaddy = reverseProxy{
	name: "Caddy",
	need: func(t *testing.T) { needCaddy(t) },
	start: func(t *testing.T, s *site) served {
		return startCaddy(t, s, "")
	},
	lacks: map[feature]string{readsLarge: "bodies of more than 15 MiB go where the fallback policy says"},
}

func TestProxyCaddy(t *testing.T) { runProxyCases(t, throughCaddy) }

func TestProxyLatencyCaddy(t *testing.T) { measureProxy(t, throughCaddy) }

// startCaddy runs it with HTTP/2 in clear text besides, with the scheduler's
// patience, and with more options of kvscout.
func startCaddy(t *testing.T, s *site, options string) served {
	t.Helper()
	path := needCaddy(t)
	host := loopback.Host(t)
	address := net.JoinHostPort(host, "28080")
	config := read(t, "../deploy/proxies/caddy/Caddyfile")
	const ask = "\tkvscout 127.0.0.1:50051 {\n\t\ttimeout 200ms\n\t}\n"
	const policy = "lb_policy kvscout {\n\t\t\tfallback least_conn\n\t\t}"
	changes := [][2]string{
		{":8080", "http://" + address},
		{ask, strings.NewReplacer("127.0.0.1:50051", s.GRPC, "200ms", patience.String()+options).Replace(ask)},
		{"127.0.0.1:8000 127.0.0.1:8001", strings.Join(s.engines, " ")},
	}
	if s.plain {
		changes[1][1] = ""
		changes = append(changes, [2]string{policy, "lb_policy round_robin"})
	}
	for _, change := range changes {
		if strings.Count(config, change[0]) != 1 {
			t.Fatalf("deploy/proxies/caddy/Caddyfile has not exactly one %q", change[0])
		}
		config = strings.Replace(config, change[0], change[1], 1)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "Caddyfile")
	// A site's address says who is served, not where: without this it is every address.
	config = "{\n\tadmin off\n\tpersist_config off\n\tdefault_bind " + host + "\n\tservers {\n\t\tprotocols h1 h2c\n\t}\n}\n" + config
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_DATA_HOME", dir)
	t.Setenv("XDG_CONFIG_HOME", dir)
	program := runProgram(t, path, "run", "--config", file, "--adapter", "caddyfile")
	url := "http://" + address
	return served{url: url, http2: url, pid: program.Process.Pid}
}
