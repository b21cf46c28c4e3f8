package membership

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// originsEvery is the least time between two polls for the connection of a member
// that was not found.
const originsEvery = 100 * time.Millisecond

// allowed are the networks and DNS zones that addresses may lie in; none: any.
type allowed struct {
	networks []netip.Prefix
	zones    []string // in lower case, beginning with a dot
}

// parseAllowed reads a list separated by commas: 10.0.0.0/8, 10.0.0.7, or
// .prod.svc.cluster.local for all names that end so.
func parseAllowed(list string) (allowed, error) {
	var a allowed
	if strings.TrimSpace(list) == "" {
		return a, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		part = strings.ToLower(strings.TrimSpace(part))
		if prefix, err := netip.ParsePrefix(part); err == nil {
			if prefix != prefix.Masked() {
				return allowed{}, fmt.Errorf("%q has bits beyond its length: write %s", part, prefix.Masked())
			}
			a.networks = append(a.networks, prefix)
			continue
		}
		if ip, err := netip.ParseAddr(part); err == nil && ip.Zone() == "" {
			a.networks = append(a.networks, netip.PrefixFrom(ip, ip.BitLen()))
			continue
		}
		zone := strings.Trim(part, ".")
		if _, err := protocol.ParseAddress(zone + ":1"); err != nil || strings.ContainsAny(part, ":/") {
			return allowed{}, fmt.Errorf("%.80q is neither a network like 10.0.0.0/8 nor the end of names like .svc.cluster.local", part)
		}
		a.zones = append(a.zones, "."+zone)
	}
	return a, nil
}

func (a *allowed) any() bool { return len(a.networks)+len(a.zones) == 0 }

func (a *allowed) has(address protocol.Address) bool {
	if address.IP.IsValid() {
		return slices.ContainsFunc(a.networks, func(n netip.Prefix) bool { return n.Contains(address.IP) })
	}
	name := "." + strings.TrimSuffix(address.Name, ".")
	return slices.ContainsFunc(a.zones, func(zone string) bool { return strings.HasSuffix(name, zone) })
}

// addresses judges those that members announce. An operator's list decides
// alone: who is outside is no member. Without one, engines are asked (which
// takes the API key and prompts there) only where their members connect from.
type addresses struct {
	log     *slog.Logger
	allowed allowed
	fleet   *fleet.Fleet
	// connected lists where members connect from, by name; nil: nobody knows.
	// Loopback then says whether members on this machine may be asked.
	connected func() map[string][]netip.Addr
	loopback  bool

	mu     sync.Mutex // held while origins are looked for
	polled time.Time  // guarded by mu
	origin atomic.Pointer[map[string][]netip.Addr]
	found  atomic.Pointer[map[string]problem] // by member
}

// problem is what is wrong with a member's address.
type problem struct{ kind, text string }

// problems by kind.
const (
	unvouched = "unvouched"
	shared    = "shared"
	local     = "loopback"
)

// admit says why a member's address keeps it out; nil: it does not.
func (a *addresses) admit(i *fleet.Info) error {
	if a.allowed.any() {
		return nil
	}
	if i.Address == "" {
		return errors.New("it announces no address, and the scheduler's -engine-addresses demands one of its list")
	}
	parsed, err := protocol.ParseAddress(i.Address)
	if err == nil && !a.allowed.has(parsed) {
		err = fmt.Errorf("address %.100q is not in the scheduler's -engine-addresses", i.Address)
	}
	return err
}

// askable tells whether the API key and prompts may go to a member's address.
func (a *addresses) askable(i *fleet.Info) bool {
	address, err := protocol.ParseAddress(i.Address)
	switch {
	case err != nil:
		return false
	case !a.allowed.any():
		return a.allowed.has(address)
	case a.connected == nil:
		return a.loopback && address.Loopback()
	}
	from, known := a.origins()[i.Name]
	if !known {
		a.poll(originsEvery)
		from = a.origins()[i.Name]
	}
	return comesFrom(from, address)
}

func comesFrom(origins []netip.Addr, address protocol.Address) bool {
	return slices.ContainsFunc(origins, func(ip netip.Addr) bool { return ip == address.IP || ip.IsLoopback() && address.Loopback() })
}

func (a *addresses) origins() map[string][]netip.Addr {
	if o := a.origin.Load(); o != nil {
		return *o
	}
	return nil
}

// poll finds out where members connect from, unless somebody did within a time.
func (a *addresses) poll(within time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if now := time.Now(); now.Sub(a.polled) >= within {
		a.polled = now
		o := a.connected()
		a.origin.Store(&o)
	}
}

// judge finds what is wrong with addresses, and logs what came and went.
func (a *addresses) judge(view *fleet.View, now time.Time) {
	was, found := a.problems(), a.problemsOf(view, now)
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if p := found[name]; was[name] != p {
			a.log.Warn("member's address", "member", name, "problem", p.text)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(was)) {
		if _, still := found[name]; !still && view.Named(name) != nil {
			a.log.Info("member's address is fine again", "member", name)
		}
	}
	a.found.Store(&found)
}

func (a *addresses) problemsOf(view *fleet.View, now time.Time) map[string]problem {
	found := make(map[string]problem)
	first := make(map[string]*fleet.Member)
	for _, m := range view.Members {
		if m.Info.Address == "" || view.Silent(m, now) {
			continue
		}
		if p, is := a.problemOf(m.Info); is {
			found[m.Info.Name] = p
		}
		other := first[m.Info.Address]
		if other == nil {
			first[m.Info.Address] = m
			continue
		}
		// Ranks of one pod share the address of their server.
		if other.Info.Namespace == m.Info.Namespace && other.Info.PodUID == m.Info.PodUID {
			continue
		}
		const text = "address %s is announced by %s too: one engine gets the requests of both; give each agent its own -address or -pod-ip"
		found[m.Info.Name] = problem{shared, fmt.Sprintf(text, m.Info.Address, other.Info.Name)}
		found[other.Info.Name] = problem{shared, fmt.Sprintf(text, m.Info.Address, m.Info.Name)}
	}
	return found
}

// problemOf is what is wrong with one address by itself.
func (a *addresses) problemOf(i *fleet.Info) (problem, bool) {
	address, err := protocol.ParseAddress(i.Address)
	if err != nil || a.connected == nil && !address.Loopback() || a.connected == nil && a.loopback {
		return problem{}, false
	}
	if a.connected == nil {
		return problem{local, fmt.Sprintf("address %s reaches the engine from its own machine only, and NATS is on another one; set the agent's -address or -pod-ip", i.Address)}, true
	}
	from := a.origins()[i.Name]
	switch {
	case len(from) == 0 || comesFrom(from, address):
		return problem{}, false
	case address.Loopback():
		return problem{local, fmt.Sprintf("address %s reaches the engine from its own machine only, and its agent connects from %s; set the agent's -address or -pod-ip", i.Address, from[0])}, true
	case !a.allowed.any():
		return problem{}, false // the operator has said so
	}
	return problem{unvouched, fmt.Sprintf("address %s is not where its agent connects from (%s): the engine is not asked for tokens; set the scheduler's -engine-addresses if it is right", i.Address, from[0])}, true
}

func (a *addresses) problems() map[string]problem {
	if p := a.found.Load(); p != nil {
		return *p
	}
	return nil
}
