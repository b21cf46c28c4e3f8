package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// namespacesEvery is how often the file of namespaces is looked at.
const namespacesEvery = time.Second

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
	for _, p := range list {
		if p.matches(name) {
			return true
		}
	}
	return false
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
	var errs []error
	number := 0
	for line := range strings.Lines(text) {
		number++
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if err := found.add(words); err != nil {
			errs = append(errs, fmt.Errorf("line %d: %w", number, err))
		}
	}
	return found, errors.Join(errs...)
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
	here := false
	may := func(name string) bool {
		for _, l := range lines {
			if anyMatches(l.pools, pool) && anyMatches(l.models, name) {
				return true
			}
		}
		return false
	}
	for _, l := range lines {
		here = here || anyMatches(l.pools, pool)
	}
	if !here {
		return fmt.Errorf("namespace %q may not serve pool %q, by the scheduler's -namespaces", i.Namespace, pool)
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
	said string // about the file
}

func newNamespaces(file string, log *slog.Logger) (*namespaces, error) {
	n := &namespaces{file: file, log: log}
	if file == "" {
		return n, nil
	}
	if err := n.read(); err != nil {
		return nil, fmt.Errorf("-namespaces: %w", err)
	}
	return n, nil
}

// admit is rights.admit by the file.
func (n *namespaces) admit(pool string, i *fleet.Info) error {
	if r := n.now.Load(); r != nil {
		return r.admit(pool, i)
	}
	return nil
}

// run follows the file until ctx is done.
func (n *namespaces) run(ctx context.Context) {
	if n.file == "" {
		return
	}
	look := time.NewTicker(namespacesEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
			n.follow()
		}
	}
}

// follow reads the file again if it changed. A file with a mistake is refused
// as a whole.
func (n *namespaces) follow() {
	err := n.read()
	switch {
	case err == nil:
		n.said = ""
	case err.Error() != n.said:
		n.said = err.Error()
		n.log.Error("the file of namespaces is not used, the last good one is", "error", err)
	}
}

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
