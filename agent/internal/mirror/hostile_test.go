package mirror

import (
	"syscall"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"pgregory.net/rapid"
)

// anyStore draws a store that no engine would send, over a handful of hashes.
func anyStore(t *rapid.T) Store {
	hash := rapid.Uint64Range(1, 12)
	s := Store{
		Tier:        rapid.SampledFrom([]Tier{GPU, GPU, GPU, Host, Disk, 7}).Draw(t, "tier"),
		Group:       rapid.SampledFrom([]int{0, 0, 0, 0, 1, -1}).Draw(t, "group"),
		Kind:        rapid.SampledFrom([]GroupKind{Full, Full, Full, Full, Full, Full, Sliding, Unspecified}).Draw(t, "kind"),
		Hashes:      rapid.SliceOfN(hash, 0, 4).Draw(t, "hashes"),
		Parent:      hash.Draw(t, "parent"),
		HasParent:   rapid.Bool().Draw(t, "has parent"),
		BlockSize:   rapid.SampledFrom([]int{2, 2, 2, 2, 2, 0, -3, 1 << 50}).Draw(t, "block size"),
		Adapter:     rapid.SampledFrom([]string{"", "", "", "a", "b"}).Draw(t, "adapter"),
		Salt:        rapid.SampledFrom([]string{"", "", "", "s"}).Draw(t, "salt"),
		Withhold:    rapid.IntRange(0, 9).Draw(t, "withhold") == 0,
		HidesExtras: rapid.IntRange(0, 9).Draw(t, "hides extras") == 0,
		Physical:    rapid.IntRange(0, 9).Draw(t, "physical") == 0,
	}
	for _, h := range s.Hashes {
		// Usually the content belongs to the hash.
		token := uint32(h)
		if rapid.IntRange(0, 9).Draw(t, "other content") == 0 {
			token = rapid.Uint32Range(1, 3).Draw(t, "token")
		}
		s.Tokens = append(s.Tokens, token, token)
	}
	if rapid.IntRange(0, 9).Draw(t, "cut") == 0 && len(s.Tokens) > 0 {
		s.Tokens = s.Tokens[1:]
	}
	if rapid.IntRange(0, 9).Draw(t, "refs") == 0 {
		s.Refs = make([][]blockkey.Ref, rapid.IntRange(0, 4).Draw(t, "n"))
		for i := range s.Refs {
			s.Refs[i] = []blockkey.Ref{{ID: "cat", Offset: -1}}
		}
	}
	return s
}

func TestNoEventBreaksTheMirror(t *testing.T) { rapid.Check(t, noEventBreaksTheMirror) }

// FuzzMirror lets coverage choose the events.
func FuzzMirror(f *testing.F) { f.Fuzz(rapid.MakeFuzz(noEventBreaksTheMirror)) }

func noEventBreaksTheMirror(t *rapid.T) {
	m := New(Config{Model: "m", MaxNodes: rapid.SampledFrom([]int{0, 3, 8}).Draw(t, "bound")})
	r := newReplica()
	drained := true
	drain := func(t *rapid.T) {
		if err := r.drainInto(m); err != nil {
			t.Fatal(err)
		}
		drained = true
	}
	t.Repeat(map[string]func(*rapid.T){
		"store": func(t *rapid.T) {
			m.Store(anyStore(t))
			drained = false
		},
		"remove": func(t *rapid.T) {
			m.Remove(Remove{
				Tier:     rapid.SampledFrom([]Tier{GPU, GPU, GPU, Host, Disk, 7}).Draw(t, "tier"),
				Group:    rapid.IntRange(-1, 1).Draw(t, "group"),
				HasGroup: rapid.Bool().Draw(t, "has group"),
				Hashes:   rapid.SliceOfN(rapid.Uint64Range(1, 12), 0, 4).Draw(t, "hashes"),
			})
			drained = false
		},
		"clear": func(t *rapid.T) {
			m.Clear(rapid.SampledFrom([]Tier{GPU, Host, Disk, 7}).Draw(t, "tier"))
			drained = false
		},
		"purge": func(t *rapid.T) {
			m.PurgeAdapter(rapid.SampledFrom([]string{"", "a"}).Draw(t, "adapter"))
			drained = false
		},
		"reset": func(t *rapid.T) {
			if rapid.IntRange(0, 9).Draw(t, "really") == 0 {
				m.Reset()
				r = newReplica()
				drained = true
			}
		},
		"drain": drain,
		"": func(t *rapid.T) {
			if err := m.check(drained); err != nil {
				t.Fatal(err)
			}
			if bound := m.cfg.MaxNodes; m.used > bound {
				t.Fatalf("%d nodes, bound %d", m.used, bound)
			}
		},
	})
	drain(t)
	m.Clear(GPU)
	m.Clear(Host)
	m.Clear(Disk)
	drain(t)
	if s := m.Stats(); s.Nodes != 0 || s.GPUCopies != 0 || s.Suspect != 0 {
		t.Fatalf("something stays: %+v", s)
	}
}

func TestBlocksThatAreTheirOwnAncestorsStayOut(t *testing.T) {
	self := chain(5, 5)
	cases := map[string][]Store{
		"itself":        {self},
		"child":         {chain(6, 7), chain(7, 6)},
		"long way":      {chain(5, 6, 7, 8), chain(8, 9, 5)},
		"inside one":    {chain(5, 6, 7, 5)},
		"twice in one":  {chain(0, 6, 6)},
		"below a root":  {chain(0, 1), chain(1, 2), chain(2, 1)},
		"with a branch": {chain(6, 7), chain(7, 6), chain(6, 8), chain(8, 9)},
	}
	for name, stores := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, Config{})
			for _, s := range stores {
				b.send(s)
			}
			b.want(0, 0, 0, 5, 6, 7, 8, 9)
			for _, s := range stores {
				b.send(gone(GPU, s.Hashes...))
			}
			b.want(0, 0, 0, 1)
			if s := b.m.Stats(); s.Nodes != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// Blocks that are their own ancestors may be there when a group turns out to be
// such that hashes are recomputed: they must not keep each other alive.
func TestCirclesEndWhenHashesAreRecomputed(t *testing.T) {
	for name, stores := range map[string][]Store{
		"itself": {chain(5, 5)},
		"child":  {chain(6, 7), chain(7, 6)},
		"long":   {chain(5, 6, 7, 8), chain(8, 9, 5), chain(9, 10)},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, Config{})
			for _, s := range stores {
				b.send(in(0, Full, s))
			}
			b.send(in(0, State, chain(0, 11)))
			b.m.Clear(GPU)
			b.m.Drain(nil)
			if err := b.m.check(true); err != nil {
				t.Error(err)
			}
			if s := b.m.Stats(); s.Nodes != 0 || s.Contradictions == 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// within fails the test when work isn't linear: the limit is far above what
// linear work takes and far below what quadratic work would. It counts CPU time,
// because a machine may have others to serve.
func within(t *testing.T, limit time.Duration, work func()) {
	t.Helper()
	start := ownCPU(t)
	work()
	if took := ownCPU(t) - start; took > limit {
		t.Errorf("took %v, at most %v", took, limit)
	}
}

// ownCPU is the processor time of this process.
func ownCPU(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestWorkStaysLinear(t *testing.T) {
	const n = 100_000
	b := newBench(t, Config{})
	deep := make([]uint64, n)
	for i := range deep {
		deep[i] = uint64(i + 1)
	}
	cases := []struct {
		name string
		do   func(m *Mirror)
	}{
		{"a deep chain, its head flapping", func(m *Mirror) {
			m.Store(chain(0, deep...))
			m.Drain(nil)
			for range n {
				m.Remove(gone(GPU, 1))
				m.Store(chain(0, 1))
			}
		}},
		{"a deep chain that was never told, its head flapping", func(m *Mirror) {
			m.Store(chain(0, deep...))
			for range n {
				m.Remove(gone(GPU, 1))
				m.Store(chain(0, 1))
			}
		}},
		{"a deep chain, tail first", func(m *Mirror) {
			for i := n - 1; i > 0; i-- {
				m.Store(chain(deep[i-1], deep[i]))
			}
			m.Store(chain(0, 1))
		}},
		{"a deep chain, cut from its head, other content at every block", func(m *Mirror) {
			m.Store(chain(0, deep...))
			m.Drain(nil)
			for i := range deep {
				m.Remove(gone(GPU, deep[i]))
			}
			m.Drain(nil)
			for i := n - 1; i > 0; i-- {
				s := chain(deep[i-1], deep[i])
				s.Tokens = tokensOf(7)
				m.Store(s)
			}
		}},
		{"many children of one flapping parent", func(m *Mirror) {
			for _, h := range deep[1:] {
				m.Store(chain(1, h))
			}
			for range n {
				m.Store(chain(0, 1))
				m.Remove(gone(GPU, 1))
			}
		}},
		{"a deep chain, suspected at its head by every other event", func(m *Mirror) {
			m.Store(chain(0, deep[:n-2000]...))
			for _, h := range deep[n-2000:] { // each walks maxProof blocks
				m.Store(chain(0, 1))
				m.Remove(gone(GPU, 1))
				m.Store(chain(n-2000, h))
			}
		}},
		{"groups that change their kind and number", func(m *Mirror) {
			m.Store(in(0, Full, chain(0, deep...)))
			for i := range n {
				m.Store(in(i%(2*maxGroups), GroupKind(i%3), chain(0, 1)))
			}
		}},
		{"one content under many hashes", func(m *Mirror) {
			for _, h := range deep {
				s := chain(0, h)
				s.Tokens = tokensOf(7)
				m.Store(s)
			}
			m.Drain(nil)
			for _, h := range deep {
				m.Remove(gone(GPU, h))
			}
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b.m.Reset()
			within(t, 30*time.Second, func() {
				c.do(b.m)
				b.m.Drain(nil)
			})
			if err := b.m.check(true); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestEndlessInputIsBounded(t *testing.T) {
	const bound = 1000
	m := New(Config{Model: "m", MaxNodes: bound})
	for h := uint64(1); h < 100*bound; h++ {
		m.Store(chain(0, h))
		m.Store(chain(h<<32, h<<32+1)) // unknown parents
		m.Store(placeholder(Host, 0, h<<40))
		if h%777 == 0 {
			m.Drain(nil)
		}
	}
	m.Drain(nil)
	if err := m.check(true); err != nil {
		t.Error(err)
	}
	if len(m.nodes) > bound+1 || cap(m.dirty) > 2*bound || m.Stats().Dropped == 0 {
		t.Errorf("%d nodes, %d dirty, %+v", len(m.nodes), cap(m.dirty), m.Stats())
	}
}
