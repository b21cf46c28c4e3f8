package cluster

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/protocol/kube"
)

// Token is what the API server says of a pod's token.
type Token struct {
	Namespace, Pod, UID string
	Expires             time.Time
}

// ErrToken says that a token is not one of a pod, for this audience, at this time.
var ErrToken = errors.New("the token is not valid")

// Names of what a token of a pod says besides its user.
const (
	extraPod = "authentication.kubernetes.io/pod-name"
	extraUID = "authentication.kubernetes.io/pod-uid"
)

// Review asks the API server whose token it is. The error is ErrToken where that is
// nobody's who may use it, and another where the server did not say.
func Review(ctx context.Context, client *kube.Client, audience, token string) (Token, error) {
	var review struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Spec       struct {
			Token     string   `json:"token"`
			Audiences []string `json:"audiences"`
		} `json:"spec"`
	}
	review.APIVersion, review.Kind = "authentication.k8s.io/v1", "TokenReview"
	review.Spec.Token, review.Spec.Audiences = token, []string{audience}
	var answer struct {
		Status struct {
			Authenticated bool     `json:"authenticated"`
			Audiences     []string `json:"audiences"`
			Error         string   `json:"error"`
			User          struct {
				Username string              `json:"username"`
				Extra    map[string][]string `json:"extra"`
			} `json:"user"`
		} `json:"status"`
	}
	if err := client.Do(ctx, "POST", "/apis/authentication.k8s.io/v1/tokenreviews", "", review, &answer); err != nil {
		return Token{}, err
	}
	s := &answer.Status
	if !s.Authenticated {
		return Token{}, fmt.Errorf("%w, by Kubernetes: %.200s", ErrToken, strings.ReplaceAll(s.Error, token, "..."))
	}
	// A server that does not know of audiences says nothing of them.
	if !slices.Contains(s.Audiences, audience) {
		return Token{}, fmt.Errorf("%w: it is not for the audience %q", ErrToken, audience)
	}
	one := func(name string) string {
		if list := s.User.Extra[name]; len(list) == 1 {
			return list[0]
		}
		return ""
	}
	account, is := strings.CutPrefix(s.User.Username, "system:serviceaccount:")
	namespace, _, both := strings.Cut(account, ":")
	t := Token{Namespace: namespace, Pod: one(extraPod), UID: one(extraUID)}
	if !is || !both || !isLabel(namespace) || t.Pod == "" || t.UID == "" {
		return Token{}, fmt.Errorf("%w: it is %.100q's and not bound to a pod", ErrToken, s.User.Username)
	}
	var err error
	if t.Expires, err = expiry(token); err != nil {
		return Token{}, fmt.Errorf("%w: %w", ErrToken, err)
	}
	return t, nil
}

// expiry is when a token ends, by itself; the API server has checked what it says.
func expiry(token string) (time.Time, error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, errors.New("it is no JWT")
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	var claims struct {
		Expires int64 `json:"exp"`
	}
	if err == nil {
		err = json.Unmarshal(text, &claims)
	}
	if err != nil || claims.Expires <= 0 {
		return time.Time{}, errors.New("it does not say when it ends")
	}
	return time.Unix(claims.Expires, 0), nil
}
