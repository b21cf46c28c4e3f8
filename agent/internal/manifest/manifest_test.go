package manifest

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/agent/internal/inject"
)

// mark adds a label to every template, and a container.
func mark(seen *[]Template) func(Template) []inject.Change {
	return func(t Template) []inject.Change {
		*seen = append(*seen, t)
		var changes []inject.Change
		if t.Pod.Metadata.Labels == nil {
			changes = append(changes, inject.Change{Op: inject.Add, Path: "/metadata/labels", Value: map[string]string{}})
		}
		return append(changes, inject.Change{Op: inject.Add, Path: "/metadata/labels/x~1y", Value: "true"},
			inject.Change{Op: inject.Add, Path: "/spec/containers/-", Value: map[string]string{"name": "more"}})
	}
}

func nothing(Template) []inject.Change { return nil }

func edited(t *testing.T, text string, decide func(Template) []inject.Change) string {
	t.Helper()
	var out bytes.Buffer
	if err := Edit(strings.NewReader(text), &out, decide); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestUnchangedDocumentsStayByteForByte, whatever stands in them.
func TestUnchangedDocumentsStayByteForByte(t *testing.T) {
	const pod = "kind: Pod\nspec:\n  containers:\n  - name: a\n"
	for _, text := range []string{
		"", "\n", "# only a comment\n", "---\n", "kind: ConfigMap\ndata:   {a: 1,\n\n  b: [ 2 ] }", "---\nkind: A\n---\n\n# between\n---\nkind: B\n...\n",
		"kind: A\r\n---\r\nkind: B\r\n", "--- # a remark\nkind: A\n", "kind: List\nitems: []\n", "{\"kind\":\"Service\"}\n", "kind: Deployment\nspec: {}\n", "kind: Deployment\nspec: {template: null}\n",
	} {
		var seen []Template
		if got := edited(t, text, mark(&seen)); got != text || len(seen) > 0 {
			t.Errorf("%q became %q, %v", text, got, seen)
		}
	}
	if got := edited(t, pod, nothing); got != pod {
		t.Errorf("%q", got)
	}
	// Beside one that changes.
	const service = "kind:    Service   # stays\n"
	if got := edited(t, service+"---\n"+pod+"---\n"+service, mark(new([]Template))); !strings.HasPrefix(got, service+"---\n") || !strings.HasSuffix(got, "---\n"+service) || !strings.Contains(got, "  - name: more\n") {
		t.Errorf("%s", got)
	}
}

// TestEveryKindIsFound with the path that leads to its templates.
func TestEveryKindIsFound(t *testing.T) {
	template := func(path string) string {
		text, indent := "", ""
		for step := range strings.SplitSeq(path, "/") {
			switch step {
			case "":
			case "*":
				text += indent + "- \n"
				indent += "  "
			default:
				text += indent + step + ":\n"
				indent += "  "
			}
		}
		return text + indent + "spec:\n" + indent + "  containers:\n" + indent + "  - name: a\n"
	}
	for kind, paths := range templates {
		for _, path := range paths {
			var seen []Template
			text := "kind: " + kind + "\nmetadata:\n  name: n\n  namespace: space\n" + template(path)
			got := edited(t, text, mark(&seen))
			if len(seen) != 1 || len(seen[0].Pod.Spec.Containers) != 1 || !strings.Contains(got, "x/y: \"true\"") || !strings.HasPrefix(seen[0].Where, "document 1, "+kind+" space/n") {
				t.Errorf("%s: %+v\n%s", kind, seen, got)
			}
			if want := map[bool]string{true: "", false: kind + "/n"}[kind == "Pod"]; seen[0].Workload != want {
				t.Errorf("%s: workload %q", kind, seen[0].Workload)
			}
		}
	}
}

// TestErrorsNameDocumentKindAndName, and then nothing is written.
func TestErrorsNameDocumentKindAndName(t *testing.T) {
	const good = "kind: Pod\nspec: {containers: [{name: a}]}\n---\n"
	for text, want := range map[string]string{
		"kind: [\n":  "document 2",
		"- a\n":      "document 2: want an object",
		"spec: {}\n": "document 2: an object without a kind",
		"kind: Deployment\nmetadata: {name: n, namespace: s}\nspec: {template: {spec: {containers: [{name: a, args: [8000]}]}}}\n": "document 2, Deployment s/n: json: cannot unmarshal number",
		"kind: Pod\nspec: {containers: 3}\n":                                                                    "document 2, Pod without a name",
		"kind: List\nitems: [{kind: Pod, metadata: {name: a}, spec: {containers: 3}}]\n":                        "document 2, item 1, Pod a",
		"kind: Pod\nmetadata: {name: n, labels: &l {a: b}, annotations: *l}\nspec: {containers: [{name: a}]}\n": "document 2, Pod n: metadata.labels is an anchor or alias",
		"kind: LeaderWorkerSet\nmetadata: {name: n}\nspec: {leaderWorkerTemplate: {leaderTemplate: &t {metadata: {labels: {}}, spec: {containers: [{name: a}]}}, workerTemplate: *t}}\n": "Template: the object is an anchor or alias",
		"kind: Pod\nmetadata: {name: n}\nspec: {}\n": "document 2, Pod n: spec.containers is not there to be changed",
		"{\"kind\": \"Pod\", \"metadata\": {\"name\": \"n\", \"labels\": {}}, \"more\": &a {}, \"spec\": {\"containers\": [], \"x\": *a}}": "document 2: line 1: an alias of YAML",
	} {
		var out bytes.Buffer
		err := Edit(strings.NewReader(good+text), &out, mark(new([]Template)))
		if err == nil || !strings.Contains(err.Error(), want) || out.Len() > 0 {
			t.Errorf("%q: %v, want %s; %d bytes written", text, err, want, out.Len())
		}
	}
	if err := Edit(strings.NewReader(strings.Repeat("#", MaxFile+1)), new(bytes.Buffer), nothing); err == nil {
		t.Error("a file without end is read")
	}
	// A bomb of aliases.
	bomb := "kind: Pod\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
	for i := range 9 {
		n := string(rune('0' + i))
		m := string(rune('1' + i))
		bomb += "a" + m + ": &a" + m + " [*a" + n + ",*a" + n + ",*a" + n + ",*a" + n + ",*a" + n + ",*a" + n + ",*a" + n + ",*a" + n + "]\n"
	}
	if err := Edit(strings.NewReader(bomb), new(bytes.Buffer), nothing); err == nil || !strings.Contains(err.Error(), "aliasing") {
		t.Errorf("a bomb: %v", err)
	}
}

// TestCommentsAndOrderStay in what is changed.
func TestCommentsAndOrderStay(t *testing.T) {
	const text = `# head
kind: Pod # kind
metadata:
    # above the name
    name: n
    labels: {z: "1", a: "2"} # in flow
spec:
    # the containers
    containers:
        - name: a # first
          args:
            - |
                several
                lines
    # end
`
	const want = `# head
kind: Pod # kind
metadata:
  # above the name
  name: n
  labels: {z: "1", a: "2", x/y: "true"} # in flow
spec:
  # the containers
  containers:
    - name: a # first
      args:
        - |
          several
          lines
    - name: more
  # end
`
	if got := edited(t, text, mark(new([]Template))); got != want {
		t.Errorf("got\n%s", got)
	}
}

func FuzzEdit(f *testing.F) {
	f.Add("kind: Pod\nspec:\n  containers:\n  - name: a\n")
	f.Add("kind: List\nitems: [{kind: Deployment, spec: {template: {spec: {containers: [{name: a}]}}}}]\n---\n{\"kind\": \"Pod\"}")
	f.Add("kind: Pod\nmetadata: &a {labels: *a}\nspec: {containers: []}")
	f.Fuzz(func(t *testing.T, text string) {
		var once, twice bytes.Buffer
		if err := Edit(strings.NewReader(text), &once, nothing); err == nil && once.String() != text {
			t.Fatalf("%q became %q", text, once.String())
		}
		once.Reset()
		if Edit(strings.NewReader(text), &once, mark(new([]Template))) != nil {
			return
		}
		// What is written can be read.
		if err := Edit(bytes.NewReader(once.Bytes()), &twice, nothing); err != nil {
			t.Fatalf("%q became %q: %v", text, once.String(), err)
		}
	})
}
