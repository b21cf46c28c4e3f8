package pick

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

var update = flag.Bool("update", false, "write golden files")

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
	b.fleet.Heard(id, info, nil, t0)
	b.fleet.SetPicture(id, fleet.Picture{Trust: fleet.Exact, Epoch: 1})
	return id
}

func (b *bed) trust(id fleet.ID, t fleet.Trust) {
	b.fleet.SetPicture(id, fleet.Picture{Trust: t, Epoch: 1})
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
	b.index.Store(index.Member(id), lane, s.Root(), 0, keys[:blocks])
}

// gpu stores on all three lanes, as what is in GPU memory is.
func (b *bed) gpu(id fleet.ID, tokens []byte, blocks int) {
	for _, l := range []index.Lane{index.LaneGPU, index.LaneHost, index.LaneDisk} {
		b.hold(id, l, tokens, blocks)
	}
}

func (b *bed) load(id fleet.ID, running, waiting int, now time.Time) {
	m := b.fleet.View().Member(id)
	b.fleet.Heard(id, *m.Info, &fleet.Load{
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

func TestCachedTokensByTier(t *testing.T) {
	for _, c := range []struct {
		name            string
		length          int
		gpu, host, disk int // depth of each lane
		want            Cached
	}{
		{"nothing", 100, 0, 0, 0, Cached{}},
		{"part of the prompt", 100, 3, 3, 3, Cached{GPU: 48}},
		{"a partial last block", 100, 6, 6, 6, Cached{GPU: 96}},
		{"the last token is computed", 96, 6, 6, 6, Cached{GPU: 80}},
		{"a connector brings whole prompts", 96, 0, 6, 6, Cached{Host: 96}},
		{"the last block from the host", 96, 5, 6, 6, Cached{GPU: 80, Host: 16}},
		{"each tier has what is beyond the last", 100, 1, 3, 6, Cached{GPU: 16, Host: 32, Disk: 48}},
		{"disk only beyond the GPU", 96, 2, 2, 6, Cached{GPU: 32, Disk: 64}},
		{"one token", 1, 0, 0, 0, Cached{}},
		{"one block", 16, 1, 1, 1, Cached{}},
		{"one block on the host", 16, 0, 1, 1, Cached{Host: 16}},
	} {
		b := newBed(t)
		id := b.join("m")
		le := prompt(1, 0, c.length)
		b.hold(id, index.LaneGPU, le, c.gpu)
		b.hold(id, index.LaneHost, le, c.host)
		b.hold(id, index.LaneDisk, le, c.disk)
		d := b.pick(Request{Prompt: tokens(le)})
		got := d.Candidates[0]
		if diff := cmp.Diff(c.want, got.Cached); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
		if sum := got.Cached.Known() + got.Uncached; sum != c.length || d.PromptTokens != c.length {
			t.Errorf("%s: cached and uncached are %d of %d", c.name, sum, c.length)
		}
	}
}

// Peers' bug 3: what one member evicts, the other still has. Bug 4: what lies
// behind a hole does not count.
func TestEvictionIsOneMembersAndHolesEndAPrefix(t *testing.T) {
	b := newBed(t)
	m0, m1 := b.join("m0"), b.join("m1")
	le := prompt(1, 0, 100)
	b.gpu(m0, le, 6)
	b.gpu(m1, le, 6)
	keys, _ := blockkey.AppendBytes(nil, blockkey.Scope{Model: "model", BlockSize: 16}.Root(), le, 16, nil)
	b.index.Remove(index.Member(m0), index.LaneGPU, 2, keys[2:3])
	b.index.Remove(index.Member(m0), index.LaneHost, 2, keys[2:3])
	b.index.Remove(index.Member(m0), index.LaneDisk, 2, keys[2:3])
	got := cachedBy(b.pick(Request{Prompt: tokens(le)}))
	if want := map[string]int{"m0": 32, "m1": 96}; !cmp.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func cachedBy(d *Decision) map[string]int {
	m := make(map[string]int)
	for _, c := range d.Candidates {
		m[c.Member.Info.Name] = c.Cached.Known()
	}
	return m
}

func TestTrustDecidesWhatCounts(t *testing.T) {
	for trust, want := range map[fleet.Trust]int{fleet.Exact: 96, fleet.Approximate: 96, fleet.Syncing: 0, fleet.Unknown: 0} {
		b := newBed(t)
		id := b.join("m")
		le := prompt(1, 0, 100)
		b.gpu(id, le, 6)
		b.trust(id, trust)
		d := b.pick(Request{Prompt: tokens(le)})
		if got := d.Candidates[0].Cached.Known(); got != want {
			t.Errorf("%v: %d tokens, want %d", trust, got, want)
		}
		if (d.Fallback == "") != (trust == fleet.Exact) {
			t.Errorf("%v: fallback %q", trust, d.Fallback)
		}
	}
}

// Peers' bug 8: lanes that hold assumptions are never taken for the GPU.
func TestAssumedLanesAreNotFacts(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	le := prompt(1, 0, 100)
	b.hold(id, index.LanePredicted, le, 6)
	b.hold(id, index.LaneApproximate, le, 6)
	if got := b.pick(Request{Prompt: tokens(le)}).Candidates[0].Cached; got != (Cached{}) {
		t.Errorf("%+v", got)
	}
}

// Peers' bug 9, and their bound of ten holders: the longest prefix of many
// wins, and among equals the least loaded.
func TestAllHoldersAreRanked(t *testing.T) {
	b := newBed(t)
	le := prompt(1, 0, 16*64+1)
	for i := range 32 {
		b.gpu(b.join(fmt.Sprintf("m%02d", i)), le, 2*(i+1))
	}
	d := b.pick(Request{Prompt: tokens(le)})
	if len(d.Candidates) != 32 || first(d) != "m31" || len(cachedBy(d)) != 32 || cachedBy(d)["m00"] != 32 {
		t.Fatalf("%d candidates, first %s", len(d.Candidates), first(d))
	}
	for i := 1; i < len(d.Candidates); i++ {
		if d.Candidates[i-1].Cost.Total > d.Candidates[i].Cost.Total {
			t.Fatalf("not in order at %d", i)
		}
	}
	if d := b.pick(Request{Prompt: tokens(le), Top: 3}); len(d.Candidates) != 3 || first(d) != "m31" {
		t.Fatalf("top 3: %d, first %s", len(d.Candidates), first(d))
	}
}

func TestWhoMayServe(t *testing.T) {
	b := newBed(t)
	base := fleet.Info{Models: []string{"base", "alias"}, Root: "r", BlockSize: 16}
	add := func(name, pod, address string, adapters ...string) fleet.ID {
		i := base
		i.Name, i.Pod, i.Address = name, pod, address
		for _, a := range adapters {
			i.Adapters = append(i.Adapters, fleet.Adapter{Name: a})
		}
		return b.joinAs(i)
	}
	add("a0", "a", "10.0.0.1:8000", "lora")
	add("a1", "a", "10.0.0.1:8001", "lora", "other")
	add("b0", "b", "10.0.0.2:8000")
	for _, c := range []struct {
		name string
		r    Request
		want string
		err  error
	}{
		{"model", Request{Model: "base"}, "a0 a1 b0", nil},
		{"alias", Request{Model: "alias"}, "a0 a1 b0", nil},
		{"adapter by name", Request{Model: "lora"}, "a0 a1", nil},
		{"adapter beside the model", Request{Model: "base", Adapter: "other"}, "a1", nil},
		{"adapter twice", Request{Model: "lora", Adapter: "lora"}, "a0 a1", nil},
		{"two adapters", Request{Model: "lora", Adapter: "other"}, "", ErrAdapter},
		{"unknown model", Request{Model: "what"}, "", ErrModel},
		{"unknown adapter", Request{Model: "base", Adapter: "what"}, "", ErrAdapter},
		{"unknown policy", Request{Model: "base", Policy: "what"}, "", ErrPolicy},
		{"candidates", Request{Model: "base", Candidates: []Ref{{Member: "a1"}, {Pod: "b"}, {Member: "gone"}}}, "a1 b0", nil},
		{"without a pod", Request{Model: "base", Exclude: []Ref{{Pod: "a"}}}, "b0", nil},
		{"without an address", Request{Model: "base", Exclude: []Ref{{Address: "10.0.0.1:8000"}}}, "a1 b0", nil},
		{"empty reference", Request{Model: "base", Exclude: []Ref{{}}}, "a0 a1 b0", nil},
		{"nobody left", Request{Model: "base", Exclude: []Ref{{Pod: "a"}, {Pod: "b"}}}, "", ErrNoCandidate},
	} {
		d, err := b.Pick(&c.r, t0)
		if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) {
			t.Errorf("%s: error %v, want %v", c.name, err, c.err)
			continue
		}
		if err != nil {
			continue
		}
		var names []string
		for n := range cachedBy(d) {
			names = append(names, n)
		}
		slices.Sort(names)
		if got := strings.Join(names, " "); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if _, err := newBed(t).Pick(&Request{Model: "base"}, t0); !errors.Is(err, ErrNoMembers) {
		t.Errorf("empty fleet: %v", err)
	}
}

// Adapters and salts have keys of their own.
func TestScopesNeverMeet(t *testing.T) {
	b := newBed(t)
	id := b.joinAs(fleet.Info{Name: "m", Models: []string{"model", "alias"}, BlockSize: 16, Adapters: []fleet.Adapter{{Name: "lora"}}})
	le := prompt(1, 0, 100)
	b.holdIn(blockkey.Scope{Model: "model", Adapter: "lora", Salt: "s", BlockSize: 16}, id, index.LaneGPU, le, 6)
	for _, c := range []struct {
		r    Request
		want int
	}{
		{Request{Model: "lora", Salt: "s"}, 96},
		{Request{Model: "alias", Adapter: "lora", Salt: "s"}, 96},
		{Request{Model: "lora"}, 0},
		{Request{Model: "model", Salt: "s"}, 0},
	} {
		c.r.Prompt = tokens(le)
		d := b.pick(c.r)
		if got := d.Candidates[0].Cached.GPU; got != c.want {
			t.Errorf("%+v: %d, want %d", c.r.Model, got, c.want)
		}
	}
}

// Members with another size of blocks have their own keys of the same tokens.
func TestBlockSizesMix(t *testing.T) {
	b := newBed(t)
	m16 := b.join("m16")
	m32 := b.joinAs(fleet.Info{Name: "m32", Models: []string{"model"}, BlockSize: 32})
	b.joinAs(fleet.Info{Name: "new", Models: []string{"model"}})
	le := prompt(1, 0, 200)
	b.gpu(m16, le, 5)
	b.holdIn(blockkey.Scope{Model: "model", BlockSize: 32}, m32, index.LaneGPU, le, 4)
	if got, want := cachedBy(b.pick(Request{Prompt: tokens(le)})), (map[string]int{"m16": 80, "m32": 128, "new": 0}); !cmp.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	keys, _ := blockkey.AppendBytes(nil, blockkey.Scope{Model: "model", BlockSize: 16}.Root(), le, 16, nil)
	d := b.pick(Request{Prompt: Prompt{Keys: keys, BlockSize: 16, Length: 200}})
	if got, want := cachedBy(d), (map[string]int{"m16": 80, "m32": 0, "new": 0}); !cmp.Equal(got, want) || !strings.Contains(d.Fallback, "1 of 3") {
		t.Errorf("%v, want %v; fallback %q", got, want, d.Fallback)
	}
}

func TestBadPrompts(t *testing.T) {
	b := newBed(t)
	b.join("m")
	for name, p := range map[string]Prompt{
		"ragged tokens":                 {Tokens: make([]byte, 7)},
		"keys of a size nobody has":     {Keys: []blockkey.Key{1}, BlockSize: 64},
		"keys without a size":           {Keys: []blockkey.Key{1}},
		"key 0":                         {Keys: []blockkey.Key{1, 0}, BlockSize: 16},
		"more keys than tokens":         {Keys: []blockkey.Key{1, 2}, BlockSize: 16, Length: 31},
		"negative size":                 {BlockSize: -1},
		"negative length":               {Length: -1},
		"tokens and keys, who is right": {Tokens: make([]byte, 8), Keys: []blockkey.Key{1}, BlockSize: 16},
	} {
		if _, err := b.Pick(&Request{Model: "model", Prompt: p}, t0); !errors.Is(err, ErrPrompt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, p := range map[string]Prompt{
		"none":            {},
		"empty keys":      {BlockSize: 16},
		"less than a key": {BlockSize: 16, Length: 3},
		"one token":       {Tokens: make([]byte, 4)},
		"2 M tokens":      {Tokens: make([]byte, 8<<20)},
	} {
		if _, err := b.Pick(&Request{Model: "model", Prompt: p, Reserve: true}, t0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWithoutTokensLoadDecides(t *testing.T) {
	b := newBed(t)
	b.load(b.join("busy"), 9, 3, t0)
	b.load(b.join("idle"), 1, 0, t0)
	d := b.pick(Request{Prompt: Prompt{Fallback: "no engine renders chats"}})
	if first(d) != "idle" || d.Fallback != "no engine renders chats: load only" {
		t.Errorf("%s, %q", first(d), d.Fallback)
	}
}

// Peers' bug 15: a retry excludes the member that failed.
func TestExcludedIsNotChosen(t *testing.T) {
	b := newBed(t)
	le := prompt(1, 0, 1000)
	b.gpu(b.join("m0"), le, 60)
	b.join("m1")
	if d := b.pick(Request{Prompt: tokens(le), Session: "s", Reserve: true}); first(d) != "m0" {
		t.Fatalf("first %s", first(d))
	}
	d := b.pick(Request{Prompt: tokens(le), Session: "s", Exclude: []Ref{{Address: "m0:8000"}}})
	if first(d) != "m1" || len(d.Candidates) != 1 {
		t.Fatalf("first %s of %d", first(d), len(d.Candidates))
	}
}

func TestSilentAndSleepingAreNotChosen(t *testing.T) {
	b := newBed(t)
	m0, m1 := b.join("m0"), b.join("m1")
	le := prompt(1, 0, 1000)
	b.gpu(m0, le, 60)
	for s := range 6 {
		b.load(m1, 0, 0, t0.Add(time.Duration(s)*time.Second))
	}
	now := t0.Add(5 * time.Second)
	if d := b.pickAt(Request{Prompt: tokens(le)}, now); first(d) != "m1" || len(d.Candidates) != 1 {
		t.Errorf("m0 is silent: %s", first(d))
	}
	if d := b.pickAt(Request{Prompt: tokens(le), Candidates: []Ref{{Member: "m0"}}}, now); first(d) != "m0" {
		t.Errorf("a silent one is better than none: %s", first(d))
	}
	info := *b.fleet.View().Member(m1).Info
	b.fleet.Heard(m1, info, &fleet.Load{At: now.Add(1), Sleeping: true, Running: 0, Waiting: 0, Totals: fleet.NoTotals()}, now.Add(1))
	if d := b.pickAt(Request{Prompt: tokens(le)}, now.Add(1)); first(d) != "m0" {
		t.Errorf("m1 sleeps: %s", first(d))
	}
	d := b.pickAt(Request{Prompt: tokens(le)}, now.Add(time.Hour))
	if first(d) != "m0" || !d.Stale || !strings.Contains(d.Fallback, "last known") {
		t.Errorf("nobody is heard: %s, stale %v, %q", first(d), d.Stale, d.Fallback)
	}
}

// Peers' bug 22 and 23: a member without a sample is not the idlest, and
// samples count for all candidates or for none.
func TestMissingSampleIsNotIdle(t *testing.T) {
	b := newBed(t)
	m0 := b.join("m0")
	b.join("new")
	b.load(m0, 2, 0, t0)
	d := b.pick(Request{Prompt: tokens(prompt(1, 0, 1000))})
	a, c := d.Candidates[0].Cost.Total, d.Candidates[1].Cost.Total
	if a != c {
		t.Errorf("costs %v and %v differ by a sample that only one has", a, c)
	}
	for _, c := range d.Candidates {
		if (c.LoadAge < 0) != (c.Member.Info.Name == "new") {
			t.Errorf("%s: load age %v", c.Member.Info.Name, c.LoadAge)
		}
	}
}

// Peers' bug 11: misses must not all go to the emptiest. 100 cold prompts at
// once, four members that hold something and a new one.
func TestColdPromptsSpread(t *testing.T) {
	b := newBed(t)
	for i := range 5 {
		id := b.join(fmt.Sprintf("m%d", i))
		if i < 4 {
			for j := range 20 {
				b.gpu(id, prompt(uint32(1000+20*i+j), 0, 1600), 100)
			}
		}
	}
	counts := make(map[string]int)
	for i := range 100 {
		now := t0.Add(time.Duration(i) * time.Millisecond)
		counts[first(b.pickAt(Request{Prompt: tokens(prompt(uint32(i), 0, 4000)), Reserve: true}, now))]++
	}
	low, high := 100, 0
	for i := range 5 {
		n := counts[fmt.Sprintf("m%d", i)]
		low, high = min(low, n), max(high, n)
	}
	if float64(high) > 1.3*float64(low) {
		t.Errorf("from %d to %d a member: %v", low, high, counts)
	}
}

// Peers' bug 12: 64 equal prompts at once stay with few owners, because each
// sees what the ones before reserved and sent, and no owner's queue grows
// beyond what computing the prompt elsewhere would cost.
func TestEqualPromptsAtOnceHaveFewOwners(t *testing.T) {
	b := newBed(t)
	for i := range 8 {
		b.join(fmt.Sprintf("m%d", i))
	}
	le := prompt(1, 0, 8000) // 405 ms
	var mu sync.Mutex
	counts := make(map[string]int)
	var wg sync.WaitGroup
	for range 64 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			d := b.pick(Request{Prompt: tokens(le), Reserve: true})
			mu.Lock()
			counts[first(d)]++
			mu.Unlock()
		}()
	}
	wg.Wait()
	for name, n := range counts {
		if wait := b.fleet.View().Named(name).Reserved().Wait(t0); wait > 2*405+100 {
			t.Errorf("%s: %d requests, %v ms", name, n, wait)
		}
	}
	if len(counts) > 6 {
		t.Errorf("the prompt is computed by too many: %v", counts)
	}
}

// A burst of siblings follows its first, before any event, and what is only
// predicted is never called cached.
func TestSiblingsFollowThePrediction(t *testing.T) {
	b := newBed(t)
	for i := range 8 {
		b.join(fmt.Sprintf("m%d", i))
	}
	d := b.pick(Request{Prompt: tokens(prompt(1, 4000, 4100)), Reserve: true})
	owner := first(d)
	b.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, t0)
	sibling := Request{Prompt: tokens(prompt(2, 4000, 4100))}
	d = b.pickAt(sibling, t0.Add(100*time.Millisecond))
	got := d.Candidates[0]
	if first(d) != owner || got.Cached != (Cached{Predicted: 3968}) || got.Uncached != 4100-3968 {
		t.Errorf("%s, want %s; %+v", first(d), owner, got.Cached)
	}
	d = b.pickAt(sibling, t0.Add(time.Minute))
	if d.Candidates[0].Cached.Predicted != 0 {
		t.Errorf("a minute later: %+v", d.Candidates[0].Cached)
	}
	// A new life of the engine has nothing of it.
	b.fleet.SetPicture(b.fleet.View().Named(owner).ID, fleet.Picture{Trust: fleet.Exact, Epoch: 2})
	for _, c := range b.pickAt(sibling, t0.Add(100*time.Millisecond)).Candidates {
		if c.Cached.Predicted != 0 {
			t.Errorf("in the next epoch: %+v", c.Cached)
		}
	}
	// Facts replace it.
	b.gpu(b.fleet.View().Named(owner).ID, prompt(2, 4000, 4100), 250)
	if c := b.pickAt(sibling, t0.Add(100*time.Millisecond)).Candidates[0].Cached; c != (Cached{GPU: 4000}) {
		t.Errorf("after the events: %+v", c)
	}
	b.Tick(t0.Add(time.Minute))
	if n := len(b.forecast.marks); n != 0 {
		t.Errorf("%d marks are kept", n)
	}
}

func TestForecastIsBounded(t *testing.T) {
	b := newBed(t)
	b.join("m")
	for i := range 300 {
		b.pick(Request{Prompt: tokens(prompt(uint32(i), 0, 40_000)), Reserve: true})
	}
	if n := len(b.forecast.marks); n > maxForecast || n == 0 {
		t.Errorf("%d marks", n)
	}
}

// Near-ties go to the session's last member; a real difference does not.
func TestSessionBreaksNearTies(t *testing.T) {
	b := newBed(t)
	for i := range 8 {
		b.join(fmt.Sprintf("m%d", i))
	}
	want := first(b.pick(Request{Prompt: tokens(prompt(1, 0, 2000)), Session: "s", Reserve: true}))
	now := t0.Add(time.Minute)
	for i := range 20 {
		d := b.pickAt(Request{Prompt: tokens(prompt(uint32(100+i), 0, 2000)), Session: "s"}, now)
		if first(d) != want || !strings.Contains(d.Reason, "session") {
			t.Fatalf("%s, want %s: %s", first(d), want, d.Reason)
		}
	}
	le := prompt(5, 0, 2000)
	other := b.fleet.View().Named("m0").ID
	if want == "m0" {
		other = b.fleet.View().Named("m1").ID
	}
	b.gpu(other, le, 100)
	d := b.pickAt(Request{Prompt: tokens(le), Session: "s"}, now)
	if d.Candidates[0].Member.ID != other {
		t.Errorf("a session keeps from the holder of 1,600 tokens: %s", d.Reason)
	}
}

// Two schedulers agree where nothing tells members apart, and what everybody
// shares does not decide.
func TestReplicasAgreeAndSharedHeadsSpread(t *testing.T) {
	one, two := newBed(t), newBed(t)
	two.Picker.seed = 99
	for i := range 8 {
		name := fmt.Sprintf("m%d", i)
		one.gpu(one.join(name), prompt(0, 320, 320), 20)
		name = fmt.Sprintf("m%d", 7-i) // numbers differ
		two.gpu(two.join(name), prompt(0, 320, 320), 20)
	}
	counts := make(map[string]int)
	for i := range 800 {
		r := Request{Prompt: tokens(prompt(uint32(i), 320, 1000))}
		a, b := first(one.pick(r)), first(two.pick(r))
		if a != b {
			t.Fatalf("prompt %d: %s and %s", i, a, b)
		}
		counts[a]++
	}
	for name, n := range counts {
		if n < 60 || n > 150 {
			t.Errorf("%s: %d of 800", name, n)
		}
	}
	if len(counts) != 8 {
		t.Errorf("%v", counts)
	}
}

// Ties without any key are spread too.
func TestTiesSpread(t *testing.T) {
	for _, policy := range []string{"default", "random", "round-robin", "least-requests", "least-tokens"} {
		b := newBed(t)
		for i := range 4 {
			b.join(fmt.Sprintf("m%d", i))
		}
		counts := make(map[string]int)
		for range 400 {
			d := b.pick(Request{Policy: policy, Reserve: true})
			counts[first(d)]++
			b.Report(Report{Decision: d.ID, Outcome: fleet.Cancelled}, t0)
		}
		low, high := 60, 140
		if policy == "round-robin" {
			low, high = 100, 100
		}
		for name, n := range counts {
			if n < low || n > high || len(counts) != 4 {
				t.Errorf("%s: %s has %d of 400", policy, name, n)
			}
		}
	}
}

// Peers' bug 17: one prediction a request: the answer, the reservation and the
// engine's priority stand on the same numbers.
func TestOnePredictionPerRequest(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	le := prompt(1, 0, 2000)
	b.gpu(id, le, 50)
	d := b.pick(Request{Prompt: tokens(le), Reserve: true})
	c := d.Candidates[0]
	r := b.fleet.View().Member(id).Reserved()
	if r.Tokens != uint64(c.Uncached) || r.PrefillMS != c.Cost.Load+c.Cost.Prefill {
		t.Errorf("reserved %+v, answered %+v", r, c)
	}
	if want := t0.UnixMilli() + int64(math.Round(10*(c.Cost.Load+c.Cost.Prefill))); d.EnginePriority != want {
		t.Errorf("priority %d, want %d", d.EnginePriority, want)
	}
	cached := uint64(c.Cached.Known())
	n := uint64(2000)
	if !b.Report(Report{Decision: d.ID, Outcome: fleet.FirstToken, PromptTokens: &n, CachedTokens: &cached}, t0) {
		t.Error("the decision is not known")
	}
	if got := b.fleet.View().Member(id).Reported(); got.PredictedTokens != cached || got.CachedTokens != cached || got.PromptTokens != n {
		t.Errorf("%+v", got)
	}
	for _, id := range []string{"", "zz", "ffffffffffffffffffff", "-1", "2"} {
		if b.Report(Report{Decision: id, Outcome: fleet.Finished}, t0) {
			t.Errorf("decision %q is known", id)
		}
	}
}

func TestScoreChangesNothing(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	d := b.pick(Request{Prompt: tokens(prompt(1, 0, 2000)), Session: "s"})
	session := false
	b.fleet.Decide("s", t0, func(_ fleet.ID, known bool) (fleet.Choice, bool) {
		session = known
		return fleet.Choice{}, false
	})
	if r := b.fleet.View().Member(id).Reserved(); d.ID != "" || r.Open != 0 || session || len(b.forecast.marks) != 0 {
		t.Errorf("decision %q, %+v, session %v", d.ID, r, session)
	}
}

// The decisions themselves, to be read: go test -run Golden -update.
func TestGoldenDecisions(t *testing.T) {
	var out strings.Builder
	show := func(what string, d *Decision) {
		fmt.Fprintf(&out, "%s\n  %s\n", what, d.Reason)
		if d.Fallback != "" {
			fmt.Fprintf(&out, "  fallback: %s\n", d.Fallback)
		}
		for _, c := range d.Candidates {
			fmt.Fprintf(&out, "  %-4s %-11s gpu %5d host %5d disk %5d under way %5d uncached %5d  total %8.2f = wait %7.2f load %6.2f prefill %7.2f miss %7.2f decode %6.2f  running %d waiting %d\n",
				c.Member.Info.Name, c.Member.Picture.Trust, c.Cached.GPU, c.Cached.Host, c.Cached.Disk, c.Cached.Predicted, c.Uncached,
				c.Cost.Total, c.Cost.Wait, c.Cost.Load, c.Cost.Prefill, c.Cost.Miss, c.Cost.Decode, c.Running, c.Waiting)
		}
	}
	b := newBed(t)
	le := prompt(1, 0, 8192)
	gpu, host, disk, sync := b.join("gpu"), b.join("host"), b.join("disk"), b.join("sync")
	b.join("cold")
	b.gpu(gpu, le, 256)
	b.gpu(host, le, 64)
	b.hold(host, index.LaneHost, le, 512)
	b.hold(host, index.LaneDisk, le, 512)
	b.hold(disk, index.LaneDisk, le, 500)
	b.gpu(sync, le, 512)
	b.trust(sync, fleet.Syncing)
	r := Request{Prompt: tokens(le)}
	show("tiers, idle", b.pick(r))
	r.Reserve = true
	show("picked once", b.pick(r))
	show("picked twice", b.pick(r))
	r.Reserve = false
	for i, m := range []fleet.ID{gpu, host, disk, sync, b.fleet.View().Named("cold").ID} {
		b.load(m, 3*i, i, t0.Add(time.Second))
	}
	r.Exclude = []Ref{{Member: "host"}}
	show("with samples of load, without host", b.pickAt(r, t0.Add(time.Second)))
	r.Prompt = Prompt{}
	show("without tokens", b.pickAt(r, t0.Add(time.Second)))
	r.Prompt, r.Policy = tokens(le), "least-requests"
	show("least requests", b.pickAt(r, t0.Add(time.Second)))

	const file = "testdata/decisions.golden"
	if *update {
		if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(out.String(), "\n")); diff != "" {
		t.Error(diff)
	}
}
