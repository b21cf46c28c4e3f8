package protocol

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestAddressIsHostAndPortAndNothingElse(t *testing.T) {
	for text, want := range map[string]Address{
		"10.0.0.7:8000":                 {IP: netip.MustParseAddr("10.0.0.7"), Port: 8000},
		"127.0.0.1:1":                   {IP: netip.MustParseAddr("127.0.0.1"), Port: 1},
		"[2001:db8::1]:65535":           {IP: netip.MustParseAddr("2001:db8::1"), Port: 65535},
		"[::1]:80":                      {IP: netip.MustParseAddr("::1"), Port: 80},
		"vllm-0.vllm.prod.svc:8000":     {Name: "vllm-0.vllm.prod.svc", Port: 8000},
		"Vllm_0.Example.COM.:8000":      {Name: "vllm_0.example.com.", Port: 8000},
		"ip-10-0-0-1.ec2.internal:8000": {Name: "ip-10-0-0-1.ec2.internal", Port: 8000},
		"localhost:8000":                {Name: "localhost", Port: 8000},
	} {
		if got, err := ParseAddress(text); err != nil || got != want {
			t.Errorf("%q is %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{
		"", "host", "host:", ":8000", "host:0", "host:65536", "host:080", "host:-1", "host:+1", "host:http", "10.0.0.1:8000:1",
		"user@host:80", "user:secret@host:80", "http://host:80", "host:80/path", "host/path:80", "host:80?q", "host:80#f", "ho st:80", "host\n:80",
		"[fe80::1%eth0]:80", "fe80::1:80", "[host]:80", "[10.0.0.1]:80x", "[::ffff:10.0.0.1]:80", "::1:80",
		"0.0.0.0:80", "[::]:80", "224.0.0.1:80", "[ff02::1]:80", "255.255.255.255:80",
		"127.1:80", "2130706433:80", "0x7f000001:80", "10.0.0.0x1:80", "10.0.0.256:80", "010.0.0.1:80", "a..b:80", ".a:80", "-a:80", "a-:80", "*.a:80",
		strings.Repeat("a", 64) + ":80", strings.Repeat("a.", 127) + "aa:80", "höst:80", "host%2e:80",
	} {
		if got, err := ParseAddress(text); err == nil {
			t.Errorf("%q passed as %+v", text, got)
		}
	}
	for text, want := range map[string]bool{"127.9.9.9:1": true, "[::1]:1": true, "localhost:1": true, "a.localhost:1": true, "10.0.0.1:1": false, "localhost.example:1": false} {
		if a, err := ParseAddress(text); err != nil || a.Loopback() != want {
			t.Errorf("%q is on this machine: %v, %v", text, a.Loopback(), err)
		}
	}
}

// What passes means one host to everybody: Go's own reading agrees, and names
// have no letters that mean something in a URL.
func FuzzAddress(f *testing.F) {
	for _, seed := range []string{"10.0.0.7:8000", "[::1]:80", "a.b:1", "user@host:80", "127.1:80", "[fe80::1%25]:80"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, err := ParseAddress(text)
		if err != nil {
			return
		}
		host, _, err := net.SplitHostPort(text)
		if err != nil || a.Port == 0 || a.IP.IsValid() == (a.Name != "") || strings.ContainsAny(text, "@/?#%\\ \t\r\n,") {
			t.Fatalf("%q passed as %+v", text, a)
		}
		if ip := net.ParseIP(host); (ip != nil) != a.IP.IsValid() {
			t.Fatalf("%q: %v and %+v", text, ip, a)
		}
	})
}
