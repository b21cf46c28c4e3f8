package pick

import "github.com/kvscout/kvscout/scheduler/internal/fleet"

// keptNames is how many names a set may have had and still be used again: as many
// as a request may list.
const keptNames = 4096

// names is a request's list of members, pods and addresses as sets: however long
// the list is, a member is looked up three times at most. The zero value names
// nobody.
type names struct{ members, pods, addresses map[string]struct{} }

func (n *names) add(refs []Ref) {
	for i := range refs {
		switch r := &refs[i]; {
		case r.Member != "":
			put(&n.members, r.Member, len(refs))
		case r.Pod != "":
			put(&n.pods, r.Pod, len(refs))
		case r.Address != "":
			put(&n.addresses, r.Address, len(refs))
		}
	}
}

func put(set *map[string]struct{}, name string, expected int) {
	if *set == nil {
		*set = make(map[string]struct{}, expected)
	}
	(*set)[name] = struct{}{}
}

// name tells whether the member is in the list.
func (n *names) name(i *fleet.Info) bool {
	return has(n.members, i.Name) || has(n.pods, i.Pod) || has(n.addresses, i.Address)
}

func has(set map[string]struct{}, name string) bool {
	if len(set) == 0 {
		return false
	}
	_, ok := set[name]
	return ok
}

// release empties the sets. Names are the request's and must not be kept.
func (n *names) release() {
	for _, set := range []*map[string]struct{}{&n.members, &n.pods, &n.addresses} {
		if len(*set) > keptNames {
			*set = nil
		}
		clear(*set)
	}
}
