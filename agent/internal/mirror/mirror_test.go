package mirror

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kvscout/kvscout/protocol/blockkey"
)

// bench is a mirror with a receiver of its ops. Block hashes are small numbers,
// the tokens of block h are {h, h}.
type bench struct {
	t testing.TB
	m *Mirror
	r *replica
}

func newBench(t testing.TB, cfg Config) *bench {
	cfg.Model = "m"
	return &bench{t: t, m: New(cfg), r: newReplica()}
}

func tokensOf(hashes ...uint64) []uint32 {
	var tokens []uint32
	for _, h := range hashes {
		tokens = append(tokens, uint32(h), uint32(h))
	}
	return tokens
}

// chain returns a store of consecutive blocks, of a prompt's first blocks when
// parent is 0.
func chain(parent uint64, hashes ...uint64) Store {
	return Store{Kind: Full, Hashes: hashes, Parent: parent, HasParent: parent != 0, Tokens: tokensOf(hashes...), BlockSize: 2}
}

func on(t Tier, s Store) Store { s.Tier = t; return s }
func in(group int, kind GroupKind, s Store) Store {
	s.Group, s.Kind = group, kind
	return s
}

func placeholder(t Tier, group int, hashes ...uint64) Store {
	return Store{Tier: t, Group: group, Hashes: hashes}
}

func gone(t Tier, hashes ...uint64) Remove {
	return Remove{Tier: t, HasGroup: true, Hashes: hashes}
}

func (b *bench) send(events ...any) *bench {
	b.t.Helper()
	for _, event := range events {
		switch event := event.(type) {
		case Store:
			b.m.Store(event)
		case Remove:
			b.m.Remove(event)
		case Tier:
			b.m.Clear(event)
		}
		if err := b.m.check(false); err != nil {
			// What was published may differ until the drain, the rest may not.
			if len(b.m.dirty) == 0 {
				b.t.Fatal(err)
			}
		}
	}
	return b
}

// want drains and compares the depth of the prompt of the given blocks.
func (b *bench) want(gpu, host, disk int, hashes ...uint64) *bench {
	b.t.Helper()
	return b.wantIn(blockkey.Scope{}, gpu, host, disk, hashes...)
}

func (b *bench) wantIn(s blockkey.Scope, gpu, host, disk int, hashes ...uint64) *bench {
	b.t.Helper()
	if err := b.r.drainInto(b.m); err != nil {
		b.t.Fatal(err)
	}
	s.Model, s.BlockSize = "m", 2
	keys := blockkey.AppendTokens(nil, s.Root(), tokensOf(hashes...), 2, nil)
	got := []int{b.r.match(LaneGPU, keys), b.r.match(LaneHost, keys), b.r.match(LaneDisk, keys)}
	if diff := cmp.Diff([]int{gpu, host, disk}, got); diff != "" {
		b.t.Fatalf("depths of %v (-want +got):\n%s%+v", hashes, diff, b.m.Stats())
	}
	return b
}

func TestEveryBlockOfAnEventHangsBelowTheOneBefore(t *testing.T) {
	newBench(t, Config{}).send(chain(0, 1, 2, 3, 4, 5, 6, 7, 8)).want(8, 8, 8, 1, 2, 3, 4, 5, 6, 7, 8)
}

func TestBlockSizeIsLearnedAndAnotherRefused(t *testing.T) {
	b := newBench(t, Config{}).send(chain(0, 1, 2))
	other := chain(2, 3)
	other.Tokens, other.BlockSize = []uint32{3, 3, 3}, 3
	b.send(other).want(2, 2, 2, 1, 2, 3)
	if s := b.m.Stats(); s.BlockSize != 2 || s.Refused != 1 {
		t.Errorf("%+v", s)
	}
}

func TestConfiguredBlockSizeStands(t *testing.T) {
	b := newBench(t, Config{BlockSize: 4}).send(chain(0, 1, 2)).want(0, 0, 0, 1)
	if s := b.m.Stats(); s.BlockSize != 4 || s.Refused != 1 {
		t.Errorf("%+v", s)
	}
}

func TestIllFormedStoresAreRefused(t *testing.T) {
	cases := map[string]func(*Store){
		"no hashes":         func(s *Store) { s.Hashes = nil },
		"no tokens":         func(s *Store) { s.Tokens = nil },
		"tokens too short":  func(s *Store) { s.Tokens = s.Tokens[1:] },
		"block size 0":      func(s *Store) { s.BlockSize = 0 },
		"block size -1":     func(s *Store) { s.BlockSize = -1 },
		"block size huge":   func(s *Store) { s.BlockSize = 1 << 40 },
		"group -1":          func(s *Store) { s.Group = -1 },
		"tier unknown":      func(s *Store) { s.Tier = 9 },
		"kind unknown":      func(s *Store) { s.Kind = 9 },
		"refs not aligned":  func(s *Store) { s.Refs = make([][]blockkey.Ref, 1) },
		"refs of no blocks": func(s *Store) { s.Refs = [][]blockkey.Ref{} },
	}
	for name, spoil := range cases {
		t.Run(name, func(t *testing.T) {
			s := chain(0, 1, 2)
			spoil(&s)
			b := newBench(t, Config{}).send(s).want(0, 0, 0, 1, 2)
			if got := b.m.Stats(); got.Refused != 1 || got.Nodes != 0 {
				t.Errorf("%+v", got)
			}
			b.send(chain(0, 1, 2)).want(2, 2, 2, 1, 2)
		})
	}
}

func TestHolesEndTheDepth(t *testing.T) {
	newBench(t, Config{}).send(chain(0, 1, 2, 3, 4, 5), gone(GPU, 3)).want(2, 2, 2, 1, 2, 3, 4, 5).
		send(chain(2, 3)).want(5, 5, 5, 1, 2, 3, 4, 5)
}

func TestUnknownParentWaits(t *testing.T) {
	b := newBench(t, Config{}).send(chain(2, 3, 4)).want(0, 0, 0, 1, 2, 3, 4)
	if s := b.m.Stats(); s.Waiting != 2 {
		t.Errorf("%+v", s)
	}
	b.send(chain(0, 1, 2)).want(4, 4, 4, 1, 2, 3, 4)
	if s := b.m.Stats(); s.Waiting != 0 {
		t.Errorf("%+v", s)
	}
	b.send(gone(GPU, 1)).want(0, 0, 0, 1, 2, 3, 4)
	if s := b.m.Stats(); s.Waiting != 3 {
		t.Errorf("%+v", s)
	}
	b.send(gone(GPU, 4), gone(GPU, 3), gone(GPU, 2)).want(0, 0, 0, 1)
	if s := b.m.Stats(); s.Waiting != 0 || s.Nodes != 0 {
		t.Errorf("%+v", s)
	}
}

func TestBlockStaysUntilItsLastCopyIsGone(t *testing.T) {
	newBench(t, Config{}).send(chain(0, 1, 2), chain(1, 2), chain(1, 2)).
		send(gone(GPU, 2), gone(GPU, 2)).want(2, 2, 2, 1, 2).
		send(gone(GPU, 2)).want(1, 1, 1, 1, 2)
}

func TestRemovalsOfTheUnknownAreCounted(t *testing.T) {
	b := newBench(t, Config{}).send(gone(GPU, 7), chain(0, 1), gone(GPU, 1), gone(GPU, 1), gone(Host, 1)).
		send(Remove{Tier: 9, Hashes: []uint64{1}}).want(0, 0, 0, 1).send(chain(0, 1)).want(1, 1, 1, 1)
	if s := b.m.Stats(); s.UnknownRemoved != 4 {
		t.Errorf("%+v", s)
	}
}

func TestDrainTellsOnlyWhatLasted(t *testing.T) {
	b := newBench(t, Config{}).send(chain(0, 1, 2, 3)).want(3, 3, 3, 1, 2, 3)
	b.send(gone(GPU, 3), gone(GPU, 2), chain(1, 2), chain(2, 3), chain(3, 4), gone(GPU, 4))
	if ops := b.m.Drain(nil); len(ops) != 0 {
		t.Errorf("%+v", ops)
	}
}

func TestOneChainIsOneRun(t *testing.T) {
	b := newBench(t, Config{}).send(chain(0, 1, 2), chain(2, 3), chain(3, 4))
	keys := blockkey.AppendTokens(nil, blockkey.Scope{Model: "m", BlockSize: 2}.Root(), tokensOf(1, 2, 3, 4), 2, nil)
	want := []Op{{Lane: LaneDisk, Keys: keys}, {Lane: LaneHost, Keys: keys}, {Keys: keys}}
	if diff := cmp.Diff(want, b.m.Drain(nil), cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
	b.send(gone(GPU, 4), gone(GPU, 3), placeholder(Host, 0, 2))
	want = []Op{
		{Remove: true, Position: 2, Before: keys[:2], Keys: keys[2:]},
		{Remove: true, Lane: LaneHost, Position: 2, Before: keys[:2], Keys: keys[2:]},
		{Remove: true, Lane: LaneDisk, Position: 2, Before: keys[:2], Keys: keys[2:]},
	}
	if diff := cmp.Diff(want, b.m.Drain(nil), cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
}

func TestClearOfTheGPUKeepsOtherTiers(t *testing.T) {
	newBench(t, Config{}).send(chain(0, 1, 2, 3), placeholder(Host, 0, 1), placeholder(Host, 0, 2), placeholder(Disk, 0, 3), GPU).
		want(0, 2, 3, 1, 2, 3).
		send(gone(Host, 2)).want(0, 1, 1, 1, 2, 3).
		send(chain(0, 1, 2)).want(2, 2, 3, 1, 2, 3)
}

func TestPlaceholderJoinsByHash(t *testing.T) {
	b := newBench(t, Config{}).send(chain(0, 1, 2), placeholder(Host, 0, 1), placeholder(Host, 0, 2), placeholder(Host, 0, 9)).
		send(gone(GPU, 2), gone(GPU, 1)).want(0, 2, 2, 1, 2)
	if s := b.m.Stats(); s.UnknownStored != 1 {
		t.Errorf("%+v", s)
	}
	// A placeholder names a group, but doesn't tell that there is one.
	b.send(placeholder(Host, 5, 1)).want(0, 2, 2, 1, 2)
}

func TestHostStoresTeachNoContent(t *testing.T) {
	salted := chain(0, 1)
	salted.Salt = "s"
	b := newBench(t, Config{}).send(salted, on(Host, chain(0, 1)), on(Host, chain(0, 5)), gone(GPU, 1)).
		want(0, 0, 0, 1).want(0, 0, 0, 5).wantIn(blockkey.Scope{Salt: "s"}, 0, 1, 1, 1)
	if s := b.m.Stats(); s.Contradictions != 0 {
		t.Errorf("%+v", s)
	}
}

func TestSeveralBlocksOffloadedAtOnceCountAsTheLast(t *testing.T) {
	newBench(t, Config{}).send(chain(0, 1, 2, 3), on(Host, chain(0, 1, 2, 3)), gone(GPU, 3)).want(2, 3, 3, 1, 2, 3).
		send(gone(GPU, 2)).want(1, 1, 1, 1, 2, 3).
		send(chain(1, 2), gone(Host, 1, 2, 3)).want(2, 2, 2, 1, 2, 3)
}

func TestOnlyOwnCopiesLeadOnBelowTheGPUPrefix(t *testing.T) {
	// 2 is on the host only, 3 in GPU memory only: an engine loads 2 and stops.
	newBench(t, Config{}).send(chain(0, 1, 2, 3), placeholder(Host, 0, 2), gone(GPU, 2)).want(1, 2, 2, 1, 2, 3).
		send(placeholder(Disk, 0, 3)).want(1, 2, 3, 1, 2, 3)
}

func TestReportedHitsAddNoCopies(t *testing.T) {
	b := newBench(t, Config{}).send(chain(0, 1, 2, 3), chain(0, 1, 2), chain(0, 1, 2)).want(3, 3, 3, 1, 2, 3).
		send(gone(GPU, 3), gone(GPU, 2)).want(1, 1, 1, 1, 2, 3).
		send(gone(GPU, 1)).want(0, 0, 0, 1).
		send(chain(0, 1, 2)).want(2, 2, 2, 1, 2)
	if s := b.m.Stats(); s.Repeated != 6 || s.UnknownRemoved != 0 {
		t.Errorf("%+v", s)
	}
}

func TestReportOfAHitShowsWhatWasBelievedLost(t *testing.T) {
	// 1 and 2 were computed twice; one copy each is gone, one stays.
	newBench(t, Config{}).send(chain(0, 1, 2), chain(0, 1, 2), gone(GPU, 2), gone(GPU, 1)).want(0, 0, 0, 1, 2).
		send(chain(0, 1, 2)).want(2, 2, 2, 1, 2)
}

func TestStoreBelowProvesTheBlocksAbove(t *testing.T) {
	b := newBench(t, Config{}).send(chain(0, 1, 2), chain(0, 1, 2), gone(GPU, 2), gone(GPU, 1)).want(0, 0, 0, 1, 2)
	if s := b.m.Stats(); s.Suspect != 2 {
		t.Errorf("%+v", s)
	}
	b.send(chain(2, 3)).want(3, 3, 3, 1, 2, 3).
		send(gone(GPU, 1)).want(0, 0, 0, 1, 2, 3)
	if s := b.m.Stats(); s.Suspect != 0 {
		t.Errorf("%+v", s)
	}
}

func TestStoreBelowProvesNothingThatWasRemoved(t *testing.T) {
	newBench(t, Config{}).send(chain(0, 1, 2), gone(GPU, 1), chain(2, 3)).want(0, 0, 0, 1, 2, 3)
}

func TestErasWithoutReportsCountEveryStore(t *testing.T) {
	s := chain(0, 1)
	s.Physical = true
	newBench(t, Config{}).send(s, s, gone(GPU, 1)).want(1, 1, 1, 1).send(gone(GPU, 1)).want(0, 0, 0, 1)
}

func TestSuspectsAreBounded(t *testing.T) {
	b := newBench(t, Config{})
	for h := uint64(1); h <= 2*maxSuspects; h++ {
		b.m.Store(chain(0, h))
		b.m.Store(chain(0, h))
		b.m.Remove(gone(GPU, h))
	}
	if s := b.m.Stats(); s.Suspect > maxSuspects || s.Nodes > maxSuspects {
		t.Errorf("%+v", s)
	}
	b.want(0, 0, 0, 1)
}

func TestSlidingGroupsMustHoldTheBlockToo(t *testing.T) {
	sliding := func(s Store) Store { return in(0, Sliding, s) }
	full := func(s Store) Store { return in(1, Full, s) }
	named := sliding(chain(0, 1, 2, 3))
	named.Hashes = nil
	newBench(t, Config{}).
		send(sliding(chain(0, 1, 2, 3)), full(chain(0, 1, 2, 3))).want(3, 3, 3, 1, 2, 3).
		send(Remove{Group: 0, HasGroup: true, Hashes: []uint64{2}}).want(1, 1, 1, 1, 2, 3)
	newBench(t, Config{}).send(full(chain(0, 1, 2, 3))).want(0, 0, 0, 1, 2, 3).
		send(named).want(0, 0, 0, 1, 2, 3)
	sparse := sliding(chain(0, 1, 2, 3))
	sparse.Hashes = []uint64{1, 3}
	newBench(t, Config{}).send(sparse, full(chain(0, 1, 2, 3))).want(1, 1, 1, 1, 2, 3)
}

// TestSilentGroupsEndAllCredit is an engine with a group that has announced
// nothing yet, because its blocks are larger than the prompts so far: it must hold
// one for any hit. That it is there is told by the numbers of the others, by what
// is said of groups, or by what the engine says of its size.
func TestSilentGroupsEndAllCredit(t *testing.T) {
	said := Rule{}
	said.Groups[0].Kind, said.Groups[1].Kind = Full, State
	for name, c := range map[string]struct {
		rule  Rule
		group int // of the one that is heard
		want  int
	}{
		"one group":           {want: 2},
		"the second of two":   {group: 1},
		"the first, two said": {rule: said},
		"the first of some":   {rule: Rule{Several: true}},
	} {
		b := newBench(t, Config{Rule: c.rule}).send(in(c.group, Full, chain(0, 1, 2))).want(c.want, c.want, c.want, 1, 2)
		if guess := b.m.Stats().Guess; (guess == "") != (c.want > 0) {
			t.Errorf("%s: %q", name, guess)
		}
		b.m.Heard() // who finds something cached needs nothing of groups that are silent
		b.want(2, 2, 2, 1, 2)
	}
	// A longer prompt is announced by all.
	state := in(0, State, chain(0, 9))
	state.Hashes, state.Tokens, state.BlockSize = []uint64{2}, chain(0, 1, 2).Tokens, 4
	newBench(t, Config{}).send(in(1, Full, chain(0, 1, 2))).want(0, 0, 0, 1, 2).
		send(state, in(1, Full, chain(0, 1, 2))).want(2, 2, 2, 1, 2)
}

func TestFirstStoreOfASlidingGroupCountsInEitherOrder(t *testing.T) {
	newBench(t, Config{}).send(in(0, Full, chain(0, 1, 2)), in(1, Sliding, chain(0, 1, 2))).want(2, 2, 2, 1, 2)
	newBench(t, Config{}).send(in(0, Sliding, chain(0, 1, 2)), in(1, Full, chain(0, 1, 2))).want(2, 2, 2, 1, 2)
}

func TestReportedHitsDontFillSlidingGroups(t *testing.T) {
	drop := Remove{Group: 0, HasGroup: true, Hashes: []uint64{1}}
	report := []any{in(0, Sliding, chain(0, 1, 2)), in(1, Full, chain(0, 1, 2))}
	newBench(t, Config{}).send(report...).send(drop).want(0, 0, 0, 1, 2).send(report...).want(0, 0, 0, 1, 2)
	// The same with the full group first, right after its own first store.
	drop.Group = 1
	report = []any{in(0, Full, chain(0, 1, 2)), in(1, Sliding, chain(0, 1, 2))}
	newBench(t, Config{}).send(report...).send(drop).send(report...).want(0, 0, 0, 1, 2)
}

func TestGroupsThatCannotBeFollowedEndAllCredit(t *testing.T) {
	many := make([]any, 0, maxGroups+1)
	for g := range maxGroups + 1 {
		many = append(many, in(g, Full, chain(0, 1)))
	}
	cases := map[string][]any{
		"neither full nor sliding": {in(0, Full, chain(0, 1)), in(1, Other, chain(0, 1))},
		"kind of a group changed":  {in(0, Full, chain(0, 1)), in(0, Sliding, chain(0, 1))},
		"too many groups":          many,
	}
	for name, events := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, Config{}).send(events...).want(0, 0, 0, 1)
			if b.m.Stats().NoCredit == "" {
				t.Error("doesn't say why")
			}
		})
	}
}

func TestOneGroupOfUnspecifiedKindIsFull(t *testing.T) {
	newBench(t, Config{}).send(in(0, Unspecified, chain(0, 1)), Remove{Hashes: []uint64{7}}).want(1, 1, 1, 1).
		send(in(1, Unspecified, chain(0, 3))).want(0, 0, 0, 1)
	newBench(t, Config{}).send(in(0, Unspecified, chain(0, 1)), Remove{Hashes: []uint64{1}}).want(0, 0, 0, 1)
}

// Groups whose kind is not told may need less than the whole prefix: what all
// of them hold of it is a lower bound.
func TestGroupsOfUnknownKindAreFollowedLikeFullAttention(t *testing.T) {
	b := newBench(t, Config{}).send(in(0, Unspecified, chain(0, 1, 2)), in(1, Unspecified, chain(0, 1))).want(1, 1, 1, 1, 2)
	if s := b.m.Stats(); s.Guess == "" || s.NoCredit != "" {
		t.Errorf("%+v", s)
	}
	b.send(in(0, Sliding, chain(2, 3)), in(1, Full, chain(1, 2, 3))).want(3, 3, 3, 1, 2, 3)
}

func TestSaltsAndAdaptersKeepTheirRoots(t *testing.T) {
	salted, tuned := chain(0, 11), chain(0, 21)
	salted.Salt, salted.Tokens = "s", tokensOf(1)
	tuned.Adapter, tuned.Tokens = "a", tokensOf(1)
	newBench(t, Config{}).send(salted, tuned).want(0, 0, 0, 1).
		wantIn(blockkey.Scope{Salt: "s"}, 1, 1, 1, 1).
		wantIn(blockkey.Scope{Adapter: "a"}, 1, 1, 1, 1)
}

func TestItemsArePartOfTheKey(t *testing.T) {
	s := chain(0, 1)
	s.Refs = [][]blockkey.Ref{{{ID: "cat", Offset: 1}}}
	b := newBench(t, Config{}).send(s).want(0, 0, 0, 1)
	keys := blockkey.AppendTokens(nil, blockkey.Scope{Model: "m", BlockSize: 2}.Root(), tokensOf(1), 2, []blockkey.Item{{ID: "cat", Offset: 1, Length: 1}})
	if b.r.match(LaneGPU, keys) != 1 {
		t.Error("block with an item is not found")
	}
}

func TestWithheldBlocksCoverAllBelow(t *testing.T) {
	s := chain(1, 2)
	s.Withhold = true
	b := newBench(t, Config{}).send(chain(0, 1), s, chain(2, 3)).want(1, 1, 1, 1, 2, 3)
	if s := b.m.Stats(); s.Withheld != 2 || s.Waiting != 0 {
		t.Errorf("%+v", s)
	}
	b.send(gone(GPU, 3), gone(GPU, 2)).want(1, 1, 1, 1)
	if s := b.m.Stats(); s.Withheld != 0 || s.Nodes != 1 {
		t.Errorf("%+v", s)
	}
}

func TestHiddenSaltIsWithheld(t *testing.T) {
	old := func(hash, content uint64) Store {
		s := chain(0, hash)
		s.Tokens, s.HidesExtras, s.Physical = tokensOf(content), true, true
		return s
	}
	below := chain(11, 2)
	b := newBench(t, Config{}).send(old(1, 1), old(11, 1), below).want(1, 1, 1, 1, 2)
	if s := b.m.Stats(); s.Contradictions != 1 || s.Withheld != 2 {
		t.Errorf("%+v", s)
	}
	if !b.m.HidesExtras() {
		t.Error("nobody hears that salts are not told")
	}
	// The plain block may go and come back, the salted one never takes its place.
	b.send(gone(GPU, 1)).want(0, 0, 0, 1).send(old(1, 1)).want(1, 1, 1, 1)
	// Salts are in use: what was never seen before could be salted.
	b.send(old(5, 5)).want(0, 0, 0, 5)
	b.m.Reset()
	if b.m.HidesExtras() {
		t.Error("before any event salts are said to be hidden")
	}
	b.r = newReplica()
	b.send(old(5, 5)).want(1, 1, 1, 5)
}

func TestRememberedRootsAreBounded(t *testing.T) {
	b := newBench(t, Config{})
	for h := uint64(1); h <= maxRootHashes+10; h++ {
		s := chain(0, h)
		s.HidesExtras = true
		b.m.Store(s)
		b.m.Remove(gone(GPU, h))
	}
	s := chain(0, maxRootHashes+10)
	s.HidesExtras = true
	b.send(s).want(0, 0, 0, maxRootHashes+10)
	if len(b.m.rootHashes) != maxRootHashes {
		t.Errorf("%d roots remembered", len(b.m.rootHashes))
	}
}

func TestOneContentUnderTwoHashesIsWithheld(t *testing.T) {
	twin := chain(0, 11)
	twin.Tokens = tokensOf(1)
	b := newBench(t, Config{}).send(chain(0, 1), chain(1, 2)).want(2, 2, 2, 1, 2).
		send(twin).want(0, 0, 0, 1, 2)
	if s := b.m.Stats(); s.Contradictions != 1 || s.Withheld != 3 {
		t.Errorf("%+v", s)
	}
	b.send(gone(GPU, 1)).want(0, 0, 0, 1, 2).
		send(gone(GPU, 11), chain(0, 1)).want(2, 2, 2, 1, 2)
}

func TestOneHashWithTwoContentsIsWithheldUntilItIsGone(t *testing.T) {
	cases := map[string]Store{
		"tokens":  {Kind: Full, Hashes: []uint64{2}, Parent: 1, HasParent: true, Tokens: tokensOf(9), BlockSize: 2},
		"parent":  {Kind: Full, Hashes: []uint64{2}, Parent: 9, HasParent: true, Tokens: tokensOf(2), BlockSize: 2},
		"root":    {Kind: Full, Hashes: []uint64{2}, Tokens: tokensOf(2), BlockSize: 2},
		"adapter": {Kind: Full, Hashes: []uint64{2}, Parent: 1, HasParent: true, Tokens: tokensOf(2), BlockSize: 2, Adapter: "a"},
	}
	for name, again := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, Config{}).send(chain(0, 1, 2, 3)).want(3, 3, 3, 1, 2, 3).
				send(again).want(1, 1, 1, 1, 2, 3)
			if s := b.m.Stats(); s.Contradictions != 1 {
				t.Errorf("%+v", s)
			}
			b.send(gone(GPU, 2)).want(1, 1, 1, 1, 2, 3).
				send(gone(GPU, 2)).want(1, 1, 1, 1, 2, 3).
				send(chain(1, 2)).want(3, 3, 3, 1, 2, 3)
		})
	}
}

func TestAdapterOfAChainIsItsRoots(t *testing.T) {
	s := chain(1, 2)
	s.Adapter = "a"
	newBench(t, Config{}).send(chain(0, 1), s, chain(2, 3)).want(1, 1, 1, 1, 2, 3)
}

func TestPurgedAdapterIsForgotten(t *testing.T) {
	tuned := chain(0, 11, 12)
	tuned.Adapter, tuned.Tokens = "a", tokensOf(1, 2)
	b := newBench(t, Config{}).send(chain(0, 1, 2), tuned, placeholder(Host, 0, 11))
	b.wantIn(blockkey.Scope{Adapter: "a"}, 2, 2, 2, 1, 2)
	b.m.PurgeAdapter("never heard of")
	b.m.PurgeAdapter("a")
	b.want(2, 2, 2, 1, 2).wantIn(blockkey.Scope{Adapter: "a"}, 0, 0, 0, 1, 2)
	// The reloaded adapter's blocks have other hashes and are believed at once.
	tuned.Hashes = []uint64{21, 22}
	b.send(tuned).wantIn(blockkey.Scope{Adapter: "a"}, 2, 2, 2, 1, 2)
	if s := b.m.Stats(); s.Contradictions != 0 || s.Nodes != 4 {
		t.Errorf("%+v", s)
	}
}

func TestTooManyAdaptersAreWithheld(t *testing.T) {
	b := newBench(t, Config{})
	for h := uint64(1); h <= maxAdapters+5; h++ {
		s := chain(0, h)
		s.Adapter = string(rune('a' + h))
		b.m.Store(s)
	}
	long := chain(0, 1<<30)
	long.Adapter = string(make([]byte, maxAdapterName+1))
	b.send(long).want(0, 0, 0, 1)
	if s := b.m.Stats(); s.Withheld != 6 || len(b.m.adapters) > maxAdapters+1 {
		t.Errorf("%+v, %d adapters", s, len(b.m.adapters))
	}
}

func TestResetStartsFromNothing(t *testing.T) {
	b := newBench(t, Config{}).send(chain(0, 1, 2)).want(2, 2, 2, 1, 2)
	b.m.Reset()
	if ops := b.m.Drain(nil); len(ops) != 0 || b.m.Count(LaneGPU) != 0 || b.m.Digest(LaneGPU) != 0 {
		t.Errorf("%+v", ops)
	}
	b.r = newReplica()
	b.send(chain(0, 1)).want(1, 1, 1, 1, 2)
}

func TestMoreCopiesThanBlocksShow(t *testing.T) {
	b := newBench(t, Config{MaxBlocks: 3}).send(chain(0, 1, 2, 3))
	if b.m.Overflown() {
		t.Error("3 copies in 3 blocks")
	}
	if b.send(chain(2, 3)); !b.m.Overflown() {
		t.Error("4 copies in 3 blocks")
	}
	b.m.SetMaxBlocks(4)
	if b.m.Overflown() {
		t.Error("4 copies in 4 blocks")
	}
}

func TestMemoryBoundDropsAndCounts(t *testing.T) {
	b := newBench(t, Config{MaxNodes: 3}).send(chain(0, 1, 2), chain(2, 3, 4), chain(9, 10)).want(3, 3, 3, 1, 2, 3, 4)
	if s := b.m.Stats(); s.Dropped != 2 || s.Nodes != 3 {
		t.Errorf("%+v", s)
	}
	b.send(gone(GPU, 4), gone(GPU, 3), gone(GPU, 2)).want(1, 1, 1, 1, 2, 3).send(chain(1, 2, 3)).want(3, 3, 3, 1, 2, 3)
}

// Events of some releases name groups and no kinds: without a word of them each is
// followed like full attention, which promises less.
func TestKindsOfGroupsCanBeSaid(t *testing.T) {
	window := func(s Store) Store { return in(0, Unspecified, s) }
	full := func(s Store) Store { return in(1, Unspecified, s) }
	events := []any{window(chain(0, 1, 2, 3)), full(chain(0, 1, 2, 3)), Remove{Group: 0, HasGroup: true, Hashes: []uint64{1}}}
	silent := newBench(t, Config{}).send(events...)
	if s := silent.m.Stats(); silent.m.HasEnds() || s.Guess == "" {
		t.Errorf("nothing is said: %+v", s)
	}
	var rule Rule
	rule.Groups[0].Kind, rule.Groups[0].Window = Sliding, 3
	rule.Groups[1].Kind = Full
	said := newBench(t, Config{Rule: rule}).send(events...)
	if s := said.m.Stats(); !said.m.HasEnds() || s.Guess != "" || s.NoCredit != "" {
		t.Errorf("kinds are said: %+v", s)
	}
	// They may be said later, and what events tell counts before them.
	silent.m.SetRule(rule)
	if s := silent.m.Stats(); !silent.m.HasEnds() || s.Guess != "" {
		t.Errorf("kinds are said later: %+v", s)
	}
	told := newBench(t, Config{Rule: rule}).send(in(0, Full, chain(0, 1, 2, 3)), in(1, Full, chain(0, 1, 2, 3)))
	if told.m.HasEnds() {
		t.Error("what was said counts before what is told")
	}
}
