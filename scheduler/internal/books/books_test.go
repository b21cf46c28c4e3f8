package books

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

var t0 = time.Unix(1_700_000_000, 0)

// chain is a prompt of blocks whose first ones are those of a seed, the others
// those of another.
func chain(seed uint64, shared int, other uint64, blocks int) []blockkey.Key {
	keys := make([]blockkey.Key, blocks)
	a, b := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, other))
	for i := range keys {
		if i < shared {
			keys[i] = blockkey.Key(a.Uint64() | 1)
		} else {
			keys[i] = blockkey.Key(b.Uint64() | 1)
		}
	}
	return keys
}

func still(h Home) func(uint32) Home { return func(uint32) Home { return h } }

// lost are the causes of one request that was placed and booked.
func lost(b *Books, p Placement, home Home, now time.Time, cached uint64, moved bool) map[string]uint64 {
	before := b.Stats().Tokens
	p.Decision = 1
	b.Place(&p, still(home), now)
	b.Book(Report{Decision: 1, Prompt: uint64(p.Prompt), Cached: cached, Moved: moved})
	found := make(map[string]uint64)
	for c, n := range b.Stats().Tokens {
		if n != before[c] {
			found[Cause(c).String()] = n - before[c]
		}
	}
	return found
}

func TestEachTokenIsLostToTheFirstCauseThatKeptIt(t *testing.T) {
	whole := Placement{
		Prompt: 1000, Keys: chain(1, 62, 1, 62), BlockSize: 16, Limit: 992,
		Chosen: 160, Exact: true, Feasible: 320, Priced: true, PriceMS: 70, Held: 480, Ideal: 640,
	}
	change := func(f func(*Placement)) Placement { p := whole; f(&p); return p }
	for name, c := range map[string]struct {
		place  Placement
		cached uint64
		moved  bool
		want   map[string]uint64
	}{
		"as promised": {whole, 160, false, map[string]uint64{"used": 160, "busy": 160, "unusable": 160, "unavailable": 160, "unseen": 352, "uncacheable": 8}},
		"less":        {whole, 100, false, map[string]uint64{"used": 100, "mispredicted": 60, "busy": 160, "unusable": 160, "unavailable": 160, "unseen": 352, "uncacheable": 8}},
		"more":        {whole, 400, false, map[string]uint64{"used": 400, "unusable": 80, "unavailable": 160, "unseen": 352, "uncacheable": 8}},
		"all":         {whole, 1000, false, map[string]uint64{"used": 1000}},
		"elsewhere":   {whole, 0, true, map[string]uint64{"elsewhere": 160, "busy": 160, "unusable": 160, "unavailable": 160, "unseen": 352, "uncacheable": 8}},
		"by another policy, not exact, not credited": {change(func(p *Placement) { p.Exact, p.Priced, p.Distrusted = false, false, true }), 0, false,
			map[string]uint64{"untrusted": 320, "policy": 160, "unavailable": 160, "unseen": 352, "uncacheable": 8}},
		"without tokens":            {Placement{}, 0, false, nil},
		"tokens that are not known": {Placement{Prompt: 500}, 100, false, map[string]uint64{"used": 100, "uncacheable": 400}},
	} {
		if diff := cmp.Diff(c.want, lost(New(), c.place, Home{}, t0, c.cached, c.moved), cmp.Transformer("nil", func(m map[string]uint64) map[string]uint64 {
			if m == nil {
				return map[string]uint64{}
			}
			return m
		})); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// The engine may count another prompt than was placed: what is beyond it is not
// known.
func TestWhatTheEngineCountsBeyondThePromptIsUnknown(t *testing.T) {
	b := New()
	b.Place(&Placement{Decision: 7, Prompt: 100, Limit: 96, Keys: chain(1, 6, 1, 6), BlockSize: 16}, still(Home{}), t0)
	b.Book(Report{Decision: 7, Prompt: 150, Cached: 16})
	if got, want := b.Stats().Tokens, [Causes]uint64{Used: 16, Unseen: 80, Uncacheable: 4, Unknown: 50}; got != want {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestWhatWasSeenIsEvictedGoneOrUntrusted(t *testing.T) {
	first := Placement{Prompt: 1025, Keys: chain(1, 32, 1, 64), BlockSize: 16, Limit: 1024, Member: 3, Epoch: 9, Writes: 1025}
	second := Placement{Prompt: 1025, Keys: chain(1, 32, 2, 64), BlockSize: 16, Limit: 1024, Member: 4, Epoch: 9}
	for name, c := range map[string]struct {
		home Home
		want string
	}{
		"it is there and EXACT":     {Home{Present: true, Epoch: 9, Exact: true, Tokens: 1000}, "evicted"},
		"it is there and not EXACT": {Home{Present: true, Epoch: 9, Tokens: 1000}, "untrusted"},
		"it began anew":             {Home{Present: true, Epoch: 10, Exact: true, Tokens: 1000}, "gone"},
		"it left":                   {Home{}, "gone"},
	} {
		b := New()
		b.Place(&first, still(Home{}), t0)
		got := lost(b, second, c.home, t0.Add(2*time.Minute), 0, false)
		if want := map[string]uint64{c.want: 512, "unseen": 512, "uncacheable": 1}; !cmp.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
		var classes Lost
		if c.want == "evicted" {
			classes[2][2] = 512 // within 5 minutes; 1,025 tokens later, in a pool of 1,000
		}
		if diff := cmp.Diff(classes, b.Stats().Evicted); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// What would have kept a block is how much its member was given since.
func TestWhatWouldHaveKeptItIsHowMuchWasWrittenSince(t *testing.T) {
	home := Home{Present: true, Epoch: 1, Exact: true, Tokens: 10_000}
	for written, want := range map[int]string{0: "1x", 10_000: "1x", 10_016: "2x", 40_000: "4x", 100_000: "16x", 160_000: "16x", 170_000: "more"} {
		b := New()
		p := Placement{Prompt: 161, Keys: chain(1, 10, 1, 10), BlockSize: 16, Limit: 160, Member: 1, Epoch: 1}
		b.Place(&p, still(home), t0)
		b.Place(&Placement{Member: 1, Epoch: 1, Writes: written}, still(home), t0)
		b.Place(&Placement{Member: 2, Epoch: 1, Writes: 1 << 20}, still(home), t0) // of another cache
		lost(b, p, home, t0, 0, false)
		s := b.Stats()
		if got := s.Evicted.BySize(); got[want] != 160 {
			t.Errorf("after %d tokens: %v, want %s", written, got, want)
		}
	}
	b := New()
	p := Placement{Prompt: 161, Keys: chain(1, 10, 1, 10), BlockSize: 16, Limit: 160, Member: 1, Epoch: 1}
	b.Place(&p, still(home), t0)
	lost(b, p, Home{Present: true, Epoch: 1, Exact: true}, t0, 0, false)
	s := b.Stats()
	if got := s.Evicted.BySize(); got["unknown"] != 160 {
		t.Errorf("of a pool that is not known: %v", got)
	}
}

// Whatever is placed and reported, the books balance to the token.
func TestBooksBalance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := New()
		b.seen.pages = make([]*page, 1<<rapid.IntRange(0, 2).Draw(t, "pages"))
		count := func(name string, most int) int { return rapid.IntRange(0, most).Draw(t, name) }
		var prompts, cached, requests uint64
		open := make(map[uint64]bool)
		for i := range uint64(rapid.IntRange(1, 30).Draw(t, "requests")) {
			blocks := count("blocks", 200)
			p := Placement{
				Decision: i + 1, Prompt: count("prompt", 4000), BlockSize: 16, Limit: count("limit", 4000),
				Keys:   chain(uint64(count("chain", 3)), count("shared", 200), uint64(count("other", 3)), blocks),
				Chosen: count("chosen", 4000), Feasible: count("feasible", 4000), Held: count("held", 4000), Ideal: count("ideal", 4000),
				Exact: rapid.Bool().Draw(t, "exact"), Priced: rapid.Bool().Draw(t, "priced"), Distrusted: rapid.Bool().Draw(t, "distrusted"),
				Member: uint32(count("member", 5)), Epoch: uint64(count("epoch", 2)), Writes: count("writes", 5000),
			}
			homes := make([]Home, 6)
			for m := range homes {
				homes[m] = Home{Present: rapid.Bool().Draw(t, "present"), Epoch: uint64(count("epoch", 2)), Exact: rapid.Bool().Draw(t, "exact"), Tokens: uint64(count("pool", 3000))}
			}
			b.Place(&p, func(m uint32) Home { return homes[m] }, t0.Add(time.Duration(count("seconds", 40000))*time.Second))
			open[p.Decision] = true
			if rapid.Bool().Draw(t, "reported") {
				r := Report{Decision: rapid.Uint64Range(1, i+2).Draw(t, "which"), Prompt: uint64(count("counted", 5000)), Moved: rapid.Bool().Draw(t, "moved")}
				r.Cached = uint64(count("cached", int(r.Prompt)))
				if open[r.Decision] {
					delete(open, r.Decision)
					prompts, cached, requests = prompts+r.Prompt, cached+r.Cached, requests+1
				}
				b.Book(r)
			}
		}
		s := b.Stats()
		var evicted uint64
		for _, n := range s.Evicted.BySize() {
			evicted += n
		}
		if s.Prompt() != prompts || s.Tokens[Used] != cached || s.Requests != requests || evicted != s.Tokens[Evicted] || s.Open != len(open) {
			t.Fatalf("%+v; want %d tokens, %d used, %d requests, %d open", s, prompts, cached, requests, len(open))
		}
	})
}

// A report counts once, and only of what was placed.
func TestEachRequestIsBookedOnce(t *testing.T) {
	b := New()
	b.Place(&Placement{Decision: 1, Prompt: 10}, still(Home{}), t0)
	for range 2 {
		b.Book(Report{Decision: 1, Prompt: 10, Cached: 5})
	}
	b.Book(Report{Decision: 99, Prompt: 10, Cached: 5})
	if s := b.Stats(); s.Requests != 1 || s.Unbooked != 2 || s.Prompt() != 10 {
		t.Errorf("%+v", s)
	}
}

func TestOpenRequestsAreBounded(t *testing.T) {
	b := New()
	for id := range uint64(maxOpen + 100) {
		b.Place(&Placement{Decision: id + 1, Prompt: 10}, still(Home{}), t0)
	}
	b.Book(Report{Decision: 100, Prompt: 10})
	b.Book(Report{Decision: 101, Prompt: 10})
	if s := b.Stats(); s.Open != maxOpen-1 || s.Unbooked != 1 || s.Requests != 1 || len(b.ring) != maxOpen {
		t.Errorf("%d open, %d not booked, %d booked, ring of %d", s.Open, s.Unbooked, s.Requests, len(b.ring))
	}
}

// However deep prompts were seen, the depth is found short by a sixteenth at
// most, and never too deep.
func TestDepthIsFoundShortByASixteenthAtMost(t *testing.T) {
	home := Home{Present: true, Epoch: 1, Exact: true}
	for shared := 0; shared <= 3000; shared += 1 + shared/20 {
		b := New()
		b.seen.pages = make([]*page, 4)
		b.Place(&Placement{Prompt: 64_000, Keys: chain(1, shared, 1, 4000), BlockSize: 16, Limit: 64_000, Epoch: 1}, still(home), t0)
		got := int(lost(b, Placement{Prompt: 64_000, Keys: chain(1, shared, 2, 4000), BlockSize: 16, Limit: 64_000, Epoch: 1}, home, t0, 0, false)["evicted"]) / 16
		if got > shared || got < shared-shared/16 {
			t.Errorf("%d blocks were seen, found %d", shared, got)
		}
	}
}

// A table that is full forgets the longest unused, and says for how long it
// remembers.
func TestWhatIsRememberedIsBounded(t *testing.T) {
	b := New()
	b.seen.pages = make([]*page, 1<<14/pageEntries)
	if b.Stats().Remembered >= 0 {
		t.Error("an empty table has forgotten something")
	}
	random := rand.New(rand.NewPCG(1, 2))
	p := Placement{Prompt: 512 * 16, BlockSize: 16, Limit: 512 * 16, Keys: make([]blockkey.Key, 512)}
	const prompts = 1 << 14 / 97 * 3
	for i := range prompts {
		for k := range p.Keys {
			p.Keys[k] = blockkey.Key(random.Uint64() | 1<<63)
		}
		b.seen.visit(&p, still(Home{}), t0.Add(time.Duration(i)*time.Second), &account{})
	}
	s := b.Stats()
	if s.Remembered < prompts/6*time.Second || s.Remembered > prompts/2*time.Second || b.seen.bytes() > 1<<14*int(entryBytes)+1024 {
		t.Errorf("after %d prompts a second each, remembered for %v", prompts, s.Remembered)
	}
}

// BenchmarkPlaceAndBook: prompts of 8,192 tokens; those that nobody had
// before touch memory that no cache of the processor has.
func BenchmarkPlaceAndBook(b *testing.B) {
	prompts := make([][]blockkey.Key, 4096)
	for i := range prompts {
		prompts[i] = chain(uint64(i), 512, 1, 512)
	}
	home := Home{Present: true, Epoch: 1, Exact: true, Tokens: 500_000}
	for name, n := range map[string]int{"same": 1, "fresh": len(prompts)} {
		b.Run(name, func(b *testing.B) {
			books := New()
			b.ReportAllocs()
			i := uint64(0)
			for b.Loop() {
				i++
				books.Place(&Placement{Decision: i, Prompt: 8192, Keys: prompts[i%uint64(n)], BlockSize: 16, Limit: 8176, Epoch: 1, Writes: 8192}, still(home), t0.Add(time.Duration(i)*time.Millisecond))
				books.Book(Report{Decision: i, Prompt: 8192, Cached: 4096})
			}
		})
	}
}
