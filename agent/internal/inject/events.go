package inject

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// Where engines publish and replay their events by convention; rank r is at the
// port + r.
const (
	eventsPort   = 5557
	replayOffset = 100
)

// events is what an engine's arguments say of its KV events, as the agent needs
// it; empty: by convention, or as the engine reports.
type events struct {
	endpoint, mode, replay string
	warnings               []string
}

// readEvents reads --kv-events-config. on is false if it is not given or says
// that events are off.
func readEvents(f flags) (e events, on bool) {
	config, _, err := f.object("kv-events-config")
	warn := func(format string, args ...any) { e.warnings = append(e.warnings, fmt.Sprintf(format, args...)) }
	switch {
	case err != nil:
		warn("%v: the agent looks for events where the engine reports them, else at port %d", err, eventsPort)
		return e, true
	case config == nil && len(f.hidden) > 0:
		warn("whether events are switched on cannot be read: %s is not written in the pod", strings.Join(f.hidden, ", "))
		return e, true
	case config == nil:
		warn("events are not switched on: without --kv-events-config the engine is picked by load alone; %senable-events: \"true\" switches them on", Domain)
		return e, false
	}
	if enabled, _ := config["enable_kv_cache_events"].(bool); !enabled || config["publisher"] == "null" {
		warn("events are not switched on in --kv-events-config: the engine is picked by load alone; %senable-events: \"true\" switches them on", Domain)
		return e, false
	}
	endpoint, _ := config["endpoint"].(string)
	if endpoint == "" {
		endpoint = "tcp://*:" + strconv.Itoa(eventsPort)
	}
	host, port := tcp(endpoint)
	binds := strings.Contains(host, "*") || strings.Contains(host, "::")
	switch {
	case port == "0":
		// The system chooses it, and the engine reports it.
	case port == "":
		warn("events at %.80q cannot be reached from another container; want tcp://*:%d", endpoint, eventsPort)
	case binds:
		e.endpoint = "tcp://127.0.0.1:" + port
	case loopback(host):
		e.endpoint, e.mode = "tcp://127.0.0.1:"+port, "bind"
	default:
		warn("the engine sends its events to %.80q and to nobody else: the agent hears none until they are at tcp://*:%d", endpoint, eventsPort)
	}
	replay, _ := config["replay_endpoint"].(string)
	_, port = tcp(replay)
	switch {
	case replay == "":
		e.replay = "none"
		warn("no replay_endpoint in --kv-events-config: each lost connection to the engine costs the whole cache state")
	case port == "":
		warn("replay at %.80q cannot be reached from another container; want tcp://*:%d", replay, eventsPort+replayOffset)
	case port != "0":
		e.replay = "tcp://127.0.0.1:" + port
	}
	return e, true
}

// tcp splits an endpoint of ZeroMQ; an empty port: it is not one of TCP.
func tcp(endpoint string) (host, port string) {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	i := strings.LastIndexByte(rest, ':')
	if !ok || i < 0 {
		return "", ""
	}
	if n, err := strconv.Atoi(rest[i+1:]); err != nil || n < 0 || n > 65535 {
		return "", ""
	}
	return rest[:i], rest[i+1:]
}

func loopback(host string) bool {
	return host == "127.0.0.1" || host == "localhost" || host == "0.0.0.0"
}

// enableEvents switches the events of an engine on: it gives the change of its
// command, and what the agent is to know.
func enableEvents(eng engine, ports *ports) (Change, events, error) {
	f, path := eng.flags, eng.path
	config, whole, err := f.object("kv-events-config")
	if err != nil {
		return Change{}, events{}, err
	}
	if len(f.hidden) > 0 {
		return Change{}, events{}, fmt.Errorf("%s is not written in the pod, and may configure them", strings.Join(f.hidden, ", "))
	}
	if config != nil && !whole {
		return Change{}, events{}, fmt.Errorf("--kv-events-config is given key by key")
	}
	ranks, ok := f.number("data-parallel-size", 1)
	if !ok || ranks < 1 || ranks > replayOffset {
		return Change{}, events{}, fmt.Errorf("--data-parallel-size cannot be read")
	}
	if config == nil {
		config = make(map[string]any)
	}
	config["enable_kv_cache_events"], config["publisher"] = true, "zmq"
	if config["endpoint"] == nil {
		config["endpoint"] = "tcp://*:" + strconv.Itoa(ports.events(ranks))
	}
	if _, port := tcp(fmt.Sprint(config["endpoint"])); config["replay_endpoint"] == nil && port != "" && port != "0" {
		n, _ := strconv.Atoi(port)
		config["replay_endpoint"] = "tcp://*:" + strconv.Itoa(n+replayOffset)
	}
	text, err := json.Marshal(config)
	if err != nil {
		return Change{}, events{}, err
	}
	v, given := f.values["kv-events-config"]
	said := flagValue{word: word{text: string(text), known: true}}
	e, _ := readEvents(flags{values: map[string]flagValue{"kv-events-config": said}})
	value := strings.ReplaceAll(string(text), "$", "$$") // for the kubelet
	if eng.script {
		quoted := "'" + strings.ReplaceAll(value, "'", `'\''`) + "'"
		at, text := eng.last, " --kv-events-config "+quoted
		at.begin = at.end
		if given {
			at, text = v.at, v.prefix+quoted
		}
		list := eng.Args
		if at.list == "command" {
			list = eng.Command
		}
		source := list[at.index]
		return Change{Op: Replace, Path: fmt.Sprintf("%s/%s/%d", path, at.list, at.index), Value: source[:at.begin] + text + source[at.end:]}, e, nil
	}
	if given {
		return Change{Op: Replace, Path: fmt.Sprintf("%s/%s/%d", path, v.at.list, v.at.index), Value: v.prefix + value}, e, nil
	}
	return Change{Op: Add, Path: path + "/" + eng.last.list + "/-", Value: "--kv-events-config=" + value}, e, nil
}

// ports of a pod that are spoken for.
type ports struct {
	taken map[int]bool
}

// newPorts finds them: those that containers declare, and numbers in their
// variables, which may be some.
func newPorts(s Spec) *ports {
	p := &ports{taken: make(map[int]bool)}
	for _, list := range [][]Container{s.InitContainers, s.Containers} {
		for _, c := range list {
			for _, port := range c.Ports {
				p.taken[port.Number] = true
			}
			for _, v := range c.Env {
				if n, err := strconv.Atoi(v.Value); err == nil {
					p.taken[n] = true
				}
			}
		}
	}
	return p
}

// free is the first port that is free from this one on; it is taken then.
func (p *ports) free(from int) int {
	for p.taken[from] {
		from++
	}
	p.taken[from] = true
	return from
}

// events is a free port for the events of so many ranks, with room for their
// replays at replayOffset from it. It is taken then.
func (p *ports) events(ranks int) int {
	const step = 2 * replayOffset
	base := eventsPort
	for ; base+step < 1<<16; base += step {
		free := true
		for r := range ranks {
			free = free && !p.taken[base+r] && !p.taken[base+replayOffset+r]
		}
		if free {
			break
		}
	}
	for r := range ranks {
		p.taken[base+r], p.taken[base+replayOffset+r] = true, true
	}
	return base
}
