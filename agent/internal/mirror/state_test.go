package mirror

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// twin makes another mirror of the state of m.
func twin(m *Mirror) (*Mirror, error) {
	t := New(m.cfg)
	if err := t.Restore(m.Append(nil)); err != nil {
		return nil, err
	}
	return t, t.check(false)
}

// alike compares two mirrors that were drained.
func alike(a, b *Mirror) error {
	for l := range Lane(Lanes) {
		if a.Count(l) != b.Count(l) || a.Digest(l) != b.Digest(l) {
			return fmt.Errorf("lane %d: %d blocks %x, restored %d blocks %x", l, a.Count(l), a.Digest(l), b.Count(l), b.Digest(l))
		}
	}
	if err := b.check(true); err != nil {
		return fmt.Errorf("restored: %w", err)
	}
	x, y := a.Stats(), b.Stats()
	if x.Nodes != y.Nodes || x.GPUCopies != y.GPUCopies || x.Waiting != y.Waiting || x.Withheld != y.Withheld ||
		x.Suspect != y.Suspect || x.BlockSize != y.BlockSize || x.NoCredit != y.NoCredit || x.Groups != y.Groups {
		return fmt.Errorf("stats %+v, restored %+v", x, y)
	}
	return nil
}

func TestRestoredMirrorGoesOnLikeTheFirst(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{Model: "m", MaxNodes: rapid.SampledFrom([]int{0, 0, 8}).Draw(t, "bound")}
		m := New(cfg)
		step := func(m ...*Mirror) {
			switch rapid.IntRange(0, 9).Draw(t, "kind") {
			default:
				s := anyStore(t)
				for _, m := range m {
					m.Store(s)
				}
			case 0, 1, 2:
				r := Remove{
					Tier:  rapid.SampledFrom([]Tier{GPU, GPU, GPU, Host, Disk}).Draw(t, "tier"),
					Group: rapid.IntRange(0, 1).Draw(t, "group"), HasGroup: rapid.Bool().Draw(t, "has group"),
					Hashes: rapid.SliceOfN(rapid.Uint64Range(1, 12), 0, 4).Draw(t, "hashes"),
				}
				for _, m := range m {
					m.Remove(r)
				}
			case 3:
				tier := rapid.SampledFrom([]Tier{GPU, Host}).Draw(t, "clear")
				for _, m := range m {
					m.Clear(tier)
				}
			}
		}
		for range rapid.IntRange(0, 20).Draw(t, "before") {
			step(m)
			if rapid.Bool().Draw(t, "drain") {
				m.Drain(nil)
			}
		}
		other, err := twin(m)
		if err != nil {
			t.Fatal(err)
		}
		m.call = call{} // the batch is over
		r := newReplica()
		for range rapid.IntRange(0, 20).Draw(t, "after") {
			m.Drain(nil)
			if err := r.drainInto(other); err != nil {
				t.Fatal(err)
			}
			if err := alike(m, other); err != nil {
				t.Fatal(err)
			}
			step(m, other)
		}
	})
}

// rich is a mirror with something of everything.
func rich() *Mirror {
	m := New(Config{Model: "m"})
	store := func(group int, adapter string, parent uint64, hashes ...uint64) Store {
		s := Store{Group: group, Kind: Full, Hashes: hashes, BlockSize: 2, Adapter: adapter, Parent: parent, HasParent: parent != 0, HidesExtras: true}
		for _, h := range hashes {
			s.Tokens = append(s.Tokens, uint32(h), uint32(h))
		}
		return s
	}
	m.Store(store(0, "", 0, 1, 2, 3))
	m.Store(store(0, "", 0, 1, 2))      // suspect
	m.Store(store(0, "", 3, 4, 5))      // verifies it
	m.Store(store(0, "sql", 0, 21, 22)) // of an adapter
	m.Store(store(0, "", 77, 78))       // waits
	m.Store(store(0, "", 91, 92))       // a circle
	m.Store(store(0, "", 92, 91))       //
	m.Store(store(0, "", 3, 104, 105))  // other content
	again := store(0, "", 3, 204)       // one content, two hashes
	again.Tokens = []uint32{4, 4}
	m.Store(again)
	m.Store(Store{Tier: Host, Hashes: []uint64{2}})
	m.Store(Store{Tier: Disk, Hashes: []uint64{3}})
	m.Drain(nil)
	m.Remove(Remove{Hashes: []uint64{5, 105}}) // not told yet
	return m
}

func TestNoCutOfAStateIsTakenForWhole(t *testing.T) {
	state := rich().Append(nil)
	if err := New(Config{Model: "m"}).Restore(state); err != nil {
		t.Fatal(err)
	}
	for n := range len(state) {
		m := New(Config{Model: "m"})
		if err := m.Restore(state[:n]); err == nil {
			t.Fatalf("%d of %d bytes were taken", n, len(state))
		}
		if m.used != 0 || m.byHash.used != 0 || len(m.groups) != 0 || m.check(true) != nil {
			t.Fatalf("%d of %d bytes: something is left: %+v", n, len(state), m.Stats())
		}
	}
	if err := New(Config{Model: "m"}).Restore(append(slices.Clone(state), 0)); err == nil {
		t.Error("a byte too many was taken")
	}
}

func TestRestoreRefuses(t *testing.T) {
	state := rich().Append(nil)
	if err := New(Config{Model: "m", BlockSize: 4}).Restore(state); err == nil {
		t.Error("another block size was taken")
	}
	if err := New(Config{Model: "m", MaxNodes: 5}).Restore(state); err == nil {
		t.Error("more nodes than the bound were taken")
	}
	m := rich()
	if err := m.Restore(state); !errors.Is(err, errNotEmpty) {
		t.Errorf("a mirror in use was restored: %v", err)
	}
	if err := m.check(false); err != nil {
		t.Error(err)
	}
	m.Reset()
	if err := m.Restore(state); err != nil {
		t.Errorf("a mirror that was reset: %v", err)
	}
}

func FuzzRestore(f *testing.F) {
	f.Add(New(Config{Model: "m"}).Append(nil))
	f.Add(rich().Append(nil))
	state := rich().Append(nil)
	for k := 1; k < len(state); k *= 2 {
		f.Add(append(slices.Clone(state[:k]), bytes.Repeat([]byte{0xff}, 8)...))
	}
	f.Fuzz(func(t *testing.T, state []byte) {
		m := New(Config{Model: "m", MaxNodes: 64})
		err := m.Restore(state)
		if e := m.check(false); e != nil {
			t.Fatalf("%v, after %v", e, err)
		}
		if err != nil {
			return
		}
		r := newReplica()
		if err := r.drainInto(m); err != nil {
			t.Fatal(err)
		}
		again, err := twin(m)
		if err != nil {
			t.Fatal(err)
		}
		again.Drain(nil)
		if err := alike(m, again); err != nil {
			t.Fatal(err)
		}
		m.Store(Store{Kind: Full, Hashes: []uint64{1, 2}, Tokens: []uint32{1, 1, 2, 2}, BlockSize: 2})
		m.Remove(Remove{Hashes: []uint64{1, 2, 3}})
		m.Clear(Host)
		if err := r.drainInto(m); err != nil {
			t.Fatal(err)
		}
		m.Clear(GPU)
		m.Clear(Disk)
		if err := r.drainInto(m); err != nil || m.Count(LaneDisk) != 0 {
			t.Fatalf("%d blocks after all was cleared, %v", m.Count(LaneDisk), err)
		}
	})
}

func stateOf(n int) (*Mirror, []byte) {
	m := New(Config{Model: "m"})
	for _, s := range traffic(n, 500, 16) {
		m.Store(s)
	}
	m.Drain(nil)
	return m, m.Append(nil)
}

func TestStateOfHundredThousandBlocksIsSmall(t *testing.T) {
	m, state := stateOf(100_000)
	t.Logf("%d bytes, %.1f a block", len(state), float64(len(state))/100_000)
	if len(state) > 3e6 {
		t.Errorf("%d bytes", len(state))
	}
	other := New(Config{Model: "m"})
	if err := other.Restore(state); err != nil {
		t.Fatal(err)
	}
	other.Drain(nil)
	if err := alike(m, other); err != nil {
		t.Error(err)
	}
}

func BenchmarkAppendState(b *testing.B) {
	m, state := stateOf(100_000)
	b.ReportAllocs()
	b.SetBytes(int64(len(state)))
	for b.Loop() {
		state = m.Append(state[:0])
	}
}

func BenchmarkRestoreState(b *testing.B) {
	_, state := stateOf(100_000)
	b.ReportAllocs()
	b.SetBytes(int64(len(state)))
	for b.Loop() {
		m := New(Config{Model: "m"})
		if err := m.Restore(state); err != nil {
			b.Fatal(err)
		}
	}
}
