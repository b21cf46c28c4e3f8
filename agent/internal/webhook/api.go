package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	// maxAnswer bounds an answer of the API server, in bytes; askWithin its time.
	maxAnswer = 4 << 20
	askWithin = 10 * time.Second
	// oldest minor release of Kubernetes 1 with native sidecars.
	oldestMinor = 29
)

// api asks Kubernetes' API server with the token of the pod's service account.
type api struct {
	url    string // https://host:port
	folder string // token and ca.crt, which are renewed
}

// errConflict: somebody else changed the object meanwhile.
var errConflict = errors.New("changed by another replica")

// do one request; in and out are JSON, and may be nil.
func (a api) do(ctx context.Context, method, path, contentType string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	token, err := os.ReadFile(filepath.Join(a.folder, "token"))
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(filepath.Join(a.folder, "ca.crt"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return fmt.Errorf("%s holds no certificate", filepath.Join(a.folder, "ca.crt"))
	}
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.url+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	// A request a minute: no connection is kept.
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, DisableKeepAlives: true}}
	resp, err := client.Do(req)
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
	case resp.StatusCode == http.StatusConflict:
		return errConflict
	case resp.StatusCode/100 != 2:
		var status struct {
			Message string `json:"message"`
		}
		_ = json.Unmarshal(text, &status)
		return fmt.Errorf("%s %s: %s: %.200s", method, path, resp.Status, status.Message)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// hasSidecars is nil if the server knows native sidecars. Older ones would drop
// the field that makes an init container one, and pods would never start.
func (a api) hasSidecars(ctx context.Context) error {
	var v struct{ Major, Minor string }
	if err := a.do(ctx, http.MethodGet, "/version", "", nil, &v); err != nil {
		return err
	}
	minor, err := strconv.Atoi(strings.TrimRight(v.Minor, "+"))
	if v.Major != "1" || err != nil {
		return fmt.Errorf("the API server is of Kubernetes %.20s.%.20s, which is not known", v.Major, v.Minor)
	}
	if minor < oldestMinor {
		return fmt.Errorf("%w: the API server is of Kubernetes 1.%d, and native sidecars need 1.%d", errTooOld, minor, oldestMinor)
	}
	return nil
}

var errTooOld = errors.New("no native sidecars")

// secret is what is read and written of a Secret. Data is base64 in JSON.
type secret struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   map[string]any    `json:"metadata"`
	Type       string            `json:"type,omitempty"`
	Data       map[string][]byte `json:"data"`
}

func (a api) secret(ctx context.Context, namespace, name string) (s secret, err error) {
	return s, a.do(ctx, http.MethodGet, "/api/v1/namespaces/"+namespace+"/secrets/"+name, "", nil, &s)
}

// keep a Secret; errConflict if it is not the one that was read any more.
func (a api) keep(ctx context.Context, namespace, name string, s secret) error {
	return a.do(ctx, http.MethodPut, "/api/v1/namespaces/"+namespace+"/secrets/"+name, "application/json", s, nil)
}

// trust writes the bundle into each webhook of a configuration where another
// stands.
func (a api) trust(ctx context.Context, name string, bundle []byte) error {
	path := "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/" + name
	var c struct {
		Webhooks []struct {
			Name   string `json:"name"`
			Client struct {
				Bundle []byte `json:"caBundle"`
			} `json:"clientConfig"`
		} `json:"webhooks"`
	}
	if err := a.do(ctx, http.MethodGet, path, "", nil, &c); err != nil {
		return err
	}
	type change struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value any    `json:"value"`
	}
	var changes []change
	for i, w := range c.Webhooks {
		if !bytes.Equal(w.Client.Bundle, bundle) {
			at := "/webhooks/" + strconv.Itoa(i)
			changes = append(changes, change{"test", at + "/name", w.Name}, change{"add", at + "/clientConfig/caBundle", bundle})
		}
	}
	if len(changes) == 0 {
		return nil
	}
	return a.do(ctx, http.MethodPatch, path, "application/json-patch+json", changes, nil)
}
