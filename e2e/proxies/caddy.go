package proxies

import (
	"bytes"
	"fmt"
	"os/exec"
	"strings"
)

// Caddy must have kvscout's module.
var Caddy = &Proxy{Name: "Caddy", Explains: true, variable: "CADDY", usual: "caddy", target: "test-caddy", plan: planCaddy, found: func(path string, err error) (string, error) {
	if err != nil {
		return "", err
	}
	modules, err := exec.Command(path, "list-modules").Output()
	if err == nil && !bytes.Contains(modules, []byte("http.handlers.kvscout\n")) {
		err = fmt.Errorf("%s is without kvscout", path)
	}
	return path, err
}}

func planCaddy(s Site, w *plan) {
	const file = "Caddyfile"
	w.files = []string{file}
	// With HTTP/2 in clear text besides. A site's address says who is served, not where:
	// without default_bind it is every address.
	w.change(":8080 {", "{\n\tadmin off\n\tpersist_config off\n\tdefault_bind "+s.Host+"\n\tservers {\n\t\tprotocols h1 h2c\n\t}\n}\nhttp://"+w.address+" {")
	w.change("127.0.0.1:8000 127.0.0.1:8001", strings.Join(s.Engines, " "))
	if s.Plain {
		w.change("\tkvscout 127.0.0.1:50051 {\n\t\ttimeout 200ms\n\t}\n", "")
		w.change("lb_policy kvscout {\n\t\t\tfallback least_conn\n\t\t}", "lb_policy round_robin")
	} else {
		w.change("127.0.0.1:50051", s.GRPC)
	}
	w.environment = []string{"XDG_DATA_HOME=" + w.folder, "XDG_CONFIG_HOME=" + w.folder}
	w.args = []string{"run", "--config", w.folder + "/" + file, "--adapter", "caddyfile"}
}
