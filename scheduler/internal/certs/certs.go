// Package certs serves with TLS by certificates in files that may be replaced
// while it runs.
package certs

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Files names PEM files. They are read again for every new connection, so that
// a renewed certificate is used without a restart.
type Files struct {
	// Cert and Key are our certificate, with its chain, and its private key.
	Cert, Key string
	// CA holds the certificates of those whom we trust to have signed the other
	// side's.
	CA string
}

// certificates are those of a server that listens with TLS. When the files do
// not fit together, as they may not for a moment while they are replaced, the
// last ones that did are kept.
type certificates struct {
	files     Files
	log       *slog.Logger
	protocols []string

	mu     sync.Mutex // guards what follows
	texts  [3][]byte  // of the files when last read
	config *tls.Config
	said   string // why the newest files are not used
}

// Server is the configuration of a listener. With a CA, clients must show a
// certificate that it signed. Protocols are offered to clients that ask for one
// (ALPN).
func Server(files Files, log *slog.Logger, protocols ...string) (*tls.Config, error) {
	c := &certificates{files: files, log: log, protocols: protocols}
	if err := c.readLocked(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		NextProtos:         protocols,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current(), nil },
	}, nil
}

func (c *certificates) current() *tls.Config {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.readLocked()
	switch {
	case err == nil:
		c.said = ""
	case err.Error() != c.said:
		c.said = err.Error()
		c.log.Error("certificate files are not used, the last good ones are", "error", err)
	}
	return c.config
}

// readLocked replaces the configuration if the files changed.
func (c *certificates) readLocked() error {
	var texts [3][]byte
	for i, name := range []string{c.files.Cert, c.files.Key, c.files.CA} {
		if name == "" {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		texts[i] = text
	}
	if c.config != nil && bytes.Equal(texts[0], c.texts[0]) && bytes.Equal(texts[1], c.texts[1]) && bytes.Equal(texts[2], c.texts[2]) {
		return nil
	}
	pair, err := tls.X509KeyPair(texts[0], texts[1])
	if err != nil {
		return fmt.Errorf("%s, %s: %w", c.files.Cert, c.files.Key, err)
	}
	config := &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{pair},
		NextProtos:   c.protocols,
		// A resumed session would stand on certificates that were checked long
		// ago; connections last, so that resuming saves nothing.
		SessionTicketsDisabled: true,
	}
	if c.files.CA != "" {
		config.ClientCAs = x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(texts[2]) {
			return fmt.Errorf("%s: no certificate in it", c.files.CA)
		}
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	c.texts, c.config = texts, config
	if time.Now().After(pair.Leaf.NotAfter) {
		c.log.Warn("the certificate has expired", "file", c.files.Cert, "until", pair.Leaf.NotAfter)
	} else {
		c.log.Info("certificate read", "file", c.files.Cert, "until", pair.Leaf.NotAfter)
	}
	return nil
}
