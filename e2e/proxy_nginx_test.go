package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvscout/kvscout/e2e/loopback"
)

// needNginx skips a test where there is no nginx, unless it must be there. Its module
// njs lies where Debian has it, beside the program. The variable NGINX is nginx' own.
func needNginx(t *testing.T) string {
	t.Helper()
	return needProgram(t, "nginx", "NGINX_BIN", "nginx", "make test-nginx")
}

var throughNginx = nginxWith()

// nginxWith is the real nginx with the configuration of deploy/proxies/nginx, and
// with these changes of the script.
func nginxWith(script ...[2]string) reverseProxy {
	return reverseProxy{
		name: "nginx",
		need: func(t *testing.T) { needNginx(t) },
		lacks: map[feature]string{
			hidesUsage: "a script reads what passes, and does not change it",
			readsLarge: "a body is read as far as `client_body_buffer_size` goes",
		},
		start: func(t *testing.T, s *site) served {
			program, host, folder := needNginx(t), loopback.Host(t), t.TempDir()
			modules, err := filepath.Abs(filepath.Join(filepath.Dir(program), "../lib/nginx/modules"))
			if err != nil {
				t.Fatal(err)
			}
			http1, http2 := net.JoinHostPort(host, "28080"), net.JoinHostPort(host, "28081")
			names, single, all := "", "", ""
			for i, e := range s.engines {
				names += fmt.Sprintf("        %s engine%d;\n", e, i)
				single += fmt.Sprintf("    upstream engine%d { server %s; keepalive 64; keepalive_timeout 4s; }\n", i, e)
				all += "server " + e + "; "
			}
			user := ""
			if os.Getuid() == 0 {
				user = "user root;\n" // who else may not enter the test's folder
			}
			// Where a package of nginx has its folders is not for tests to write.
			folders := "http {\n"
			for _, name := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
				folders += fmt.Sprintf("    %s_temp_path %[1]s;\n", name)
			}
			changes := [][2]string{
				{"modules/", modules + "/"},
				{"user www-data;\n", user}, {"http {\n", folders}, {"/run/nginx-kvscout.pid", "nginx.pid"},
				{"        127.0.0.1:8000 engine0;\n        127.0.0.1:8001 engine1;\n", names},
				{"    upstream engine0 { server 127.0.0.1:8000; keepalive 64; keepalive_timeout 4s; }\n    upstream engine1 { server 127.0.0.1:8001; keepalive 64; keepalive_timeout 4s; }\n", single},
				{"server 127.0.0.1:8000; server 127.0.0.1:8001; ", all},
				{"server 127.0.0.1:9003 ", "server " + s.HTTP + " "},
				{"listen 127.0.0.1:8080;", "listen " + http1 + "; listen " + http2 + " http2;"},
			}
			if s.plain {
				changes = append(changes, [2]string{"            js_content kvscout.pick;\n", "            proxy_pass http://engines;\n"})
			}
			adapt(t, "nginx/nginx.conf", folder, changes...)
			adapt(t, "nginx/kvscout.js", folder, script...)
			cmd := runProgram(t, program, "-p", folder, "-c", filepath.Join(folder, "nginx.conf"), "-g", "daemon off;")
			return served{url: "http://" + http1, http2: "http://" + http2, pid: cmd.Process.Pid}
		},
	}
}

func TestProxyNginx(t *testing.T) { runProxyCases(t, throughNginx) }

func TestProxyScriptNginx(t *testing.T) {
	runScriptCases(t, throughNginx, nginxWith([2]string{"ranks = false", "ranks = true"}))
}

func TestProxyLatencyNginx(t *testing.T) { measureProxy(t, throughNginx) }
