package inject

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

const (
	stateVolume, stateFolder = "kvscout-state", "/var/lib/kvscout"
	natsVolume, natsFolder   = "kvscout-nats", "/etc/kvscout/nats"
)

// Settings of all agents. Every field without a default is required.
type Settings struct {
	// Image of the agent.
	Image string
	// PullPolicy of the image; empty: Kubernetes' default.
	PullPolicy string
	// NATSURL as the agent takes it, without a user in it.
	NATSURL string
	// NATSSecret is a Secret in the namespace of each pod with what the agent needs
	// for NATS; empty: none. NATSKeys are those of its keys that are used, of
	// natsFiles.
	NATSSecret string
	NATSKeys   []string
	// Pool of engines; empty: the agent's default.
	Pool string
	// CPU is what an agent requests, Memory what it requests and may use at most:
	// quantities of Kubernetes.
	CPU, Memory string
	// User and group that agents run as; 0: as the namespace gives it, which
	// OpenShift does.
	User int64
	// Accepts checks settings of the agent, by name of flag, as the agent itself
	// does at its start.
	Accepts func(settings map[string]string) error
}

// natsFiles are the keys of a Secret for NATS, and the agent's setting for each.
var natsFiles = map[string]string{
	"seed": "nats-seed", "credentials": "nats-credentials", "ca.crt": "nats-tls-ca", "tls.crt": "nats-tls-cert", "tls.key": "nats-tls-key",
}

var (
	quantity   = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?(m|k|M|G|Ki|Mi|Gi)?$`)
	objectName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
)

// IsName tells whether an object of Kubernetes may have this name.
func IsName(name string) bool { return len(name) <= 253 && objectName.MatchString(name) }

// Validate names what is wrong, each by the flag for it.
func (s Settings) Validate() error {
	var errs []error
	bad := func(name, format string, args ...any) {
		errs = append(errs, fmt.Errorf("-%s: "+format, append([]any{name}, args...)...))
	}
	if s.Image == "" || strings.ContainsAny(s.Image, " \t\n") {
		bad("image", "want an image, for example registry.example.com/kvscout-agent:v0.1.0")
	}
	for part := range strings.SplitSeq(s.NATSURL, ",") {
		if u, err := url.Parse(strings.TrimSpace(part)); err == nil && u.User != nil {
			bad("nats-url", "a user in it could be read in every pod: use -nats-secret")
		}
	}
	switch s.PullPolicy {
	case "", "Always", "IfNotPresent", "Never":
	default:
		bad("image-pull-policy", "%q is none of Always, IfNotPresent, Never", s.PullPolicy)
	}
	if s.NATSSecret != "" {
		if !IsName(s.NATSSecret) {
			bad("nats-secret", "%.80q is no name of a Secret", s.NATSSecret)
		}
		if len(s.NATSKeys) == 0 {
			bad("nats-secret-keys", "is empty")
		}
	}
	for _, key := range s.NATSKeys {
		if natsFiles[key] == "" {
			bad("nats-secret-keys", "%.80q is none of seed, credentials, ca.crt, tls.crt, tls.key", key)
		}
	}
	for _, q := range []struct{ name, value string }{{"cpu", s.CPU}, {"memory", s.Memory}} {
		if !quantity.MatchString(q.value) {
			bad(q.name, "%.80q is no quantity like 200m or 512Mi", q.value)
		}
	}
	if s.User < 0 {
		bad("run-as-user", "%d is negative", s.User)
	}
	if len(errs) == 0 {
		a := newSidecar(engine{}, 0, 1, adminPort, s)
		if err := s.accepts(a.sample()); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// accepts asks the agent about settings; those of NATS are always there.
func (s Settings) accepts(settings map[string]string) error {
	if settings["nats-url"] == "" {
		settings["nats-url"] = s.NATSURL
	}
	return s.Accepts(settings)
}

// volumes that the agents of a pod share.
func (s Settings) volumes() []any {
	list := []any{object{{"name", stateVolume}, {"emptyDir", object{}}}}
	if s.NATSSecret != "" {
		list = append(list, object{{"name", natsVolume}, {"secret", object{{"secretName", s.NATSSecret}}}})
	}
	return list
}

// field and object are JSON that keeps its order.
type field struct {
	key   string
	value any
}

type object []field

// MarshalJSON writes the fields in their order.
func (o object) MarshalJSON() ([]byte, error) {
	text := []byte{'{'}
	for i, f := range o {
		if i > 0 {
			text = append(text, ',')
		}
		key, err := json.Marshal(f.key)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(f.value)
		if err != nil {
			return nil, err
		}
		text = append(append(append(text, key...), ':'), value...)
	}
	return append(text, '}'), nil
}

// sidecar is the container of an agent while it is made. Kubernetes starts it
// before the engine and ends it after. It has no readiness probe, because an
// engine that serves must not leave rotation for its agent, and no startup
// probe, because an engine must not wait for it.
type sidecar struct {
	name     string
	admin    int // port
	env      []Variable
	settings Settings
}

// newSidecar makes the agent of an engine, the ith of so many.
func newSidecar(e engine, i, of, admin int, s Settings) *sidecar {
	a := &sidecar{name: agentName, admin: admin, settings: s}
	reference := func(path string) *Variable {
		return &Variable{From: map[string]any{"fieldRef": map[string]any{"fieldPath": path}}}
	}
	a.setVariable("namespace", reference("metadata.namespace"))
	a.setVariable("pod", reference("metadata.name"))
	a.setVariable("pod-uid", reference("metadata.uid"))
	if of > 1 {
		// Members are told apart by the uid.
		a.name = fmt.Sprintf("%s-%d", agentName, i)
		a.env = append(a.env[:2], Variable{Name: "POD_UID", From: reference("metadata.uid").From})
		a.set("pod-uid", "$(POD_UID)-"+e.Name)
	}
	a.setVariable("pod-ip", reference("status.podIP"))
	a.set("nats-url", literal(s.NATSURL))
	if s.NATSSecret != "" {
		for _, key := range s.NATSKeys {
			a.set(natsFiles[key], natsFolder+"/"+key)
		}
	}
	a.set("pool", literal(s.Pool))
	a.set("admin-address", fmt.Sprintf("0.0.0.0:%d", admin))
	a.set("state-dir", stateFolder)
	return a
}

// variablePrefix and variable: the agent's settings in its environment.
const variablePrefix = "KVSCOUT_"

func variable(setting string) string {
	return variablePrefix + strings.ToUpper(strings.ReplaceAll(setting, "-", "_"))
}

// set a setting of the agent; nothing is said by an empty one.
func (a *sidecar) set(setting, value string) {
	if value != "" {
		a.setVariable(setting, &Variable{Value: value})
	}
}

// setVariable sets a setting to the value of a variable; nil: it is not said.
func (a *sidecar) setVariable(setting string, v *Variable) {
	if v == nil {
		return
	}
	said := Variable{Name: variable(setting), Value: v.Value, From: v.From}
	i := slices.IndexFunc(a.env, func(e Variable) bool { return e.Name == said.Name })
	if i < 0 {
		a.env = append(a.env, said)
		return
	}
	a.env[i] = said
}

// override takes a setting from an annotation. Labels are added to those that
// are there.
func (a *sidecar) override(setting, value string) {
	if i := slices.IndexFunc(a.env, func(e Variable) bool { return e.Name == variable(setting) }); setting == "label" && i >= 0 {
		value = a.env[i].Value + "," + value
	}
	a.setVariable(setting, &Variable{Value: value})
}

// sample gives the agent's settings by name, as they may be in a pod.
func (a *sidecar) sample() map[string]string {
	env := Container{Env: slices.Clone(a.env)}
	for i, v := range env.Env {
		if v.From == nil {
			continue
		}
		text := "secret"
		from, _ := v.From.(map[string]any)
		if f, ok := from["fieldRef"].(map[string]any); ok {
			text = map[any]string{"metadata.uid": "0f3c6c1e-6c54-4a2c-9b2e-5e9c0a7d1b11", "status.podIP": "10.0.0.7"}[f["fieldPath"]]
			text = cmp.Or(text, "name")
		}
		env.Env[i] = Variable{Name: v.Name, Value: text}
	}
	read := newVariables(env)
	settings := make(map[string]string)
	for i, v := range read.list {
		if name, ok := strings.CutPrefix(v.Name, variablePrefix); ok {
			settings[strings.ToLower(strings.ReplaceAll(name, "_", "-"))] = read.texts[i]
		}
	}
	return settings
}

// container as it stands in the pod. guaranteed: the pod's quality of service
// is to stay so, which takes limits that are the requests.
func (a *sidecar) container(guaranteed bool) object {
	s := a.settings
	requests := object{{"cpu", s.CPU}, {"memory", s.Memory}}
	limits := object{{"memory", s.Memory}}
	if guaranteed {
		limits = requests
	}
	security := object{{"allowPrivilegeEscalation", false}, {"capabilities", object{{"drop", []string{"ALL"}}}}, {"readOnlyRootFilesystem", true}, {"runAsNonRoot", true}}
	if s.User != 0 {
		// The pod's own user may be root, which the line above would refuse.
		security = append(security, field{"runAsUser", s.User}, field{"runAsGroup", s.User})
	}
	security = append(security, field{"seccompProfile", object{{"type", "RuntimeDefault"}}})
	mounts := []any{object{{"name", stateVolume}, {"mountPath", stateFolder}}}
	if s.NATSSecret != "" {
		mounts = append(mounts, object{{"name", natsVolume}, {"mountPath", natsFolder}, {"readOnly", true}})
	}
	c := object{{"name", a.name}, {"image", s.Image}}
	if s.PullPolicy != "" {
		c = append(c, field{"imagePullPolicy", s.PullPolicy})
	}
	return append(c,
		field{"restartPolicy", "Always"},
		field{"env", a.env},
		field{"ports", []any{object{{"name", a.name}, {"containerPort", a.admin}}}},
		field{"livenessProbe", object{
			{"httpGet", object{{"path", "/healthz"}, {"port", a.admin}}}, {"periodSeconds", 10}, {"timeoutSeconds", 5}, {"failureThreshold", 6},
		}},
		field{"resources", object{{"requests", requests}, {"limits", limits}}},
		field{"securityContext", security},
		field{"terminationMessagePolicy", "FallbackToLogsOnError"},
		field{"volumeMounts", mounts},
	)
}
