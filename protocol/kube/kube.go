// Package kube asks Kubernetes' API server with the token of a pod's service
// account: one request at a time, or a list that is followed. It knows how the
// server answers, and no object: callers say what they read of theirs.
package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// maxAnswer bounds an answer of the API server, in bytes; askWithin its time.
	maxAnswer = 32 << 20
	askWithin = 10 * time.Second
	// pingAfter a silent time a connection is asked for a sign of life, which may take
	// pingWait: one that carries nothing would look like a list that never changes.
	pingAfter, pingWait = 5 * time.Second, 5 * time.Second
	// maxMessage bounds what is quoted of an error.
	maxMessage = 200
)

// ServiceAccount is the folder where Kubernetes puts that of a pod.
const ServiceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// Content types of patches.
const (
	JSONPatch  = "application/json-patch+json"
	MergePatch = "application/merge-patch+json"
)

// Discover is the URL of the API server: the one given, or that of the cluster that
// the program runs in, by its environment.
func Discover(given string, getenv func(string) string) (string, error) {
	if host := getenv("KUBERNETES_SERVICE_HOST"); given == "" && host != "" {
		given = "https://" + net.JoinHostPort(host, getenv("KUBERNETES_SERVICE_PORT"))
	}
	if u, err := url.Parse(given); err != nil || u.Scheme != "https" || u.Host == "" {
		return "", errors.New("want https://host:port, and KUBERNETES_SERVICE_HOST is not set")
	}
	return strings.TrimRight(given, "/"), nil
}

// Client asks one API server. Its zero value is not usable. It is safe for
// concurrent use.
type Client struct {
	url    string // https://host:port
	folder string // token and ca.crt, which are renewed

	mu   sync.Mutex // guards what follows
	ca   []byte
	http *http.Client // trusts ca; nil before the first request
}

// New returns a client; folder is that of a service account.
func New(url, folder string) *Client {
	return &Client{url: strings.TrimRight(url, "/"), folder: folder}
}

// Close the connections that are kept.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.http != nil {
		c.http.CloseIdleConnections()
	}
}

// Error is the API server's own word that it does not do what it was asked.
type Error struct {
	Code    int    // of HTTP
	Message string // as the server says it, shortened
	// After is when to ask again; 0: it does not say.
	After time.Duration
	text  string
}

func (e *Error) Error() string { return e.text }

// IsCode tells whether an error is the API server's with that code of HTTP.
func IsCode(err error, code int) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

// Do one request; in and out are JSON, and may be nil. A contentType is needed where
// in is a patch.
func (c *Client) Do(ctx context.Context, method, path, contentType string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	resp, err := c.send(ctx, method, path, contentType, in)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("%s %s: %w", method, path, err)
	case len(text) > maxAnswer:
		return fmt.Errorf("%s %s: an answer of more than %d bytes", method, path, maxAnswer)
	case out == nil:
		return nil
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// send a request; the answer is one of success.
func (c *Client) send(ctx context.Context, method, path, contentType string, in any) (*http.Response, error) {
	token, err := os.ReadFile(filepath.Join(c.folder, "token"))
	if err != nil {
		return nil, err
	}
	client, err := c.trusting()
	if err != nil {
		return nil, err
	}
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Accept", "application/json")
	if in != nil && contentType == "" {
		contentType = "application/json"
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var status struct {
		Message string `json:"message"`
	}
	_ = json.Unmarshal(text, &status)
	e := &Error{Code: resp.StatusCode, Message: shorten(status.Message)}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.After = time.Duration(min(max(seconds, 0), 60)) * time.Second
	}
	e.text = fmt.Sprintf("%s %s: %s: %s", method, strings.SplitN(path, "?", 2)[0], resp.Status, e.Message)
	return nil, e
}

func shorten(text string) string { return strings.ToValidUTF8(text[:min(len(text), maxMessage)], "") }

// trusting is a client of HTTP that trusts the CA that the folder has at present.
func (c *Client) trusting() (*http.Client, error) {
	name := filepath.Join(c.folder, "ca.crt")
	ca, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.http != nil && bytes.Equal(ca, c.ca) {
		return c.http, nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s holds no certificate", name)
	}
	if c.http != nil {
		c.http.CloseIdleConnections()
	}
	c.ca = ca
	c.http = &http.Client{
		Transport: &http.Transport{
			TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout: askWithin,
			DialContext:         (&net.Dialer{Timeout: askWithin}).DialContext,
			ForceAttemptHTTP2:   true,
			HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingWait},
			IdleConnTimeout:     time.Minute,
			MaxIdleConnsPerHost: 4,
		},
		// The token is not to go where an answer points.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c.http, nil
}
