package inject

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// settings whose agent takes everything but the setting "refused" and unknown
// methods of speculation.
func settings() Settings {
	return Settings{Image: "r/kvscout-agent:v1", NATSURL: "nats://n:4222", CPU: "200m", Memory: "512Mi", User: 65532, Accepts: func(s map[string]string) error {
		if _, ok := s["refused"]; ok || s["speculative"] == "unheard-of" {
			return errors.New("refused")
		}
		return nil
	}}
}

// decideOn a pod of one container, written as JSON.
func decideOn(t *testing.T, container, annotations string) (Decision, map[string]string) {
	t.Helper()
	var pod Pod
	if annotations == "" {
		annotations = "{}"
	}
	text := `{"metadata":{"annotations":` + annotations + `},"spec":{"containers":[` + container + `]}}`
	if err := json.Unmarshal([]byte(text), &pod); err != nil {
		t.Fatal(err)
	}
	d := Decide(pod, "", settings())
	return d, env(t, d)
}

// env of the first agent, by setting; what comes from elsewhere is its source.
func env(t *testing.T, d Decision) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, c := range d.Changes {
		if c.Path != "/spec/initContainers/-" {
			continue
		}
		text, err := json.Marshal(c.Value)
		if err != nil {
			t.Fatal(err)
		}
		var agent struct {
			Env []struct {
				Name, Value string
				ValueFrom   json.RawMessage
			}
		}
		if err := json.Unmarshal(text, &agent); err != nil {
			t.Fatal(err)
		}
		for _, e := range agent.Env {
			name, ours := strings.CutPrefix(e.Name, "KVSCOUT_")
			if ours {
				found[strings.ToLower(strings.ReplaceAll(name, "_", "-"))] = e.Value + string(e.ValueFrom)
			}
		}
		return found
	}
	return nil
}

// shell is a container that runs one.
func shell(t *testing.T, text, rest string) string {
	t.Helper()
	asJSON, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	return `{"name":"main","image":"ours","command":["sh","-c",` + string(asJSON) + `]` + rest + `}`
}

const eventsOn = `--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'`

// TestScriptsOfTheShellAreRead: what a shell would make of words, where that is
// written in the pod.
func TestScriptsOfTheShellAreRead(t *testing.T) {
	const port9 = `,"env":[{"name":"PORT","value":"9000"}]`
	for text, want := range map[string]string{
		`vllm serve m --port 9000`:                                           "http://127.0.0.1:9000",
		`exec /opt/venv/bin/vllm serve m --port=9000`:                        "http://127.0.0.1:9000",
		`vllm serve m`:                                                       "http://127.0.0.1:8000",
		"vllm serve m \\\n  --port \\\n  9000":                               "http://127.0.0.1:9000",
		`vllm serve m --port "$PORT"`:                                        "http://127.0.0.1:9000",
		`vllm serve m --port ${PORT}`:                                        "http://127.0.0.1:9000",
		`vllm serve m --port $(PORT)`:                                        "http://127.0.0.1:9000",
		`vllm serve m --port $((PORT + 1))`:                                  "http://127.0.0.1:9001",
		`vllm serve m --port ${OTHER:-9002}`:                                 "http://127.0.0.1:9002",
		`PORT=9003; vllm serve m --port $PORT`:                               "http://127.0.0.1:9003",
		`export PORT=9003 && vllm serve m --port $PORT`:                      "http://127.0.0.1:9003",
		`vllm serve m --port '9000' 2>&1 | tee /tmp/log`:                     "http://127.0.0.1:9000",
		`(sleep 5; curl localhost) & vllm serve m --port 9000`:               "http://127.0.0.1:9000",
		`nohup numactl -N 0 vllm serve m --port 9000 &`:                      "http://127.0.0.1:9000",
		`HF_HOME=/x python -m vllm.entrypoints.openai.api_server --port 901`: "http://127.0.0.1:901",
		`vllm serve m --port 1 --port 9000`:                                  "http://127.0.0.1:9000",
		`vllm serve m --host 10.0.0.5 --port 9000`:                           "http://10.0.0.5:9000",
		`vllm serve m --host :: --port 9000`:                                 "http://127.0.0.1:9000",
		`vllm serve m --ssl-keyfile k --ssl-certfile c`:                      "https://127.0.0.1:8000",
		// Not known, and so not guessed.
		`PORT=$(cat /port); vllm serve m --port $PORT`:                          "",
		`PORT=1; PORT=2; vllm serve m --port $PORT`:                             "",
		`for PORT in 1 2; do true; done; vllm serve m -port $PORT --port $PORT`: "",
		`vllm serve m --port $1`:                                                "",
		`vllm serve m --port $NOWHERE`:                                          "",
		`vllm serve m --port 99999`:                                             "",
		`vllm serve m "$@"`:                                                     "",
		`echo vllm serves`:                                                      "",
	} {
		_, env := decideOn(t, shell(t, text, port9), "")
		if got := env["engine"]; got != want {
			t.Errorf("%s: engine %q, want %q", text, got, want)
		}
	}
}

// TestValuesFromElsewhereStayThere: a key in a Secret is never copied, and what
// a ConfigMap holds is not guessed.
func TestValuesFromElsewhereStayThere(t *testing.T) {
	const secret = `,"env":[{"name":"KEY","valueFrom":{"secretKeyRef":{"name":"s","key":"k"}}},{"name":"PORT","valueFrom":{"configMapKeyRef":{"name":"c","key":"p"}}}]`
	for _, text := range []string{`vllm serve m --api-key $KEY`, `vllm serve m --api-key "${KEY}"`, `vllm serve m --api-key=x --api-key "$(KEY)"`} {
		if _, env := decideOn(t, shell(t, text, secret), ""); env["engine-api-key"] != `{"secretKeyRef":{"key":"k","name":"s"}}` {
			t.Errorf("%s: key %q", text, env["engine-api-key"])
		}
	}
	d, env := decideOn(t, shell(t, `vllm serve m --port ${PORT:-8000}`, secret), "")
	if env != nil || len(d.Changes) > 0 || !strings.Contains(strings.Join(d.Warnings, " "), "its port cannot be read") {
		t.Errorf("a port in a ConfigMap: %v, %q", env, d.Warnings)
	}
	if _, env := decideOn(t, shell(t, `vllm serve m --api-key 'a$(b)'`, ""), ""); env["engine-api-key"] != "a$$(b)" {
		t.Errorf("a key that the kubelet would expand: %q", env["engine-api-key"])
	}
	if _, env := decideOn(t, shell(t, `vllm serve m`, `,"env":[{"name":"VLLM_API_KEY","value":"plain"},{"name":"PYTHONHASHSEED","value":"7"}]`), ""); env["engine-api-key"] != "plain" || env["hash-seed"] != "7" {
		t.Errorf("%v", env)
	}
}

// TestEventsAreSwitchedOnWhereAllowed, in the form in which the command is
// written, and nothing else of it changes.
func TestEventsAreSwitchedOnWhereAllowed(t *testing.T) {
	const allow = `{"kvscout.io/enable-events":"true"}`
	const config = `{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","publisher":"zmq","replay_endpoint":"tcp://*:5657"}`
	quoted, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ container, path, want string }{
		{shell(t, "vllm serve m --port 1 # end\n", ""), "/spec/containers/0/command/2", "vllm serve m --port 1 --kv-events-config '" + config + "' # end\n"},
		{shell(t, "vllm serve m & wait", ""), "/spec/containers/0/command/2", "vllm serve m --kv-events-config '" + config + "' & wait"},
		{shell(t, `vllm serve m --kv-events-config '{"enable_kv_cache_events":false}' --port 1`, ""), "/spec/containers/0/command/2", "vllm serve m --kv-events-config '" + config + "' --port 1"},
		{shell(t, `vllm serve m --kv-events-config="{}"`, ""), "/spec/containers/0/command/2", "vllm serve m --kv-events-config='" + config + "'"},
		{`{"name":"main","image":"x","command":["vllm","serve","m"]}`, "/spec/containers/0/command/-", "--kv-events-config=" + config},
		{`{"name":"main","image":"x","command":["vllm","serve"],"args":["m"]}`, "/spec/containers/0/args/-", "--kv-events-config=" + config},
		{`{"name":"main","image":"vllm/vllm-openai","args":["m","--kv-events-config","{}"]}`, "/spec/containers/0/args/2", config},
		{`{"name":"main","image":"vllm/vllm-openai","args":["m","--kv-events-config={}"]}`, "/spec/containers/0/args/1", "--kv-events-config=" + config},
	} {
		d, env := decideOn(t, c.container, allow)
		if len(d.Changes) == 0 || d.Changes[0].Path != c.path || d.Changes[0].Value != c.want {
			t.Errorf("%s:\n%v, want %s at %s", c.container, d.Changes, c.want, c.path)
			continue
		}
		if env["events"] != "tcp://127.0.0.1:5557" || env["replay"] != "tcp://127.0.0.1:5657" {
			t.Errorf("%s: %v", c.container, env)
		}
		if d, _ := decideOn(t, c.container, ""); slices.ContainsFunc(d.Changes, func(x Change) bool { return x.Path == c.path }) {
			t.Errorf("%s: switched on although nobody allowed it", c.container)
		}
	}
	// What somebody else has configured stays.
	for _, args := range []string{
		`"--kv-events-config={\"enable_kv_cache_events\":true,\"endpoint\":\"tcp://router:5557\"}"`, `"--kv-events-config",` + string(quoted), `"--kv-events-config","$(HIDDEN)"`,
		`"--kv-events-config.enable_kv_cache_events","false"`, `"--config","/c.yaml"`,
	} {
		d, env := decideOn(t, `{"name":"main","image":"vllm/vllm-openai","args":["m","--port","1",`+args+`]}`, allow)
		if env == nil || slices.ContainsFunc(d.Changes, func(x Change) bool { return strings.HasPrefix(x.Path, "/spec/containers") }) {
			t.Errorf("%s: %v", args, d.Changes)
		}
	}
}

// TestWhereEventsAre: endpoints as the engine has them, seen from the agent.
func TestWhereEventsAre(t *testing.T) {
	for config, want := range map[string][]string{ // events, mode, replay, part of the warning
		`{"enable_kv_cache_events":true,"endpoint":"tcp://*:6000","replay_endpoint":"tcp://*:6100"}`:       {"tcp://127.0.0.1:6000", "", "tcp://127.0.0.1:6100", ""},
		`{"enable_kv_cache_events":true,"endpoint":"tcp://[::]:6000","replay_endpoint":"tcp://[::]:6100"}`: {"tcp://127.0.0.1:6000", "", "tcp://127.0.0.1:6100", ""},
		`{"enable_kv_cache_events":true,"replay_endpoint":"tcp://*:5657"}`:                                 {"tcp://127.0.0.1:5557", "", "tcp://127.0.0.1:5657", ""},
		`{"enable_kv_cache_events":true}`: {"tcp://127.0.0.1:5557", "", "none", "no replay_endpoint"},
		`{"enable_kv_cache_events":true,"endpoint":"tcp://0.0.0.0:6000","replay_endpoint":"tcp://*:1"}`:      {"tcp://127.0.0.1:6000", "bind", "tcp://127.0.0.1:1", ""},
		`{"enable_kv_cache_events":true,"endpoint":"tcp://*:0","replay_endpoint":"tcp://*:0"}`:               {"", "", "", ""},
		`{"enable_kv_cache_events":true,"endpoint":"tcp://epp:5557","replay_endpoint":"tcp://*:5657"}`:       {"", "", "tcp://127.0.0.1:5657", "to nobody else"},
		`{"enable_kv_cache_events":true,"endpoint":"ipc:///tmp/events","replay_endpoint":"inproc://replay"}`: {"", "", "", "cannot be reached"},
		`{"enable_kv_cache_events":false}`:                   {"", "", "", "not switched on"},
		`{"publisher":"zmq","endpoint":"tcp://*:5557"}`:      {"", "", "", "not switched on"},
		`{"enable_kv_cache_events":true,"publisher":"null"}`: {"", "", "", "not switched on"},
		`not JSON`: {"", "", "", "not a JSON object"},
		`null`:     {"", "", "", "not a JSON object"},
	} {
		d, env := decideOn(t, shell(t, "vllm serve m --kv-events-config '"+config+"'", ""), "")
		said := strings.Join(d.Warnings, "; ")
		if got := []string{env["events"], env["events-mode"], env["replay"]}; !slices.Equal(got, want[:3]) || !strings.Contains(said, want[3]) || want[3] == "" && said != "" {
			t.Errorf("%s: %q, %s", config, got, said)
		}
	}
}

// TestWhatAgentsAreNotFor: engines that an agent cannot ask, and settings that
// it would refuse, get none.
func TestWhatAgentsAreNotFor(t *testing.T) {
	for args, why := range map[string]string{"--headless": "headless", "--uds=/s": "socket file", "--grpc": "gRPC"} {
		if d, _ := decideOn(t, shell(t, "vllm serve m "+args, ""), `{"kvscout.io/container":"main"}`); len(d.Changes) > 0 || !strings.Contains(strings.Join(d.Warnings, " "), why) {
			t.Errorf("%s: %v, %q", args, d.Changes, d.Warnings)
		}
	}
	if d, _ := decideOn(t, shell(t, "vllm serve m", ""), `{"agent.kvscout.io/refused":"x"}`); len(d.Changes) > 0 || len(d.Warnings) != 1 {
		t.Errorf("%v, %q", d.Changes, d.Warnings)
	}
	// A method that this agent does not know is left to the engine to tell.
	if _, env := decideOn(t, shell(t, `vllm serve m --speculative-config '{"method":"unheard-of"}'`, ""), ""); env == nil || env["speculative"] != "" {
		t.Errorf("%v", env)
	}
	if _, env := decideOn(t, shell(t, `vllm serve m --speculative-config.method eagle3`, ""), ""); env["speculative"] != "eagle3" {
		t.Errorf("%v", env)
	}
}

// TestPodsCannotMakeTheReaderGrow: variables that double, that are named often, and
// what a shell would make of few letters.
func TestPodsCannotMakeTheReaderGrow(t *testing.T) {
	name := func(n int) string { return "V" + strings.Repeat("x", n) }
	list := []string{`{"name":"V","value":"xxxxxxxx"}`, `{"name":"LONG","value":"` + strings.Repeat("x", 100<<10) + `"}`}
	for i := 1; i < 60; i++ {
		list = append(list, `{"name":"`+name(i)+`","value":"$(`+name(i-1)+`)$(`+name(i-1)+`)"}`)
	}
	env := `,"env":[` + strings.Join(list, ",") + `]`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, text := range []string{
		"$" + name(59), "$(" + name(59) + ")", strings.Repeat("$LONG", 40000), strings.Repeat("$(LONG)", 30000), strings.Repeat("$LONG ", 40000),
		"${LONG//x/" + strings.Repeat("y", 100<<10) + "}", "${LONG^^}", "${!V*}", "{1..1000000000}", strings.Repeat("{1..9}", 100), "<(ls)", "@(a|b)", "~root", "$((9**9**9))", "$((a=b, b=a, a))",
	} {
		if d, got := decideOn(t, shell(t, "vllm serve m --port "+text, env), ""); got != nil {
			t.Errorf("%.40s: %v", text, got)
		} else if len(strings.Join(d.Warnings, "")) > 4<<10 {
			t.Errorf("%.40s: %d bytes of warnings", text, len(strings.Join(d.Warnings, "")))
		}
	}
	decideOn(t, `{"name":"main","image":"vllm/vllm-openai","args":["m","--port","1","`+strings.Repeat("$(LONG)", 30000)+`"`+strings.Repeat(`,"$(LONG)"`, 10000)+`]`+env+`}`, "")
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 1<<30 {
		t.Errorf("%d MiB were allocated", grown>>20)
	}
}

// TestStatusStaysSmall: an API server refuses pods whose annotations are large.
func TestStatusStaysSmall(t *testing.T) {
	var hidden []string
	for i := range 3000 {
		hidden = append(hidden, fmt.Sprintf(`"$(HIDDEN_%d_%s)"`, i, strings.Repeat("x", 100)))
	}
	d, env := decideOn(t, `{"name":"main","image":"vllm/vllm-openai","args":["m",`+strings.Join(hidden, ",")+`],"ports":[{"containerPort":8000}]}`, "")
	if env == nil {
		t.Fatal(d.Warnings)
	}
	for _, c := range d.Changes {
		if strings.HasSuffix(c.Path, "status") && len(c.Value.(string)) > maxStatus {
			t.Errorf("%d bytes", len(c.Value.(string)))
		}
	}
}

// TestPodsThatMustStay: what a node runs by itself, and what is not of Linux.
func TestPodsThatMustStay(t *testing.T) {
	for _, text := range []string{
		`{"metadata":{"annotations":{"kubernetes.io/config.mirror":"x"}},"spec":{"containers":[{"name":"a","command":["vllm","serve","m"]}]}}`,
		`{"spec":{"os":{"name":"windows"},"containers":[{"name":"a","command":["vllm","serve","m"]}]}}`,
		`{"metadata":{"labels":{"kvscout.io/inject":"disabled"}},"spec":{"containers":[{"name":"a","command":["vllm","serve","m"]}]}}`,
	} {
		var pod Pod
		if err := json.Unmarshal([]byte(text), &pod); err != nil {
			t.Fatal(err)
		}
		if d := Decide(pod, "", settings()); len(d.Changes) > 0 {
			t.Errorf("%s: %v", text, d.Changes)
		}
	}
}

// TestAgentsOnOneNodeDoNotMeet: where pods share their node's network, each
// agent's port follows its engine's.
func TestAgentsOnOneNodeDoNotMeet(t *testing.T) {
	for port, want := range map[string]string{"8000": "9478", "8001": "9479", "65000": "33710", "80": "1558"} {
		var pod Pod
		text := `{"spec":{"hostNetwork":true,"containers":[{"name":"a","command":["vllm","serve","m","--port","` + port + `"]}]}}`
		if err := json.Unmarshal([]byte(text), &pod); err != nil {
			t.Fatal(err)
		}
		if got := env(t, Decide(pod, "", settings()))["admin-address"]; got != "0.0.0.0:"+want {
			t.Errorf("engine at %s: agent at %s", port, got)
		}
	}
}

func TestPodsAreNamedByTheirOwners(t *testing.T) {
	for _, c := range []struct{ metadata, want string }{
		{`{"labels":{"pod-template-hash":"5d4f"},"ownerReferences":[{"kind":"ReplicaSet","name":"llama-5d4f","controller":true}]}`, "Deployment/llama"},
		{`{"ownerReferences":[{"kind":"ReplicaSet","name":"llama-5d4f","controller":true}]}`, "ReplicaSet/llama-5d4f"},
		{`{"ownerReferences":[{"kind":"Node","name":"n"},{"kind":"StatefulSet","name":"s","controller":true}]}`, "StatefulSet/s"},
		{`{"labels":{"leaderworkerset.sigs.k8s.io/name":"big"},"ownerReferences":[{"kind":"StatefulSet","name":"big-0","controller":true}]}`, "LeaderWorkerSet/big"},
		{`{"labels":{"storm-service-name":"pd"},"ownerReferences":[{"kind":"RoleSet","name":"pd-roleset-x","controller":true}]}`, "StormService/pd"},
		{`{}`, ""},
	} {
		var m Metadata
		if err := json.Unmarshal([]byte(c.metadata), &m); err != nil {
			t.Fatal(err)
		}
		if got := m.workload(); got != c.want {
			t.Errorf("%s: %q, want %q", c.metadata, got, c.want)
		}
	}
}

// TestQualityOfServiceStays: a pod whose limits are its requests keeps the
// processors that it has for itself.
func TestQualityOfServiceStays(t *testing.T) {
	for resources, want := range map[string]string{
		`{"limits":{"cpu":"8","memory":"9Gi"},"requests":{"cpu":"8","memory":"9Gi"}}`: `{"cpu":"200m","memory":"512Mi"}`,
		`{"limits":{"cpu":8,"memory":"9Gi"}}`:                                         `{"cpu":"200m","memory":"512Mi"}`,
		`{"limits":{"memory":"9Gi"},"requests":{"cpu":"8","memory":"9Gi"}}`:           `{"memory":"512Mi"}`,
		`{}`: `{"memory":"512Mi"}`,
	} {
		d, _ := decideOn(t, shell(t, "vllm serve m", `,"resources":`+resources), "")
		i := slices.IndexFunc(d.Changes, func(c Change) bool { return c.Path == "/spec/initContainers/-" })
		var agent struct {
			Resources struct{ Limits json.RawMessage }
		}
		text, err := json.Marshal(d.Changes[i].Value)
		if err == nil {
			err = json.Unmarshal(text, &agent)
		}
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, string(agent.Resources.Limits)); diff != "" {
			t.Errorf("%s: %s", resources, diff)
		}
	}
}

// FuzzDecide: whatever stands in a pod, there is a decision, and what gets an
// agent is left alone the next time.
func FuzzDecide(f *testing.F) {
	f.Add("sh", "-c", "vllm serve ${A:-x} --port $((1+2)) "+eventsOn, "x", "kvscout.io/enable-events", "true")
	f.Add("vllm", "serve", "m", "$(A)", "kvscout.io/container", "main")
	f.Add("bash", "-ec", "if x; then vllm serve \"$(A)\" --kv-events-config={}; fi", "$(A)$(A)", "agent.kvscout.io/label", "a=b")
	f.Fuzz(func(t *testing.T, a, b, c, value, key, note string) {
		pod := Pod{
			Metadata: Metadata{Annotations: map[string]string{key: note}},
			Spec:     Spec{Containers: []Container{{Name: "main", Image: "vllm/vllm-openai", Command: []string{a, b, c}, Env: []Variable{{Name: "A", Value: value}}}}},
		}
		d := Decide(pod, "", settings())
		if (len(d.Changes) > 0) != (len(d.Engines) > 0) {
			t.Fatalf("%v for %v", d.Changes, d.Engines)
		}
		if _, err := json.Marshal(d.Changes); err != nil {
			t.Fatal(err)
		}
		if len(d.Engines) > 0 {
			pod.Spec.InitContainers = append(pod.Spec.InitContainers, Container{Name: agentName})
			if again := Decide(pod, "", settings()); len(again.Changes) > 0 {
				t.Fatalf("a second time: %v", again.Changes)
			}
		}
	})
}
