// Package manifest changes pods and pod templates in files of Kubernetes'
// objects, YAML or JSON, and keeps the rest: documents that nothing is changed
// in stay byte for byte, in others comments and the order of keys stay, and what
// is lost are blank lines and the indentation. What is changed, others decide.
package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/kvscout/kvscout/agent/internal/inject"
)

// MaxFile bounds a file in bytes.
const MaxFile = 64 << 20

// templates are the kinds of objects that hold pod templates, and where; * is
// each of a list. An object of any other kind stays as it is.
var templates = map[string][]string{
	"Pod":                   {""},
	"PodTemplate":           {"template"},
	"Deployment":            {"spec/template"},
	"StatefulSet":           {"spec/template"},
	"DaemonSet":             {"spec/template"},
	"ReplicaSet":            {"spec/template"},
	"ReplicationController": {"spec/template"},
	"Job":                   {"spec/template"},
	"LeaderWorkerSet":       {"spec/leaderWorkerTemplate/leaderTemplate", "spec/leaderWorkerTemplate/workerTemplate"},
	"StormService":          {"spec/template/spec/roles/*/template"},
}

// Template is a pod, or the template of one, in a file.
type Template struct {
	// Where it stands, for people: document, kind, namespace and name, and the
	// template if the object has several.
	Where string
	// Workload is kind/name of the object; empty for a pod.
	Workload string
	Pod      inject.Pod
}

// Edit writes in to out with the changes that decide gives for each pod template.
// Nothing is written if there is an error, which names document, kind and name.
func Edit(in io.Reader, out io.Writer, decide func(Template) []inject.Change) error {
	text, err := io.ReadAll(io.LimitReader(in, MaxFile+1))
	if err != nil {
		return err
	}
	if len(text) > MaxFile {
		return fmt.Errorf("more than %d bytes", MaxFile)
	}
	var whole bytes.Buffer
	for i, part := range split(text) {
		edited, err := document(part.text, i+1, decide)
		if err != nil {
			return err
		}
		whole.Write(edited)
		whole.Write(part.separator)
	}
	_, err = out.Write(whole.Bytes())
	return err
}

// part is a document, and the line behind it that ends it.
type part struct{ text, separator []byte }

var separators = regexp.MustCompile(`(?m)^(---|\.\.\.)([ \t].*)?(\r?\n|\z)`)

// split a stream into its documents. A line of --- ends one even inside of a
// text.
func split(text []byte) (parts []part) {
	begin := 0
	for _, at := range separators.FindAllIndex(text, -1) {
		if at[0] == at[1] {
			continue
		}
		end := at[0]
		parts = append(parts, part{text[begin:end], text[end:at[1]]})
		begin = at[1]
	}
	return append(parts, part{text: text[begin:]})
}

// document edits one.
func document(text []byte, number int, decide func(Template) []inject.Change) ([]byte, error) {
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err != nil {
		return nil, fmt.Errorf("document %d: %w", number, err)
	}
	if root.Kind != yaml.DocumentNode || len(root.Content) != 1 {
		return text, nil // comments alone
	}
	changed, err := edit(root.Content[0], fmt.Sprintf("document %d", number), decide)
	if err != nil || !changed {
		return text, err
	}
	if root.Content[0].Style&yaml.FlowStyle != 0 {
		var b bytes.Buffer
		if err := writeJSON(&b, root.Content[0]); err != nil {
			return nil, fmt.Errorf("document %d: %w", number, err)
		}
		var indented bytes.Buffer
		if err := json.Indent(&indented, b.Bytes(), "", "  "); err != nil {
			return nil, fmt.Errorf("document %d: %w", number, err)
		}
		return append(indented.Bytes(), '\n'), nil
	}
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if compact(root.Content[0]) {
		e.CompactSeqIndent()
	}
	if err := errors.Join(e.Encode(&root), e.Close()); err != nil {
		return nil, fmt.Errorf("document %d: %w", number, err)
	}
	return b.Bytes(), nil
}

// compact tells whether lists stand in the column of their key, as most of
// Kubernetes' files have them: the first list decides.
func compact(n *yaml.Node) bool {
	found, is := false, false
	var walk func(*yaml.Node)
	walk = func(n *yaml.Node) {
		if found || n.Kind == yaml.AliasNode {
			return
		}
		for i, c := range n.Content {
			if n.Kind == yaml.MappingNode && i%2 == 1 && c.Kind == yaml.SequenceNode && c.Style&yaml.FlowStyle == 0 && !found {
				found, is = true, c.Column == n.Content[i-1].Column
				return
			}
			walk(c)
		}
	}
	walk(n)
	return is
}

// edit the pods of an object.
func edit(n *yaml.Node, where string, decide func(Template) []inject.Change) (changed bool, err error) {
	if n.Kind != yaml.MappingNode {
		return false, fmt.Errorf("%s: want an object of Kubernetes", where)
	}
	kind, name, namespace := text(n, "kind"), text(n, "metadata", "name"), text(n, "metadata", "namespace")
	if kind == "" {
		return false, fmt.Errorf("%s: an object without a kind", where)
	}
	if items := get(n, "items"); strings.HasSuffix(kind, "List") && items != nil && items.Kind == yaml.SequenceNode {
		for i, item := range items.Content {
			one, err := edit(item, fmt.Sprintf("%s, item %d", where, i+1), decide)
			if err != nil {
				return false, err
			}
			changed = changed || one
		}
		return changed, nil
	}
	title := where + ", " + kind + " "
	if namespace != "" {
		title += namespace + "/"
	}
	if title += name; name == "" {
		title += "without a name"
	}
	paths := templates[kind]
	for _, path := range paths {
		var steps []string
		if path != "" {
			steps = strings.Split(path, "/")
		}
		for _, found := range find(n, steps, "") {
			t := Template{Where: title}
			if kind != "Pod" && name != "" {
				t.Workload = kind + "/" + name
			}
			if len(paths) > 1 || strings.Contains(path, "*") {
				t.Where += ", " + found.path
			}
			if err := decode(found.node, &t.Pod); err != nil {
				return false, fmt.Errorf("%s: %w", t.Where, err)
			}
			for _, c := range decide(t) {
				if err := apply(found.node, c); err != nil {
					return false, fmt.Errorf("%s: %w", t.Where, err)
				}
				changed = true
			}
		}
	}
	return changed, nil
}

// located is a node with the path that leads to it.
type located struct {
	node *yaml.Node
	path string
}

// find the nodes at a path.
func find(n *yaml.Node, steps []string, path string) []located {
	if n == nil || n.Kind == yaml.ScalarNode {
		return nil
	}
	if len(steps) == 0 {
		return []located{{n, path}}
	}
	if steps[0] != "*" {
		return find(get(n, steps[0]), steps[1:], strings.TrimPrefix(path+"."+steps[0], "."))
	}
	var all []located
	if n.Kind == yaml.SequenceNode {
		for i, c := range n.Content {
			all = append(all, find(c, steps[1:], fmt.Sprintf("%s[%d]", path, i))...)
		}
	}
	return all
}

// get is the value of a key; nil: it has none.
func get(n *yaml.Node, key string) *yaml.Node {
	if n != nil && n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				return n.Content[i+1]
			}
		}
	}
	return nil
}

// text at a path of keys.
func text(n *yaml.Node, keys ...string) string {
	for _, key := range keys {
		n = get(n, key)
	}
	if n == nil || n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return ""
	}
	return n.Value
}

// decode reads what the API server would: of JSON, whose types are strict.
func decode(n *yaml.Node, pod *inject.Pod) error {
	var value any
	if err := n.Decode(&value); err != nil {
		return err
	}
	asJSON, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return json.Unmarshal(asJSON, pod)
}

// apply a change below a node.
func apply(n *yaml.Node, c inject.Change) error {
	steps := strings.Split(strings.TrimPrefix(c.Path, "/"), "/")
	for i := range steps {
		steps[i] = strings.NewReplacer("~1", "/", "~0", "~").Replace(steps[i])
	}
	if err := shared(n, "the object"); err != nil {
		return err
	}
	style := n.Style & yaml.FlowStyle // for what has none of its own
	for i, step := range steps[:len(steps)-1] {
		inner := child(n, step)
		switch {
		case inner == nil && n.Kind == yaml.MappingNode && step == "metadata":
			inner = &yaml.Node{Kind: yaml.MappingNode}
			n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: step}, inner)
		case inner == nil:
			return fmt.Errorf("%s is not there to be changed", strings.Join(steps[:i+1], "."))
		}
		n = inner
		if err := shared(n, strings.Join(steps[:i+1], ".")); err != nil {
			return err
		}
	}
	if len(n.Content) > 0 {
		style = n.Style & yaml.FlowStyle
	}
	n.Style = n.Style&^yaml.FlowStyle | style
	value, err := node(c.Value, style)
	if err != nil {
		return err
	}
	last := steps[len(steps)-1]
	switch {
	case n.Kind == yaml.SequenceNode && last == "-" && c.Op == inject.Add:
		n.Content = append(n.Content, value)
	case child(n, last) != nil:
		old := child(n, last)
		if old.Kind == yaml.ScalarNode && value.Kind == yaml.ScalarNode {
			old.Value, old.Tag = value.Value, value.Tag
			return nil
		}
		*old = *value
	case n.Kind == yaml.MappingNode && c.Op == inject.Add:
		n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: last}, value)
	default:
		return fmt.Errorf("%s is not there to be changed", strings.Join(steps, "."))
	}
	return nil
}

// shared is an error for what stands in several places of a document, where a
// change in one would be one in all.
func shared(n *yaml.Node, name string) error {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		return fmt.Errorf("%s is an anchor or alias of YAML, a change of which would be one elsewhere, too: write it out", name)
	}
	return nil
}

// child of an object or a list.
func child(n *yaml.Node, step string) *yaml.Node {
	if n.Kind != yaml.SequenceNode {
		return get(n, step)
	}
	i, err := strconv.Atoi(step)
	if err != nil || i < 0 || i >= len(n.Content) {
		return nil
	}
	return n.Content[i]
}

// node makes YAML of a value as JSON has it, in block style or in that of JSON.
func node(value any, flow yaml.Style) (*yaml.Node, error) {
	asJSON, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(asJSON, &doc); err != nil {
		return nil, err
	}
	n := doc.Content[0]
	var restyle func(*yaml.Node)
	restyle = func(n *yaml.Node) {
		n.Line, n.Column = 0, 0
		if flow == 0 {
			n.Style = 0
			if len(n.Content) == 0 && n.Kind != yaml.ScalarNode {
				n.Style = yaml.FlowStyle
			}
		}
		for _, c := range n.Content {
			restyle(c)
		}
	}
	restyle(n)
	return n, nil
}

// writeJSON writes a document that came as JSON, with its keys in their order.
func writeJSON(b *bytes.Buffer, n *yaml.Node) error {
	switch n.Kind {
	case yaml.MappingNode, yaml.SequenceNode:
		open, end := byte('['), byte(']')
		if n.Kind == yaml.MappingNode {
			open, end = '{', '}'
		}
		b.WriteByte(open)
		for i, c := range n.Content {
			key := n.Kind == yaml.MappingNode && i%2 == 0
			switch {
			case i == 0:
			case n.Kind == yaml.MappingNode && !key:
				b.WriteByte(':')
			default:
				b.WriteByte(',')
			}
			if key {
				c = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: c.Value}
			}
			if err := writeJSON(b, c); err != nil {
				return err
			}
		}
		b.WriteByte(end)
		return nil
	case yaml.ScalarNode:
		if n.Tag == "!!int" || n.Tag == "!!float" {
			if json.Valid([]byte(n.Value)) {
				b.WriteString(n.Value)
				return nil
			}
		}
		var value any
		if err := n.Decode(&value); err != nil {
			return err
		}
		e := json.NewEncoder(b)
		e.SetEscapeHTML(false)
		return e.Encode(value)
	default:
		return fmt.Errorf("line %d: an alias of YAML in an object written as JSON: write it out", n.Line)
	}
}
