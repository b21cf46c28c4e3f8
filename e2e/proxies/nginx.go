package proxies

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// Nginx has its module njs where Debian has it, beside the program. The variable
// NGINX is nginx' own.
var Nginx = &Proxy{Name: "nginx", variable: "NGINX_BIN", usual: "nginx", target: "test-nginx", plan: planNginx, found: func(path string, err error) (string, error) {
	if err != nil {
		return "", err
	}
	if path, err = filepath.Abs(path); err != nil {
		return "", err
	}
	_, err = os.Stat(njs(path))
	return path, err
}}

// njs is the folder of the modules of the nginx at a path.
func njs(path string) string {
	return filepath.Join(filepath.Dir(path), "../lib/nginx/modules/ngx_http_js_module.so")
}

func planNginx(s Site, w *plan) {
	w.files = []string{"kvscout.js", "nginx.conf"}
	names, single, all := "", "", ""
	for i, e := range s.Engines {
		names += fmt.Sprintf("        %s engine%d;\n", e, i)
		single += fmt.Sprintf("    upstream engine%d { server %s; keepalive 64; keepalive_timeout 4s; }\n", i, e)
		all += "server " + e + "; "
	}
	user := ""
	if os.Getuid() == 0 {
		user = "user root;\n" // who else may not enter the folder
	}
	// Where a package of nginx has its folders is not for us to write.
	folders := "http {\n"
	for _, name := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		folders += fmt.Sprintf("    %s_temp_path %[1]s;\n", name)
	}
	w.http2 = net.JoinHostPort(s.Host, "28081")
	w.change("modules/ngx_http_js_module.so", njs(w.program))
	w.change("user www-data;\n", user)
	w.change("http {\n", folders)
	w.change("/run/nginx-kvscout.pid", "nginx.pid")
	w.change("        127.0.0.1:8000 engine0;\n        127.0.0.1:8001 engine1;\n", names)
	w.change("    upstream engine0 { server 127.0.0.1:8000; keepalive 64; keepalive_timeout 4s; }\n    upstream engine1 { server 127.0.0.1:8001; keepalive 64; keepalive_timeout 4s; }\n", single)
	w.change("server 127.0.0.1:8000; server 127.0.0.1:8001; ", all)
	w.change("server 127.0.0.1:9003 ", "server "+s.HTTP+" ")
	w.change("listen 127.0.0.1:8080;", "listen "+w.address+"; listen "+w.http2+" http2;")
	if s.Plain {
		w.change("            js_content kvscout.pick;\n", "            proxy_pass http://engines;\n")
	}
	w.args = []string{"-p", w.folder, "-c", filepath.Join(w.folder, "nginx.conf"), "-g", "daemon off;"}
}
