package vllm

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/await"
)

// cache state is a Sink that keeps the set of held hashes.
type state struct {
	mu           sync.Mutex // guards all below
	held         map[uint64]int
	incarnations []string
	trust        Trust
	reason       string
	states       []Trust
	never        uint64 // hash that an exact cache state must not hold
	lies         int    // how often one did

	mark    Mark
	saved   map[uint64]int // of another process
	resumed int
}

func (p *state) NewIncarnation(reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held, p.incarnations = nil, append(p.incarnations, reason)
}

func (p *state) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.resumed++
	p.held, p.saved = p.saved, nil
}

func (p *state) Apply(at Mark, b Batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mark = at
	if p.held == nil {
		p.held = make(map[uint64]int)
	}
	for _, e := range b.Events {
		for _, h := range e.Store.Hashes {
			p.held[h]++
		}
		for _, h := range e.Remove.Hashes {
			if p.held[h]--; p.held[h] <= 0 {
				delete(p.held, h)
			}
		}
		if e.Kind == Cleared {
			clear(p.held)
		}
	}
}

func (p *state) State(t Trust, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trust, p.reason = t, reason
	p.states = append(p.states, t)
	if _, held := p.held[p.never]; held && t == Exact {
		p.lies++
	}
}

// forbid says that from the next change of state on the hash is no longer held.
func (p *state) forbid(hash uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.never = hash
}

func (p *state) hashes() []uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []uint64
	for h := range p.held {
		out = append(out, h)
	}
	slices.Sort(out)
	return out
}

func (p *state) worth() Trust {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.trust
}

// said says whether a state was ever told.
func (p *state) said(trust Trust) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Contains(p.states, trust)
}

// suspected says whether a cache state that was exact became suspect.
func (p *state) suspected() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	exact := slices.Index(p.states, Exact)
	return exact >= 0 && slices.Contains(p.states[exact:], Syncing)
}

func (p *state) why() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reason
}

// ended are the reasons of all new incarnations.
func (p *state) ended() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.incarnations)
}

func (p *state) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.incarnations)
}

// settles waits until the cache state holds exactly the hashes, with this trust.
func (p *state) settles(t *testing.T, trust Trust, hashes ...uint64) {
	t.Helper()
	deadline := time.Now().Add(await.Patience)
	for {
		got, worth := p.hashes(), p.worth()
		if worth == trust && slices.Equal(got, hashes) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("holds %v with trust %d (%q, incarnations %q), want %v with %d", got, worth, p.why(), p.ended(), hashes, trust)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
