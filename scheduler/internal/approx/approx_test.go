package approx

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

var t0 = time.Unix(1_700_000_000, 0)

// chain has n keys; those from at on belong to the branch.
func chain(branch uint64, at, n int) []blockkey.Key {
	keys := make([]blockkey.Key, 0, n)
	parent := blockkey.Scope{Model: "m"}.Root()
	for i := range n {
		local := uint64(i)
		if i >= at {
			local += branch << 32
		}
		parent = blockkey.Chain(parent, local*0x9e3779b97f4a7c15+1)
		keys = append(keys, parent)
	}
	return keys
}

func newMirror(max int) (*Mirror, *index.Index) {
	x := index.New(index.Config{})
	return New(Config{Index: x, MaxBlocks: max}), x
}

func send(x *Mirror, m index.Member, blocks int, keys []blockkey.Key) {
	x.Add(Prompt{Member: m, Epoch: 1, Blocks: blocks, Lane: true, Keys: keys, BlockSize: 16}, t0)
}

func depth(x *index.Index, m index.Member, keys []blockkey.Key) int {
	var answer index.Answer
	x.Match(keys, &answer)
	for h, depth := range answer.All() {
		if h.Member() == m && h.On(index.LaneApproximate) {
			return int(depth)
		}
	}
	return 0
}

func TestAtCapacityTheOldestTailsGoFirst(t *testing.T) {
	m, x := newMirror(0)
	a, b, c := chain(1, 10, 40), chain(2, 10, 40), chain(3, 10, 40)
	send(m, 0, 100, a) // 40 blocks
	send(m, 0, 100, b) // 30 more
	send(m, 0, 100, c) // 30 more: full
	send(m, 0, 100, a[:30])
	// a's end was used last at the start, then all of b, of c, and a up to 30.
	send(m, 0, 100, chain(4, 10, 15)) // 5 blocks: from the end of a
	if got := [3]int{depth(x, 0, a), depth(x, 0, b), depth(x, 0, c)}; got != [3]int{35, 40, 40} {
		t.Errorf("%v", got)
	}
	send(m, 0, 100, chain(5, 10, 20)) // 10 blocks: the rest of it, then the end of b
	if got := [3]int{depth(x, 0, a), depth(x, 0, b), depth(x, 0, c)}; got != [3]int{30, 35, 40} {
		t.Errorf("%v", got)
	}
	send(m, 0, 100, chain(6, 10, 60)) // 50 blocks: b down to what all share, and most of c
	if got := [3]int{depth(x, 0, a), depth(x, 0, b), depth(x, 0, c)}; got != [3]int{30, 10, 15} {
		t.Errorf("%v", got)
	}
	if s := m.Stats(); s.Blocks != 100 || s.Members != 1 || int64(s.Blocks) != int64(x.Count(0, index.LaneApproximate)) {
		t.Errorf("%+v", s)
	}
}

// blocks is a member's cache as simply as can be: when each block was used.
type blocks map[blockkey.Key]int

func (b blocks) send(keys []blockkey.Key, clock *int, capacity int) {
	*clock += len(keys)
	for i, k := range keys {
		b[k] = *clock - i // the head is the most recent
	}
	for len(b) > capacity {
		oldest, at := math.MaxInt, blockkey.Key(0)
		for k, used := range b {
			if used < oldest {
				oldest, at = used, k
			}
		}
		delete(b, at)
	}
}

func (b blocks) depth(keys []blockkey.Key) int {
	for i, k := range keys {
		if _, ok := b[k]; !ok {
			return i
		}
	}
	return len(keys)
}

// What is believed equals a cache of blocks of which the longest unused leaves
// first, for any prompts, restarts and switches of the lane.
func TestMirrorIsAnLRUOfBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, x := newMirror(0)
		capacity := rapid.IntRange(1, 60).Draw(t, "capacity")
		model := map[index.Member]blocks{}
		epochs := map[index.Member]uint64{}
		lanes := map[index.Member]bool{0: true, 1: true}
		clock := 0
		now := t0
		prompt := func() []blockkey.Key {
			n := rapid.IntRange(1, 30).Draw(t, "length")
			return chain(rapid.Uint64Range(1, 4).Draw(t, "branch"), rapid.SampledFrom([]int{0, 3, 8, 9, 20}).Draw(t, "at"), n)
		}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			id := index.Member(rapid.IntRange(0, 1).Draw(t, "member"))
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0:
				m.Forget(id)
				delete(model, id)
			case 1:
				epochs[id]++
				delete(model, id) // when next heard of
				m.Forget(id)
			case 2:
				lanes[id] = !lanes[id]
				m.Lane(id, lanes[id])
			case 3:
				now = now.Add(time.Minute)
				m.Expire(now)
			default:
				keys := prompt()
				if model[id] == nil {
					model[id] = blocks{}
				}
				model[id].send(keys, &clock, capacity)
				m.Add(Prompt{
					Member: id, Epoch: epochs[id], Blocks: capacity, Lane: lanes[id], Keys: keys, BlockSize: 16,
					Cached: rapid.IntRange(0, 40).Draw(t, "cached"),
				}, now)
			}
			held := 0
			for id, b := range model {
				held += len(b)
				want := len(b)
				if !lanes[id] {
					want = 0
				}
				if got := x.Count(id, index.LaneApproximate); got != want {
					t.Fatalf("member %d has %d blocks in the index, want %d", id, got, want)
				}
				keys := prompt()
				if got, want := depth(x, id, keys), b.depth(keys); lanes[id] && got != want {
					t.Fatalf("member %d: depth %d, want %d", id, got, want)
				}
			}
			if s := m.Stats(); s.Blocks != held {
				t.Fatalf("%+v, want %d blocks", s, held)
			}
			for id, p := range m.members {
				if p.lately.Tokens < -1e-6 || p.lately.Requests < -1e-9 {
					t.Fatalf("member %d: %+v", id, p.lately)
				}
			}
		}
		now = now.Add(Window)
		m.Expire(now)
		m.Forget(0)
		m.Forget(1)
		if m.live != 0 || len(m.heads) != 0 || len(m.nodes)-1 != len(m.spare) || len(m.places)-1 != len(m.unused) || x.Stats().Memberships != 0 {
			t.Fatalf("%d pieces, %d heads, %d memberships are left", m.live, len(m.heads), x.Stats().Memberships)
		}
	})
}

func TestANewEpochBeginsEmpty(t *testing.T) {
	m, x := newMirror(0)
	keys := chain(1, 0, 20)
	send(m, 3, 100, keys)
	m.Add(Prompt{Member: 3, Epoch: 2, Blocks: 100, Lane: true, Keys: keys[:4], BlockSize: 16}, t0)
	if got := depth(x, 3, keys); got != 4 || m.Follows(3, 1) || !m.Follows(3, 2) || m.Stats().Resets != 1 {
		t.Errorf("depth %d, %+v", got, m.Stats())
	}
}

func TestMemoryIsBounded(t *testing.T) {
	m, _ := newMirror(1 << 12)
	for i := range uint64(4000) {
		m.Add(Prompt{Member: index.Member(i % 7), Epoch: 1, Blocks: 1 << 20, Keys: chain(i, 0, 1+int(i%40)), BlockSize: 16}, t0.Add(time.Duration(i)*time.Second))
	}
	if s := m.Stats(); s.Blocks > 1<<12 || s.Pieces > 1<<12 || s.Blocks < 1000 || s.Prompts > 180 {
		t.Errorf("%+v", s)
	}
	m, _ = newMirror(1 << 20)
	for i := range uint64(maxHits + 1000) {
		m.Add(Prompt{Member: 1, Epoch: 1, Blocks: 100, Keys: chain(i, 0, 2), BlockSize: 16}, t0)
	}
	if s := m.Stats(); s.Prompts != maxHits || s.Blocks != 100 {
		t.Errorf("%+v", s)
	}
}

// Keys that no chain can have do not harm it.
func TestKeysThatContradictEachOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, _ := newMirror(1 << 10)
		key := rapid.Custom(func(t *rapid.T) blockkey.Key { return blockkey.Key(rapid.Uint64Range(1, 5).Draw(t, "key")) })
		for range rapid.IntRange(1, 30).Draw(t, "prompts") {
			m.Add(Prompt{
				Member: index.Member(rapid.IntRange(0, 2).Draw(t, "member")), Blocks: rapid.IntRange(0, 20).Draw(t, "blocks"),
				Lane: true, Keys: rapid.SliceOfN(key, 0, 10).Draw(t, "keys"), BlockSize: rapid.IntRange(-1, 16).Draw(t, "size"),
			}, t0)
			m.Owners(rapid.SliceOfN(key, 0, 10).Draw(t, "other"), nil)
		}
		m.Expire(t0.Add(Window))
		for id := range index.Member(3) {
			m.Forget(id)
		}
		if m.live != 0 {
			t.Fatalf("%d pieces are left", m.live)
		}
	})
}

func history(m *Mirror, id index.Member, blocks int, now time.Time) (h History) {
	m.Expire(now)
	m.Histories(func(index.Member) int { return blocks }, func(i index.Member, of History) {
		if i == id {
			h = of
		}
	})
	return h
}

func TestEntriesLeaveAfterThreeMinutes(t *testing.T) {
	m, _ := newMirror(0)
	send(m, 0, 1000, chain(1, 0, 100))
	// 1,600 tokens of one prompt that had none of them cached.
	want := learn.Work{Requests: 1, Tokens: 1600, Pairs: 1600 * 800}
	for at, want := range map[time.Duration]learn.Work{0: want, Window - 1: want, Window: {}} {
		m2, _ := newMirror(0)
		send(m2, 0, 1000, chain(1, 0, 100))
		if got := history(m2, 0, 0, t0.Add(at)).Lately; got != want {
			t.Errorf("after %v: %+v, want %+v", at, got, want)
		}
	}
	if s := m.Stats(); s.Prompts != 1 || s.Blocks != 100 {
		t.Errorf("%+v", s)
	}
}

// What is cached half of the time is charged half, and to each holder its part.
func TestLatelyIsSharedByThoseThatHoldIt(t *testing.T) {
	m, _ := newMirror(0)
	keys := chain(1, 0, 100)
	send(m, 0, 1000, keys)
	m.Add(Prompt{Member: 0, Epoch: 1, Blocks: 1000, Keys: keys, Cached: 100, BlockSize: 16}, t0)
	if got := history(m, 0, 0, t0).Lately; got.Tokens != 1600 || got.Requests != 1 {
		t.Errorf("2 prompts, one of them cached: %+v", got)
	}
	m.Add(Prompt{Member: 1, Epoch: 1, Blocks: 1000, Keys: keys, Cached: 0, BlockSize: 16}, t0)
	for id := range index.Member(2) {
		// 3 prompts, a third cached: 2 of 1,600 tokens, by two members.
		if got := history(m, id, 0, t0).Lately; math.Abs(got.Tokens-1600) > 1e-9 || math.Abs(got.Requests-1) > 1e-9 {
			t.Errorf("member %d: %+v", id, got)
		}
	}
}

func TestPopularVictimsAreDearer(t *testing.T) {
	victims := func(times int) learn.Work {
		m, _ := newMirror(0)
		for range times {
			send(m, 0, 100, chain(1, 0, 50))
		}
		send(m, 0, 100, chain(2, 0, 50))
		if got := history(m, 0, 0, t0).Victims; got != (learn.Work{}) {
			t.Errorf("nothing has to leave: %+v", got)
		}
		return history(m, 0, 10, t0).Victims // the last ten blocks of the first
	}
	// 160 tokens behind 640.
	if got, want := victims(1), (learn.Work{Requests: 1, Tokens: 160, Pairs: 160 * 720}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := victims(4); got.Tokens != 640 {
		t.Errorf("wanted four times: %+v", got)
	}
}

func TestHeatIsMovedAndHotPiecesAreCopied(t *testing.T) {
	ids := []index.Member{0, 1}
	curves := []learn.Curve{{B: 0.1}, {B: 0.1}}
	feed := func(m *Mirror, id index.Member, keys []blockkey.Key, n int, ms float64, at time.Duration) {
		for range n {
			m.Add(Prompt{Member: id, Epoch: 1, Blocks: 1 << 20, Keys: keys, BlockSize: 16, FirstTokenMS: ms}, t0.Add(at))
		}
	}
	owners := func(m *Mirror, keys []blockkey.Key) ([]index.Member, bool) { return m.Owners(keys, nil) }

	m, _ := newMirror(0)
	a, b, c := chain(1, 0, 100), chain(2, 0, 60), chain(3, 0, 30)
	feed(m, 0, a, 40, 100, 0)
	feed(m, 0, b, 30, 100, 0)
	feed(m, 0, c, 20, 100, 0)
	feed(m, 1, chain(4, 0, 10), 9, 100, 0)
	m.Balance(ids, curves, t0)
	if m.Stats().Moved != 0 {
		t.Fatal("99 prompts are too few")
	}
	feed(m, 1, chain(4, 0, 10), 1, 100, 0)
	m.Balance(ids, curves, t0)
	// 4000 + 1800 + 600 against 100 blocks: c goes, then b; a would turn the order.
	for _, p := range []struct {
		keys []blockkey.Key
		move bool
	}{{a, false}, {b, true}, {c, true}} {
		got, moved := owners(m, p.keys)
		if moved != p.move || moved && (len(got) != 1 || got[0] != 1) {
			t.Errorf("%d blocks: %v, moved %v", len(p.keys), got, moved)
		}
	}
	m.Expire(t0.Add(Window))
	if got, moved := owners(m, c); moved || len(got) != 0 {
		t.Errorf("after the window: %v", got)
	}

	// One piece is all the heat.
	m, _ = newMirror(0)
	feed(m, 0, a, 60, 100, 0)
	feed(m, 0, a, 60, 150, 2*time.Minute)
	m.Balance(ids, curves, t0.Add(2*time.Minute))
	if got, _ := owners(m, a); len(got) != 0 {
		t.Errorf("it waits half as long again: %v", got)
	}
	feed(m, 0, a, 60, 400, 2*time.Minute)
	m.Balance(ids, curves, t0.Add(2*time.Minute))
	if got, moved := owners(m, a); len(got) != 1 || got[0] != 1 || moved {
		t.Errorf("it waits much longer: %v, moved %v", got, moved)
	}
}
