package membership

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/textfile"
)

// others stands for the namespaces that no line names.
const others = "*"

// right is one line of the file of namespaces.
type right struct{ models, pools []pattern }

// rights say which namespaces may serve what, by namespace.
type rights map[string][]right

// pattern is a name in which one '*' may stand for any text.
type pattern string

func (p pattern) matches(name string) bool {
	before, after, star := strings.Cut(string(p), "*")
	if !star {
		return name == before
	}
	return len(name) >= len(before)+len(after) && strings.HasPrefix(name, before) && strings.HasSuffix(name, after)
}

func anyMatches(list []pattern, name string) bool {
	return slices.ContainsFunc(list, func(p pattern) bool { return p.matches(name) })
}

// parseRights reads which namespaces may serve which models in which pools, a
// line each separated by commas several and '*' for any text:
//
//	<namespace> <models> [<pools>]
//
// Without pools the line is about all of them. A namespace may have several
// lines; that of '*' is about those that have none. Empty lines and what
// follows a '#' count for nothing.
func parseRights(text string) (rights, error) {
	found := make(rights)
	return found, textfile.Lines(text, func(_ int, words []string) error { return found.add(words) })
}

func (r rights) add(words []string) error {
	if len(words) < 2 || len(words) > 3 {
		return errors.New("must be: <namespace> <models> [<pools>], like: prod llama-3,qwen-* default")
	}
	namespace := words[0]
	if namespace != others {
		if _, err := (protocol.Member{Namespace: namespace, PodUID: "any"}).Name(); err != nil || strings.Contains(namespace, "_") {
			return fmt.Errorf("%.80q is no namespace: letters, digits and '-', or * for all that have no line", namespace)
		}
	}
	line := right{pools: []pattern{"*"}}
	for i, list := range words[1:] {
		var patterns []pattern
		for p := range strings.SplitSeq(list, ",") {
			if p == "" || strings.Count(p, "*") > 1 {
				return fmt.Errorf("%.80q: a name has one * at most, and is not empty", p)
			}
			patterns = append(patterns, pattern(p))
		}
		if i == 0 {
			line.models = patterns
		} else {
			line.pools = patterns
		}
	}
	r[namespace] = append(r[namespace], line)
	return nil
}

// admit says why a member may not be one of the pool; nil: it may.
func (r rights) admit(pool string, i *fleet.Info) error {
	lines, named := r[i.Namespace]
	if !named {
		lines = r[others]
	}
	if len(lines) == 0 {
		return fmt.Errorf("namespace %q has no line in the scheduler's -namespaces", i.Namespace)
	}
	lines = slices.DeleteFunc(slices.Clone(lines), func(l right) bool { return !anyMatches(l.pools, pool) })
	if len(lines) == 0 {
		return fmt.Errorf("namespace %q may not serve pool %q, by the scheduler's -namespaces", i.Namespace, pool)
	}
	may := func(name string) bool {
		return slices.ContainsFunc(lines, func(l right) bool { return anyMatches(l.models, name) })
	}
	for _, name := range i.Models {
		if !may(name) {
			return fmt.Errorf("namespace %q may not serve model %.100q, by the scheduler's -namespaces", i.Namespace, name)
		}
	}
	for n := range i.Adapters {
		if name := i.Adapters[n].Name; !may(name) {
			return fmt.Errorf("namespace %q may not serve adapter %.100q, by the scheduler's -namespaces", i.Namespace, name)
		}
	}
	return nil
}

// namespaces are the rights of a file, as it was last good.
type namespaces struct {
	file string // empty: everybody may serve everything
	text string // in force
	log  *slog.Logger
	now  atomic.Pointer[rights]
}

// admit is rights.admit by the file.
func (n *namespaces) admit(pool string, i *fleet.Info) error {
	if r := n.now.Load(); r != nil {
		return r.admit(pool, i)
	}
	return nil
}

// read takes the file over if it changed.
func (n *namespaces) read() error {
	text, err := os.ReadFile(n.file)
	if err != nil || string(text) == n.text && n.now.Load() != nil {
		return err
	}
	r, err := parseRights(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", n.file, err)
	}
	again := n.now.Swap(&r) != nil
	n.text = string(text)
	if again {
		n.log.Info("namespaces read", "file", n.file, "namespaces", len(r))
	}
	return nil
}
