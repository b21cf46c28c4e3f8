// Package tlsclient says whom a client believes.
package tlsclient

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// Trust of a client in servers. Zero: as the system has it.
type Trust struct {
	// CA is a file with the authorities' certificates; empty: the system's.
	CA string
	// Name in the server's certificate; empty: the host that is dialled.
	Name string
}

// Config reads the file.
func (t Trust) Config() (*tls.Config, error) {
	c := &tls.Config{ServerName: t.Name, MinVersion: tls.VersionTLS12}
	if t.CA == "" {
		return c, nil
	}
	text, err := os.ReadFile(t.CA)
	if err != nil {
		return nil, err
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s: there is no certificate in it", t.CA)
	}
	return c, nil
}
