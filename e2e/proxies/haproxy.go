package proxies

import "fmt"

// HAProxy needs Lua.
var HAProxy = &Proxy{Name: "HAProxy", variable: "HAPROXY", usual: "haproxy", target: "test-haproxy", plan: planHAProxy}

func planHAProxy(s Site, w *plan) {
	const socket = "abns@kvscout" // one name is one socket of the whole machine
	w.files = []string{"kvscout.lua"}
	w.change(socket, "abns@"+s.Host)
	w.files = append(w.files, "haproxy.cfg")
	engines := ""
	for i, e := range s.Engines {
		engines += fmt.Sprintf("    server engine%d %s\n", i, e)
	}
	w.change("bind 127.0.0.1:8080", "bind "+w.address)
	w.change("    server engine0 127.0.0.1:8000\n    server engine1 127.0.0.1:8001\n", engines)
	w.change("server scheduler0 127.0.0.1:9003", "server scheduler0 "+s.HTTP)
	w.change("bind "+socket, "bind abns@"+s.Host)
	if s.Plain {
		w.change("    filter lua.kvscout\n", "")
		w.change("    option http-buffer-request\n", "")
		w.change("    http-request lua.kvscout engines if", "    http-request set-var(txn.plain) bool(true) if")
		w.change("balance leastconn", "balance roundrobin")
	}
	w.args = []string{"-C", w.folder, "-f", "haproxy.cfg"}
}
