package webhook

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/kvscout/kvscout/agent/internal/inject"
)

const (
	reviewVersion, reviewKind = "admission.k8s.io/v1", "AdmissionReview"
	// maxWarning bounds a warning, in bytes: API servers cut longer ones.
	maxWarning = 256
)

// review is an AdmissionReview: what is read of it, and what is answered.
type review struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Request    *request  `json:"request,omitempty"`
	Response   *response `json:"response,omitempty"`
}

type request struct {
	UID       string          `json:"uid"`
	Namespace string          `json:"namespace"`
	Operation string          `json:"operation"`
	Kind      groupKind       `json:"kind"`
	Object    json.RawMessage `json:"object"`
}

type groupKind struct {
	Group string `json:"group"`
	Kind  string `json:"kind"`
}

type response struct {
	UID       string   `json:"uid"`
	Allowed   bool     `json:"allowed"`
	PatchType string   `json:"patchType,omitempty"`
	Patch     []byte   `json:"patch,omitempty"`
	Warnings  []string `json:"warnings,omitempty"`
}

// answered is what came of a pod, for the log.
type answered struct {
	namespace, name string
	inject.Decision
}

// answer a review. Every pod is admitted; an error is about the review itself.
func answer(body []byte, decide func(inject.Pod) inject.Decision) (text []byte, what answered, err error) {
	var in review
	if err := json.Unmarshal(body, &in); err != nil {
		return nil, what, fmt.Errorf("read the review: %w", err)
	}
	if in.APIVersion != reviewVersion || in.Kind != reviewKind {
		return nil, what, fmt.Errorf("want %s of %s, got %.80q of %.80q", reviewKind, reviewVersion, in.Kind, in.APIVersion)
	}
	if in.Request == nil || in.Request.UID == "" {
		return nil, what, errors.New("a review without a request")
	}
	out := &response{UID: in.Request.UID, Allowed: true}
	if in.Request.Operation == "CREATE" && in.Request.Kind == (groupKind{Kind: "Pod"}) {
		var pod inject.Pod
		if err := json.Unmarshal(in.Request.Object, &pod); err != nil {
			return nil, what, fmt.Errorf("read the pod: %w", err)
		}
		what = answered{in.Request.Namespace, pod.Metadata.Name, decide(pod)}
		if what.name == "" {
			what.name = pod.Metadata.GenerateName
		}
		if len(what.Changes) > 0 {
			if out.Patch, err = json.Marshal(what.Changes); err != nil {
				return nil, what, err
			}
			out.PatchType = "JSONPatch"
		}
		for _, w := range what.Warnings {
			w = "kvscout: " + w
			if len(w) > maxWarning {
				w = strings.ToValidUTF8(w[:maxWarning-3], "") + "..."
			}
			out.Warnings = append(out.Warnings, w)
		}
	}
	text, err = json.Marshal(review{APIVersion: reviewVersion, Kind: reviewKind, Response: out})
	return text, what, err
}
