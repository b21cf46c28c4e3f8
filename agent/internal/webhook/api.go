package webhook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvscout/kvscout/protocol/kube"
)

// oldestMinor release of Kubernetes 1 with native sidecars.
const oldestMinor = 29

// api is what the webhook asks of Kubernetes' API server.
type api struct{ *kube.Client }

// hasSidecars is nil if the server knows native sidecars. Older ones would drop
// the field that makes an init container one, and pods would never start.
func (a api) hasSidecars(ctx context.Context) error {
	var v struct{ Major, Minor string }
	if err := a.Do(ctx, http.MethodGet, "/version", "", nil, &v); err != nil {
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
	return s, a.Do(ctx, http.MethodGet, "/api/v1/namespaces/"+namespace+"/secrets/"+name, "", nil, &s)
}

// keep a Secret; the error is a conflict if it is not the one that was read any more.
func (a api) keep(ctx context.Context, namespace, name string, s secret) error {
	return a.Do(ctx, http.MethodPut, "/api/v1/namespaces/"+namespace+"/secrets/"+name, "", s, nil)
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
	if err := a.Do(ctx, http.MethodGet, path, "", nil, &c); err != nil {
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
	return a.Do(ctx, http.MethodPatch, path, kube.JSONPatch, changes, nil)
}
