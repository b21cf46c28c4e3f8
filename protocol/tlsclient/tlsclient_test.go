package tlsclient

import (
	"crypto/tls"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestWhomAClientBelieves(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler()) // for example.com and 127.0.0.1
	defer server.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(ca, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ca, name string
		wrong    string
	}{
		{ca, "", ""},
		{ca, "example.com", ""},
		{ca, "example.org", "not example.org"},
		{"", "", "unknown authority"},
	} {
		config, err := (Trust{CA: c.ca, Name: c.name}).Config()
		if err != nil {
			t.Fatal(err)
		}
		conn, err := tls.Dial("tcp", server.Listener.Addr().String(), config)
		if err == nil {
			conn.Close()
		}
		if (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestNoCertificateInTheFile(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(empty, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, ca := range []string{empty, empty + ".not"} {
		if _, err := (Trust{CA: ca}).Config(); err == nil || !strings.Contains(err.Error(), ca) {
			t.Errorf("%s: %v", ca, err)
		}
	}
}
