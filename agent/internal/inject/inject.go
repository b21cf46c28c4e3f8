// Package inject decides what is added to a pod so that each vLLM engine in it
// has its agent: a native sidecar, configured by what the engine's command
// says. It is pure: a pod and settings in, changes and sentences out. Whether
// they are written into a file or sent to an API server is left to others.
//
// A pod in which an agent stands already is left alone, so a decision may be
// asked for again at any time. What is not understood is left alone too, and
// said.
package inject

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

const (
	// Domain is what labels and annotations of ours begin with.
	Domain = "kvscout.io/"
	// Label of a namespace or a pod: "enabled" asks for agents, "disabled"
	// refuses them.
	Label = Domain + "inject"
	// AgentLabel is "true" on pods that got an agent, for network policies.
	AgentLabel = Domain + "agent"
	// Settings of the agent by annotations: agentSetting + the flag's name.
	agentSetting = "agent." + Domain
	// Annotations that decide: which containers are engines, separated by commas;
	// whether events may be switched on; and, written by us, what was done.
	containerAnnotation = Domain + "container"
	enableAnnotation    = Domain + "enable-events"
	statusAnnotation    = Domain + "status"
	// agentName of the container, and what names of several begin with.
	agentName = "kvscout-agent"
	// adminPort of the first agent.
	adminPort = 9478
	// maxAgents in a pod: names of their ports have one digit.
	maxAgents = 10
	// maxWarning and maxStatus bound a sentence and all of them, in bytes: what
	// stands in a pod must not make it one that the API server refuses.
	maxWarning, maxStatus = 400, 4 << 10
	// mirrorAnnotation is on pods that stand for those that a node runs by itself:
	// they must stay as they are.
	mirrorAnnotation = "kubernetes.io/config.mirror"
)

// Decision about a pod.
type Decision struct {
	// Changes to the pod, in this order; none: it stays as it is.
	Changes []Change
	// Engines are the containers that got an agent.
	Engines []string
	// Warnings for whoever runs the pod, one sentence each, also why it was left
	// alone. They stand in the pod's annotation Domain + "status" too, if it was
	// changed.
	Warnings []string
}

// Op is an operation of JSON Patch.
type Op string

// Add puts a value into an object, or behind a list's last ("-"). Replace puts
// it in the place of another.
const (
	Add     Op = "add"
	Replace Op = "replace"
)

// Change is an operation of JSON Patch (RFC 6902) on the pod.
type Change struct {
	Op    Op     `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// Decide what to add to a pod. workload is kind/name of what it belongs to,
// where the pod does not say so itself; it may be empty.
func Decide(pod Pod, workload string, s Settings) Decision {
	d := decision{pod: pod, settings: s, workload: workload, ports: newPorts(pod.Spec)}
	if own := pod.Metadata.workload(); own != "" {
		d.workload = own
	}
	_, mirror := pod.Metadata.Annotations[mirrorAnnotation]
	if pod.Metadata.Labels[Label] == "disabled" || mirror || pod.Spec.OS.Name == "windows" {
		return Decision{}
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if c.Name == agentName || strings.HasPrefix(c.Name, agentName+"-") || imageName(c.Image) == agentName {
			return Decision{} // it has its agent
		}
	}
	for _, v := range pod.Spec.Volumes {
		if v.Name == stateVolume || v.Name == natsVolume {
			return Decision{Warnings: []string{fmt.Sprintf("left alone: it has a volume %s, and no agent", v.Name)}}
		}
	}
	engines := d.find()
	if len(engines) > maxAgents {
		d.warn("left alone: %d engines, at most %d", len(engines), maxAgents)
		engines = nil
	}
	for i, e := range engines {
		d.add(e, i, len(engines))
	}
	if len(d.Engines) > 0 {
		d.finish()
	}
	return d.Decision
}

// decision while it is made.
type decision struct {
	Decision
	pod      Pod
	settings Settings
	workload string
	ports    *ports
	agents   []*sidecar
}

func (d *decision) warn(format string, args ...any) {
	text := shorten(fmt.Sprintf(format, args...), maxWarning)
	if !slices.Contains(d.Warnings, text) {
		d.Warnings = append(d.Warnings, text)
	}
}

// engine is a container that runs vLLM's server.
type engine struct {
	Container
	path string // in the pod
	flags
	// invocation is nil if what the container runs is not written in the pod.
	*invocation
}

// imageName is an image's name without registry, folders, tag and digest.
func imageName(image string) string {
	name, _, _ := strings.Cut(path.Base(image), "@")
	name, _, _ = strings.Cut(name, ":")
	return name
}

// seemsEngine tells whether an image is likely to be one of vLLM's server.
func seemsEngine(image string) bool {
	name := imageName(image)
	return strings.Contains(name, "vllm") && !strings.Contains(name, "router")
}

// find the engines of a pod: as annotated, else by what containers run, else by
// their image and port.
func (d *decision) find() (found []engine) {
	if names, given := d.pod.Metadata.Annotations[containerAnnotation]; given {
		return d.annotatedEngines(names)
	}
	asked := d.pod.Metadata.Labels[Label] == "enabled"
	var guesses []engine
	for i, c := range d.pod.Spec.Containers {
		e, opaque, err := read(c, fmt.Sprintf("/spec/containers/%d", i))
		switch {
		case err != nil:
			if asked || seemsEngine(c.Image) {
				d.warn("container %s is left alone: %v", c.Name, err)
			}
		case e != nil:
			found = append(found, *e)
		case opaque && (seemsEngine(c.Image) && len(c.Ports) == 1 || asked && declares(c, 8000)):
			guesses = append(guesses, unread(c, fmt.Sprintf("/spec/containers/%d", i)))
		}
	}
	if len(found) == 0 && len(guesses) == 1 {
		d.warn("container %s is taken for the engine by its image and port: its command is not written in the pod", guesses[0].Name)
		return guesses
	}
	if len(found) == 0 && len(d.Warnings) == 0 && asked {
		d.warn("left alone: no container starts vLLM; name the one that does by the annotation %s", containerAnnotation)
	}
	return found
}

// annotatedEngines are the containers of these names.
func (d *decision) annotatedEngines(names string) (found []engine) {
	for name := range strings.SplitSeq(names, ",") {
		name = strings.TrimSpace(name)
		i := slices.IndexFunc(d.pod.Spec.Containers, func(c Container) bool { return c.Name == name })
		if i < 0 {
			d.warn("left alone: the annotation %s names the container %.80q, which the pod does not have", containerAnnotation, name)
			return nil
		}
		if slices.ContainsFunc(found, func(e engine) bool { return e.Name == name }) {
			continue
		}
		at := fmt.Sprintf("/spec/containers/%d", i)
		e, _, err := read(d.pod.Spec.Containers[i], at)
		switch {
		case err != nil:
			d.warn("container %s is left alone: %v", name, err)
		case e != nil:
			found = append(found, *e)
		default:
			found = append(found, unread(d.pod.Spec.Containers[i], at))
		}
	}
	return found
}

func declares(c Container, port int) bool {
	for _, p := range c.Ports {
		if p.Number == port {
			return true
		}
	}
	return false
}

// unread is an engine whose command is not written in the pod.
func unread(c Container, at string) engine {
	return engine{Container: c, path: at, flags: flags{hidden: []string{"the command of container " + c.Name}}}
}

// read a container; nil if it does not start vLLM's server as far as can be seen.
// opaque tells that what it starts cannot be seen. An error says why an engine
// can have no agent.
func read(c Container, at string) (e *engine, opaque bool, err error) {
	list, opaque, err := invocations(c)
	switch {
	case err != nil:
		return nil, opaque, err
	case len(list) > 1:
		return nil, false, fmt.Errorf("it starts vLLM %d times; give each engine a container", len(list))
	case len(list) == 0 && !opaque && seemsEngine(c.Image) && len(c.Args) > 0:
		// The image starts vLLM, with these arguments.
		env := newVariables(c)
		i := invocation{}
		for n, text := range c.Args {
			i.last = place{list: "args", index: n}
			i.args = append(i.args, argument(text, i.last, env))
		}
		if f := parseFlags(i.args); !f.has("model") && strings.HasPrefix(i.args[0].text, "-") {
			return nil, true, nil // other arguments than vLLM's
		}
		list = append(list, i)
	case len(list) == 0:
		return nil, opaque, nil
	}
	e = &engine{Container: c, path: at, flags: parseFlags(list[0].args), invocation: &list[0]}
	if e.has("config") {
		e.hidden = append(e.hidden, "the file of --config")
	}
	for _, unfit := range []struct{ flag, why string }{
		{"headless", "it has no HTTP server of its own (--headless); its ranks are those of the pod that has it"},
		{"uds", "it serves on a socket file (--uds), which agents cannot ask"},
		{"grpc", "it serves gRPC (--grpc), which agents cannot ask"},
	} {
		if e.has(unfit.flag) {
			return nil, false, errors.New(unfit.why)
		}
	}
	return e, false, nil
}

// add an agent for an engine, the ith of so many.
func (d *decision) add(e engine, i, of int) {
	f := e.flags
	say := func(format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		if of > 1 {
			text = "container " + e.Name + ": " + text
		}
		d.warn("%s", text)
	}
	if e.invocation != nil && e.conditional {
		say("vLLM is started under a condition: where it is not, the agent announces nothing")
	}
	url, port, err := d.url(e, f, say)
	if err != nil {
		say("left alone: %v", err)
		return
	}
	seen, on := readEvents(f)
	change, changed := Change{}, false
	if !on && d.pod.Metadata.Annotations[enableAnnotation] == "true" {
		var enabled events
		if change, enabled, err = enableEvents(e, d.ports); err != nil {
			seen.warnings = append(seen.warnings, fmt.Sprintf("events cannot be switched on: %v", err))
		} else {
			seen, changed = enabled, true
		}
	}
	d.advise(f, say)
	admin := adminPort
	if d.pod.Spec.HostNetwork && port != 0 {
		// Agents on one node must not meet at a port, as their engines do not.
		admin = port + adminPort - 8000
		if admin >= 1<<16 {
			admin -= 1 << 15
		}
	}
	a := newSidecar(e, i, of, d.ports.free(admin), d.settings)
	a.set("engine", url)
	a.setVariable("engine-api-key", apiKey(e, f, say))
	a.set("events", seen.endpoint)
	a.set("events-mode", seen.mode)
	a.set("replay", seen.replay)
	a.set("hash-seed", hashSeed(e))
	if method, ok := speculation(f); ok && d.settings.accepts(map[string]string{"speculative": method}) == nil {
		a.set("speculative", method)
	}
	a.set("label", d.labels(f))
	for _, name := range d.annotated() {
		a.override(name, d.pod.Metadata.Annotations[agentSetting+name])
	}
	// An agent that would not start is worse than none: a pod with a container
	// that ends again and again is not ready.
	if err := d.settings.accepts(a.sample()); err != nil {
		say("left alone: the agent would refuse its settings: %v", err)
		return
	}
	if _, told := d.pod.Metadata.Annotations[agentSetting+"events"]; !told {
		for _, w := range seen.warnings {
			say("%s", w)
		}
	}
	if changed {
		d.Changes = append(d.Changes, change)
	}
	d.Engines = append(d.Engines, e.Name)
	d.agents = append(d.agents, a)
}

// annotated are the names of the agent's settings among the pod's annotations.
func (d *decision) annotated() (names []string) {
	for key := range d.pod.Metadata.Annotations {
		if name, ok := strings.CutPrefix(key, agentSetting); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// url of the engine's HTTP server, as the agent reaches it, and its port.
func (d *decision) url(e engine, f flags, say func(string, ...any)) (url string, port int, err error) {
	if _, told := d.pod.Metadata.Annotations[agentSetting+"engine"]; told {
		return "", 0, nil
	}
	port, ok := f.number("port", 8000)
	if !f.has("port") && len(f.hidden) > 0 || !ok {
		// One that is declared is likely the one that is served.
		if len(e.Ports) != 1 {
			return "", 0, fmt.Errorf("its port cannot be read: say %sengine: \"http://127.0.0.1:PORT\"", agentSetting)
		}
		port = e.Ports[0].Number
		say("its port cannot be read: %d is taken, the one that the container declares", port)
	}
	if port < 1 || port > 65535 {
		return "", 0, fmt.Errorf("--port is %d", port)
	}
	host := "127.0.0.1"
	if v, given := f.values["host"]; given {
		switch {
		case v.variable != nil && podIP(*v.variable):
			host = "$(KVSCOUT_POD_IP)"
		case !v.known:
			say("--host cannot be read: the agent asks the engine at 127.0.0.1")
		default:
			if ip, err := netip.ParseAddr(v.text); err == nil && !ip.IsUnspecified() {
				if host = v.text; ip.Is6() {
					host = "[" + host + "]"
				}
			}
		}
	}
	scheme := "http"
	if f.has("ssl-certfile") || f.has("ssl-keyfile") {
		scheme = "https"
		say("the engine speaks TLS: its certificate must be valid for %s, or say its name by %sengine-tls-name", host, agentSetting)
	}
	return scheme + "://" + host + ":" + strconv.Itoa(port), port, nil
}

// podIP tells whether a variable is the pod's IP address.
func podIP(v Variable) bool {
	from, _ := v.From.(map[string]any)
	field, _ := from["fieldRef"].(map[string]any)
	return field["fieldPath"] == "status.podIP"
}

// apiKey is the variable from which the agent takes the engine's key; nil: it has
// none.
func apiKey(e engine, f flags, say func(string, ...any)) *Variable {
	v, given := f.values["api-key"]
	switch {
	case given && v.variable != nil:
		return v.variable
	case given && v.known:
		return &Variable{Value: literal(v.text)}
	case given:
		say("--api-key cannot be read: give the agent the key by %sengine-api-key, or the engine by VLLM_API_KEY", agentSetting)
		return nil
	}
	env := newVariables(e.Container)
	found, text, known := env.lookup("VLLM_API_KEY")
	switch {
	case found != nil && found.From != nil:
		return found
	case known:
		return &Variable{Value: literal(text)}
	}
	return nil
}

// hashSeed is the engine's PYTHONHASHSEED; empty: it is not written in the pod.
func hashSeed(e engine) string {
	_, text, known := newVariables(e.Container).lookup("PYTHONHASHSEED")
	if !known {
		return ""
	}
	return literal(text)
}

// speculation is the engine's method of speculative decoding.
func speculation(f flags) (method string, ok bool) {
	config, _, err := f.object("speculative-config")
	if err != nil || config == nil {
		return "", false
	}
	method, ok = config["method"].(string)
	return method, ok && method != ""
}

// labels that the agent announces.
func (d *decision) labels(f flags) string {
	var list []string
	role := d.pod.Metadata.role()
	if config, _, err := f.object("kv-transfer-config"); role == "" && err == nil {
		switch config["kv_role"] {
		case "kv_producer":
			role = "prefill"
		case "kv_consumer":
			role = "decode"
		}
	}
	if role != "" {
		list = append(list, "kvscout.role="+role)
	}
	if d.workload != "" {
		list = append(list, "kvscout.workload="+d.workload)
	}
	return strings.Join(list, ",")
}

// advise says what keeps an engine's cache from being known.
func (d *decision) advise(f flags, say func(string, ...any)) {
	if f.has("no-enable-prefix-caching") {
		say("prefix caching is off (--no-enable-prefix-caching): the engine is picked by load alone")
	}
	all, ok := f.number("data-parallel-size", 1)
	here, local := f.number("data-parallel-size-local", all)
	if ok && local && here < all && !f.has("data-parallel-external-lb") && !f.has("data-parallel-hybrid-lb") && !f.has("data-parallel-rank") {
		say("%d of %d ranks run in this pod: events of the others do not reach this agent, and they are picked by load alone", here, all)
	}
	if d.pod.Spec.HostNetwork {
		say("the pod uses its node's network: ports of engine, events and agent must be free there")
	}
	if f.has("root-path") {
		say("--root-path is set: the agent asks the engine without it")
	}
}

// finish puts the changes together.
func (d *decision) finish() {
	add := func(path string, value any) { d.Changes = append(d.Changes, Change{Op: Add, Path: path, Value: value}) }
	list := func(path string, absent bool, values ...any) {
		if absent {
			add(path, []any{})
		}
		for _, v := range values {
			add(path+"/-", v)
		}
	}
	var agents []any
	for _, a := range d.agents {
		agents = append(agents, a.container(d.pod.Spec.guaranteed()))
	}
	list("/spec/initContainers", len(d.pod.Spec.InitContainers) == 0, agents...)
	list("/spec/volumes", len(d.pod.Spec.Volumes) == 0, d.settings.volumes()...)
	if d.pod.Metadata.Labels == nil {
		add("/metadata/labels", object{})
	}
	add("/metadata/labels/"+pointer(AgentLabel), "true")
	if d.pod.Metadata.Annotations == nil {
		add("/metadata/annotations", object{})
	}
	add("/metadata/annotations/"+pointer(statusAnnotation), d.status())
}

// status is what the annotation says.
func (d *decision) status() string {
	return shorten(strings.Join(append([]string{"agent beside " + strings.Join(d.Engines, ", ")}, d.Warnings...), "; "), maxStatus)
}

// shorten a text to so many bytes.
func shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-3], "") + "..."
}

// pointer writes a key as part of a JSON pointer.
func pointer(key string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}
