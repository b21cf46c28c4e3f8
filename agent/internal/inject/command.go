package inject

import (
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"
)

// maxScript bounds a shell script that is read, in bytes.
const maxScript = 256 << 10

// word is one argument of a command as the process will get it.
type word struct {
	text string
	// known: text is what the process gets. Otherwise a part of it is not written
	// in the pod, and text is how it is written there.
	known bool
	// variable is the one whose value the whole word is, where that value comes
	// from elsewhere, like a secret; nil: none.
	variable *Variable

	at place
}

// place is where a word is written: an element of command or args, and in a
// script the bytes of that element.
type place struct {
	list       string // "command" or "args"
	index      int
	begin, end int // in a script; end 0: the whole element
}

// invocation is a command that starts vLLM's server.
type invocation struct {
	args []word // behind "vllm serve"
	// last is where the command ends: what is put behind it is an argument more.
	last place
	// script: the command is one of a shell script.
	script bool
	// conditional: it stands in a branch or a loop of the script.
	conditional bool
}

// maxExpanded bounds what all references to variables together put into the
// words of a container, in bytes: a pod could name large ones often.
const maxExpanded = 1 << 20

// variables of a container, as the kubelet hands them to its process.
type variables struct {
	list  []Variable
	texts []string
	known []bool
	// more: the container gets others, too, whose names are not in the pod.
	more bool
	// expanded is how much references have put into words.
	expanded int
}

// newVariables reads them in their order: each may name those before it.
func newVariables(c Container) *variables {
	v := &variables{more: len(c.EnvFrom) > 0}
	for _, e := range c.Env {
		text, known := "", e.From == nil
		if known {
			text, known = expandReferences(e.Value, v)
		}
		v.list, v.texts, v.known = append(v.list, e), append(v.texts, text), append(v.known, known)
	}
	return v
}

// reference is the text of a variable that is put into a word.
func (v *variables) reference(name string) (text string, known bool) {
	_, text, known = v.lookup(name)
	if v.expanded += len(text); v.expanded > maxExpanded {
		return "", false
	}
	return text, known
}

// lookup finds a variable; nil: the pod has none of that name. What has no text
// in the pod has known false.
func (v *variables) lookup(name string) (found *Variable, text string, known bool) {
	for i := len(v.list) - 1; i >= 0; i-- {
		if v.list[i].Name == name {
			return &v.list[i], v.texts[i], v.known[i]
		}
	}
	return nil, "", false
}

var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]*$`)

// expandReferences replaces $(NAME) as the kubelet does: $$ is a $, and what
// names no variable stays. A name that nobody defines in the pod may be defined
// elsewhere, so known is false then.
func expandReferences(text string, env *variables) (result string, known bool) {
	var b strings.Builder
	known = true
	for i := 0; i < len(text); i++ {
		if text[i] != '$' || i+1 == len(text) {
			b.WriteByte(text[i])
			continue
		}
		if text[i+1] == '$' {
			b.WriteByte('$')
			i++
			continue
		}
		name, _, closed := strings.Cut(text[i+1:], ")")
		if !closed || !strings.HasPrefix(name, "(") || !identifier.MatchString(name[1:]) {
			b.WriteByte(text[i])
			continue
		}
		value, ok := env.reference(name[1:])
		if !ok {
			known = false
			value = text[i : i+len(name)+2]
		}
		b.WriteString(value)
		i += len(name) + 1
	}
	return b.String(), known
}

// literal writes a text so that the kubelet leaves it as it is.
func literal(text string) string { return strings.ReplaceAll(text, "$(", "$$(") }

// argument reads an element of command or args that no shell sees.
func argument(text string, at place, env *variables) word {
	w := word{at: at}
	w.text, w.known = expandReferences(text, env)
	if name, ok := strings.CutPrefix(text, "$("); ok && strings.HasSuffix(name, ")") {
		if v, _, known := env.lookup(name[:len(name)-1]); v != nil && !known {
			w.variable = v
		}
	}
	return w
}

// invocations finds the commands of a container that start vLLM's server. opaque
// tells that there is a command, and that what it does is not written there: a
// program or a script of the image.
func invocations(c Container) (found []invocation, opaque bool, err error) {
	env := newVariables(c)
	var words []word
	for _, list := range []struct {
		name  string
		texts []string
	}{{"command", c.Command}, {"args", c.Args}} {
		for i, text := range list.texts {
			words = append(words, argument(text, place{list: list.name, index: i}, env))
		}
	}
	if i := script(words); i >= 0 {
		at := words[i].at
		text := c.Args
		if at.list == "command" {
			text = c.Command
		}
		return inScript(text[at.index], at, env)
	}
	if begin := server(words); begin >= 0 {
		return []invocation{{args: words[begin:], last: words[len(words)-1].at}}, false, nil
	}
	return nil, len(c.Command) > 0, nil
}

// server finds where vLLM's arguments begin in a command; -1: it does not start
// vLLM's server. Programs may stand before it that only start others.
func server(words []word) int {
	for i, w := range words {
		next := ""
		if i+1 < len(words) {
			next = words[i+1].text
		}
		switch {
		case path.Base(w.text) == "vllm" && next == "serve":
			return i + 2
		case w.text == "-m" && next == "vllm.entrypoints.openai.api_server":
			return i + 2
		case w.text == "-m" && next == "vllm.entrypoints.cli.main" && i+2 < len(words) && words[i+2].text == "serve":
			return i + 3
		case strings.HasSuffix(w.text, "vllm/entrypoints/openai/api_server.py"):
			return i + 1
		}
	}
	return -1
}

var shells = []string{"sh", "bash", "dash", "ash", "zsh", "ksh"}

// script finds the element that a shell is to run; -1: none.
func script(words []word) int {
	for i, w := range words {
		if !slices.Contains(shells, path.Base(w.text)) {
			continue
		}
		for j := i + 1; j < len(words) && strings.HasPrefix(words[j].text, "-"); j++ {
			flag := words[j].text
			if flag == "-o" {
				j++ // its name
				continue
			}
			if !strings.HasPrefix(flag, "--") && strings.Contains(flag, "c") && j+1 < len(words) {
				return j + 1
			}
		}
		return -1
	}
	return -1
}

// errUnknown is why a word cannot be read.
var errUnknown = errors.New("its value is not in the pod")

// reader evaluates the words of a script.
type reader struct {
	source string
	at     place
	env    *variables
	set    map[string]string // by the script itself
	unsure map[string]bool   // set more than once, or to what is not known
}

// inScript finds the commands of a shell script that start vLLM's server.
func inScript(source string, at place, env *variables) (found []invocation, opaque bool, err error) {
	if len(source) > maxScript {
		return nil, true, fmt.Errorf("a script of %d bytes is not read", len(source))
	}
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(source), "")
	if err != nil {
		return nil, true, fmt.Errorf("the shell script cannot be read: %w", err)
	}
	r := &reader{source: source, at: at, env: env, set: make(map[string]string), unsure: make(map[string]bool)}
	r.assignments(file)
	branches := 0
	var open []bool // of each node that is entered: a branch or loop
	syntax.Walk(file, func(node syntax.Node) bool {
		if node == nil {
			if open[len(open)-1] {
				branches--
			}
			open = open[:len(open)-1]
			return true
		}
		branch := false
		switch node.(type) {
		case *syntax.IfClause, *syntax.CaseClause, *syntax.ForClause, *syntax.WhileClause, *syntax.FuncDecl:
			branch = true
			branches++
		}
		open = append(open, branch)
		if call, ok := node.(*syntax.CallExpr); ok {
			if i, ok := r.call(call); ok {
				i.conditional = branches > 0
				found = append(found, i)
			}
		}
		return true
	})
	return found, len(found) == 0, nil
}

// assignments notes what the script sets variables to.
func (r *reader) assignments(file *syntax.File) {
	seen := make(map[string]bool)
	syntax.Walk(file, func(node syntax.Node) bool {
		switch n := node.(type) {
		case *syntax.WordIter:
			r.unsure[n.Name.Value] = true
		case *syntax.Assign:
			if n.Name == nil || n.Naked && n.Value == nil {
				break // export NAME
			}
			name := n.Name.Value
			text, err := "", errUnknown
			if n.Value != nil && n.Array == nil && n.Index == nil && !n.Append {
				text, err = r.evaluate(n.Value)
			}
			if seen[name] || err != nil {
				r.unsure[name] = true
			}
			seen[name] = true
			r.set[name] = text
		}
		return true
	})
}

// variable is the value of one in the script; ok is false if it is not known.
func (r *reader) variable(name string) (text string, ok bool) {
	if r.unsure[name] {
		return "", false
	}
	if text, ok := r.set[name]; ok {
		r.env.expanded += len(text)
		return text, r.env.expanded <= maxExpanded
	}
	return r.env.reference(name)
}

// plain tells whether a word is made of texts, variables and sums. What changes
// the text of a variable, like ${A//b/c}, is not followed: it could make any
// amount of it.
func plain(w *syntax.Word) bool {
	is := true
	syntax.Walk(w, func(node syntax.Node) bool {
		switch n := node.(type) {
		case *syntax.ParamExp:
			defaults := n.Exp == nil || n.Exp.Op == syntax.DefaultUnset || n.Exp.Op == syntax.DefaultUnsetOrNull
			is = is && defaults && n.Repl == nil && n.Slice == nil && n.Index == nil && !n.Excl && !n.Length && n.Names == 0
		case *syntax.ProcSubst, *syntax.ExtGlob:
			is = false
		}
		return is
	})
	return is
}

// evaluate gives the text of a word.
func (r *reader) evaluate(w *syntax.Word) (string, error) {
	if !plain(w) {
		return "", errUnknown
	}
	hidden := false
	config := &expand.Config{
		NoUnset: true,
		Env: expand.FuncEnviron(func(name string) string {
			text, ok := r.variable(name)
			v, _, _ := r.env.lookup(name)
			// A default, ${NAME:-text}, is taken for a variable that nobody sets, and
			// not for one whose value is elsewhere.
			hidden = hidden || !ok && (r.unsure[name] || v != nil || r.env.more || r.env.expanded > maxExpanded || !identifier.MatchString(name))
			return text
		}),
		// Before the shell sees $(NAME) the kubelet has put a variable there.
		CmdSubst: func(out io.Writer, s *syntax.CmdSubst) error {
			text, known := r.env.reference(reference(s))
			if !known {
				return errUnknown
			}
			_, err := io.WriteString(out, text)
			return err
		},
	}
	text, count := "", 0
	for field, err := range expand.FieldsSeq(config, w) {
		if err != nil {
			return "", err
		}
		if text, count = field, count+1; count > 1 {
			break // two words: what the script would make of it is not followed
		}
	}
	if hidden || count != 1 {
		return "", errUnknown
	}
	return text, nil
}

// reference is the name in $(NAME); empty: it is something else.
func reference(s *syntax.CmdSubst) string {
	if len(s.Stmts) != 1 {
		return ""
	}
	call, ok := s.Stmts[0].Cmd.(*syntax.CallExpr)
	if !ok || len(call.Assigns) > 0 || len(call.Args) != 1 {
		return ""
	}
	return call.Args[0].Lit()
}

// word reads a word of the script.
func (r *reader) word(w *syntax.Word) word {
	begin, end := int(w.Pos().Offset()), int(w.End().Offset())
	at := r.at
	at.begin, at.end = begin, end
	text, err := r.evaluate(w)
	if err == nil {
		return word{text: text, known: true, at: at}
	}
	read := word{text: r.source[begin:end], at: at}
	parts := w.Parts
	if len(parts) == 1 {
		if q, ok := parts[0].(*syntax.DblQuoted); ok {
			parts = q.Parts
		}
	}
	if len(parts) == 1 {
		name := ""
		switch p := parts[0].(type) {
		case *syntax.ParamExp:
			if p.Exp == nil && p.Index == nil && p.Repl == nil && p.Slice == nil && !p.Length {
				name = p.Param.Value
			}
		case *syntax.CmdSubst:
			name = reference(p)
		}
		if _, set := r.set[name]; !set && !r.unsure[name] {
			read.variable, _, _ = r.env.lookup(name)
		}
	}
	return read
}

// call reads a command of the script; ok is false if it does not start vLLM's
// server.
func (r *reader) call(c *syntax.CallExpr) (i invocation, ok bool) {
	words := make([]word, 0, len(c.Args))
	for _, w := range c.Args {
		words = append(words, r.word(w))
	}
	begin := server(words)
	if begin < 0 {
		return invocation{}, false
	}
	return invocation{args: words[begin:], last: words[len(words)-1].at, script: true}, true
}
