// Package membership judges those who announce themselves: which namespaces may
// serve what, which addresses engines may have and which of them may be asked,
// and who is left out because callers report failures. Whether they live, and
// what they hold, is others' business.
package membership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/textfile"
)

const (
	// addressesEvery is how often addresses are compared with each other and
	// with where members connect from.
	addressesEvery = time.Second
	// failuresEvery is how often it is looked for members that are left out.
	failuresEvery = 500 * time.Millisecond
)

// Config of the judgement.
type Config struct {
	Pool  string
	Fleet *fleet.Fleet
	// Namespaces is a file that says which may serve what; empty: all everything.
	Namespaces string
	// Addresses are networks and ends of names that members' addresses must lie
	// in, separated by commas; empty: any.
	Addresses string
	// Here: all servers of the bus are on this machine.
	Here bool
	Log  *slog.Logger
}

// Membership judges members.
type Membership struct {
	cfg       Config
	spaces    namespaces
	addresses addresses
}

// New reads the file of namespaces.
func New(cfg Config) (*Membership, error) {
	m := &Membership{
		cfg:       cfg,
		spaces:    namespaces{file: cfg.Namespaces, log: cfg.Log},
		addresses: addresses{log: cfg.Log, fleet: cfg.Fleet, loopback: cfg.Here},
	}
	if cfg.Namespaces != "" {
		if err := m.spaces.read(); err != nil {
			return nil, fmt.Errorf("-namespaces: %w", err)
		}
	}
	var err error
	m.addresses.allowed, err = parseAllowed(cfg.Addresses)
	return m, err
}

// CheckAddresses says what is wrong with a list of Config.Addresses.
func CheckAddresses(list string) error {
	_, err := parseAllowed(list)
	return err
}

// Start takes where members connect from, by name, before anything else happens;
// nil: nobody knows.
func (m *Membership) Start(connected func() map[string][]netip.Addr) {
	m.addresses.connected = connected
	if connected == nil && m.addresses.allowed.any() && !m.cfg.Here {
		m.cfg.Log.Warn("text prompts are not tokenized: an external NATS server does not tell where members connect from, so no engine gets the API key and prompts; set -engine-addresses")
	}
}

// Run keeps the judgement up to date until ctx is done.
func (m *Membership) Run(ctx context.Context) {
	var following sync.WaitGroup
	defer following.Wait()
	if m.cfg.Namespaces != "" {
		following.Go(func() {
			textfile.Follow(ctx, m.spaces.read, func(err error) {
				m.cfg.Log.Error("the file of namespaces is not used, the last good one is", "error", err)
			})
		})
	}
	addresses, failures := time.NewTicker(addressesEvery), time.NewTicker(failuresEvery)
	defer addresses.Stop()
	defer failures.Stop()
	left := leftOut{log: m.cfg.Log}
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-addresses.C:
			if m.addresses.connected != nil {
				m.addresses.poll(0)
			}
			m.addresses.judge(m.cfg.Fleet.View(), now)
		case now := <-failures.C:
			left.judge(m.cfg.Fleet.View(), now)
		}
	}
}

// Admit says why a member is not to be one; nil: it is.
func (m *Membership) Admit(i *fleet.Info) error {
	if err := m.spaces.admit(m.cfg.Pool, i); err != nil {
		return err
	}
	return m.addresses.admit(i)
}

// ErrNotAllowed says that no engine of a model may be asked.
var ErrNotAllowed = errors.New("no engine of the model may be asked: none announces an address that its agent connects from, or that -engine-addresses allows")

// Engines lists the URLs of engines of the model that may get the API key and
// prompts.
func (m *Membership) Engines(model string) ([]string, error) {
	view, now := m.cfg.Fleet.View(), time.Now()
	var addresses []string
	kept := false
	for _, service := range view.Serving(model) {
		one := view.Members[service.Position]
		switch {
		case one.Info.Address == "" || one.Load.Sleeping || one.Load.Unreachable || view.Silent(one, now):
		case m.addresses.askable(one.Info):
			addresses = append(addresses, one.Info.URL())
		default:
			kept = true
		}
	}
	if kept && len(addresses) == 0 {
		return nil, ErrNotAllowed
	}
	return addresses, nil
}

// Problem is what is wrong with a member's address; empty: nothing.
func (m *Membership) Problem(name string) string { return m.addresses.problems()[name].text }

// Problems counts members with one, by kind.
func (m *Membership) Problems() map[string]uint64 {
	n := map[string]uint64{unvouched: 0, shared: 0, local: 0}
	for _, p := range m.addresses.problems() {
		n[p.kind]++
	}
	return n
}
