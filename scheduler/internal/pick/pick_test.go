package pick

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

var t0 = time.Unix(1_700_000_000, 0)

// bed is a fleet with its index and a picker.
type bed struct {
	testing.TB
	fleet *fleet.Fleet
	index *index.Index
	*Picker
}

func newBed(t testing.TB) *bed {
	b := &bed{TB: t, fleet: fleet.New(fleet.Config{}), index: index.New(index.Config{})}
	p, err := New(Config{Fleet: b.fleet, Index: b.index, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	b.Picker = p
	return b
}

// join adds an EXACT member of "model" with blocks of 16.
func (b *bed) join(name string) fleet.ID {
	return b.joinAs(fleet.Info{Name: name, Pod: "pod-" + name, Address: name + ":8000", Models: []string{"model"}, BlockSize: 16})
}

func (b *bed) joinAs(info fleet.Info) fleet.ID {
	b.Helper()
	id, err := b.fleet.Join(info.Name, t0)
	if err != nil {
		b.Fatal(err)
	}
	if info.Heartbeat == 0 {
		info.Heartbeat = time.Hour // most tests are not about who is heard
	}
	b.fleet.Receive(id, info, nil, t0)
	b.fleet.SetCacheState(id, fleet.CacheState{Trust: fleet.Exact, Epoch: 1})
	return id
}

func (b *bed) trust(id fleet.ID, t fleet.Trust) {
	b.fleet.SetCacheState(id, fleet.CacheState{Trust: t, Epoch: 1})
}

// hold stores the first blocks of a prompt for a member.
func (b *bed) hold(id fleet.ID, lane index.Lane, tokens []byte, blocks int) {
	b.holdIn(blockkey.Scope{Model: "model", BlockSize: 16}, id, lane, tokens, blocks)
}

func (b *bed) holdIn(s blockkey.Scope, id fleet.ID, lane index.Lane, tokens []byte, blocks int) {
	b.Helper()
	keys, err := blockkey.AppendBytes(nil, s.Root(), tokens, s.BlockSize, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.index.Store(index.Member(id), lane, nil, 0, keys[:blocks])
}

// gpu stores on all three lanes, as what is in GPU memory is.
func (b *bed) gpu(id fleet.ID, tokens []byte, blocks int) {
	for _, l := range []index.Lane{index.LaneGPU, index.LaneHost, index.LaneDisk} {
		b.hold(id, l, tokens, blocks)
	}
}

func (b *bed) load(id fleet.ID, running, waiting int, now time.Time) {
	m := b.fleet.View().Member(id)
	b.fleet.Receive(id, *m.Info, &fleet.Load{
		At: now, Running: running, Waiting: waiting, KVUsage: math.NaN(), Totals: fleet.NoTotals(),
	}, now)
}

func (b *bed) pick(r Request) *Decision {
	b.Helper()
	return b.pickAt(r, t0)
}

func (b *bed) pickAt(r Request, now time.Time) *Decision {
	b.Helper()
	if r.Model == "" {
		r.Model = "model"
	}
	if r.Top == 0 {
		r.Top = -1
	}
	d, err := b.Pick(&r, now)
	if err != nil {
		b.Fatal(err)
	}
	return d
}

// prompt has n tokens: shared ones first, then those of the seed.
func prompt(seed uint32, shared, n int) []byte {
	var le []byte
	for i := range n {
		id := uint32(i)
		if i >= shared {
			id = uint32(mix(uint64(seed)<<32+uint64(i))) & 0xffff
		}
		le = binary.LittleEndian.AppendUint32(le, id)
	}
	return le
}

func tokens(le []byte) Prompt { return Prompt{Tokens: le} }

func first(d *Decision) string { return d.Candidates[0].Member.Info.Name }

func TestScoreChangesNothing(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	d := b.pick(Request{Prompt: tokens(prompt(1, 0, 2000)), Session: "s"})
	session := false
	b.fleet.Decide("s", t0, func(_ fleet.ID, known bool, _ []fleet.Reserved) (fleet.Choice, bool) {
		session = known
		return fleet.Choice{}, false
	})
	if r := b.fleet.View().Member(id).Reserved(); d.ID != "" || r.Open != 0 || session || b.predicted.Stats().Marks != 0 {
		t.Errorf("decision %q, %+v, session %v", d.ID, r, session)
	}
}

func TestUnknownPolicyOfThePickerIsAnError(t *testing.T) {
	if _, err := New(Config{Policies: Policies{Policy: "what"}}); !errors.Is(err, ErrPolicy) {
		t.Errorf("%v", err)
	}
}
