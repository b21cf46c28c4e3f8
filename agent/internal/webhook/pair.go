package webhook

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"time"
)

const (
	// lifetime of a certificate, and how long before its end the next is made.
	lifetime, renewBefore = 90 * 24 * time.Hour, 30 * 24 * time.Hour
	// settle is how long a new certificate is trusted before it is served: every
	// replica and every API server has seen it by then.
	settle = time.Hour
	// skew is how far clocks may differ.
	skew = 5 * time.Minute
	// maxPairs that are kept: the one that is served, and the next.
	maxPairs = 2
)

// pair is a certificate, which is its own authority, and its key. Who trusts it
// trusts nothing else: there is no key that could sign another.
type pair struct {
	tls.Certificate
	made time.Time
}

// newPair makes a certificate for names.
func newPair(names []string, now time.Time) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return pair{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "kvscout-webhook"}, DNSNames: names,
		NotBefore: now.Add(-skew), NotAfter: now.Add(lifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return pair{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return pair{}, err
	}
	return pair{tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, leaf.NotBefore.Add(skew)}, nil
}

// parsePairs reads what encodePairs wrote, oldest first.
func parsePairs(text []byte) (pairs []pair, err error) {
	for {
		var blocks [2]*pem.Block
		for i := range blocks {
			if blocks[i], text = pem.Decode(text); blocks[i] == nil {
				if i == 1 {
					return nil, errors.New("a certificate without its key")
				}
				return pairs, nil
			}
		}
		c, err := tls.X509KeyPair(pem.EncodeToMemory(blocks[0]), pem.EncodeToMemory(blocks[1]))
		if err != nil {
			return nil, fmt.Errorf("read the certificate: %w", err)
		}
		pairs = append(pairs, pair{c, c.Leaf.NotBefore.Add(skew)})
		if len(pairs) > maxPairs {
			return nil, fmt.Errorf("more than %d certificates", maxPairs)
		}
	}
}

// encodePairs writes certificates with their keys, as PEM.
func encodePairs(pairs []pair) ([]byte, error) {
	var b bytes.Buffer
	for _, p := range pairs {
		key, err := x509.MarshalPKCS8PrivateKey(p.PrivateKey)
		if err != nil {
			return nil, err
		}
		err = errors.Join(pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: p.Certificate.Certificate[0]}), pem.Encode(&b, &pem.Block{Type: "PRIVATE KEY", Bytes: key}))
		if err != nil {
			return nil, err
		}
	}
	return b.Bytes(), nil
}

// renew drops what is expired or for other names, and adds a certificate if the
// newest ends soon. changed tells whether it did anything.
func renew(pairs []pair, names []string, now time.Time) (kept []pair, changed bool, err error) {
	for _, p := range pairs {
		fits := now.Before(p.Leaf.NotAfter)
		for _, name := range names {
			fits = fits && p.Leaf.VerifyHostname(name) == nil
		}
		if fits {
			kept = append(kept, p)
		}
	}
	changed = len(kept) != len(pairs)
	if n := len(kept); n == 0 || now.Add(renewBefore).After(kept[n-1].Leaf.NotAfter) {
		next, err := newPair(names, now)
		if err != nil {
			return nil, false, fmt.Errorf("make a certificate: %w", err)
		}
		kept = append(kept[max(0, n+1-maxPairs):], next)
		changed = true
	}
	return kept, changed, nil
}

// serving is the certificate to serve: the newest that is settled, else the
// oldest.
func serving(pairs []pair, now time.Time) *tls.Certificate {
	for i := len(pairs) - 1; i > 0; i-- {
		if !now.Before(pairs[i].made.Add(settle)) {
			return &pairs[i].Certificate
		}
	}
	return &pairs[0].Certificate
}

// bundle is what API servers are to trust, as PEM.
func bundle(pairs []pair) []byte {
	var text []byte
	for _, p := range pairs {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.Certificate.Certificate[0]})...)
	}
	return text
}
