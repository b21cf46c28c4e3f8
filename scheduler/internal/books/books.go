// Package books accounts for prompt tokens: of each request that is reported,
// what its engine found cached, and for every other token the one cause that it
// was lost to. The causes of a request are laid out when it is placed, by where
// which part of its prompt is then, and booked when the engine's own count is
// known; so the books of any number of requests balance to the token.
//
// What was seen before is known from a bounded table, see seen; from it come the
// prefixes that are shared most, too. The package decides nothing, and has no
// clock.
package books

import (
	"strconv"
	"sync"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

const (
	// MaxBlocks of a prompt are followed; what comes behind them is Unknown.
	MaxBlocks = 1 << 14
	// maxOpen requests wait for their report; beyond, the oldest is forgotten.
	maxOpen = 1 << 16
	// maxSpans of a request, of which maxPast are for what was seen before.
	maxSpans, maxPast = 12, 5
)

// Cause is what became of a token of a prompt.
type Cause uint8

const (
	// Used: the engine found it in its cache.
	Used Cause = iota
	// Unseen: no request had it before, as far as is remembered, and no member
	// holds it.
	Unseen
	// Evicted: it was sent to a member before, which is EXACT and no longer has it.
	Evicted
	// Gone: it was sent to an engine that left or began anew.
	Gone
	// Busy: another candidate had it, and would have cost more time.
	Busy
	// Policy: another candidate had it, and the policy goes by something else.
	Policy
	// Elsewhere: the member that was picked had it, and another one served.
	Elsewhere
	// Unavailable: only members that were no candidates had it.
	Unavailable
	// Untrusted: a member had it or may have it, whose cache state is not EXACT.
	Untrusted
	// Unusable: a candidate had it, where its engine accepts no hit to end.
	Unusable
	// Mispredicted: the member that was picked was EXACT, and did not find it.
	Mispredicted
	// Uncacheable: no cache serves it: the last token, what fills no block, and
	// requests that skip the cache.
	Uncacheable
	// Unknown: the request came without tokens, or its engine counts others.
	Unknown

	Causes
)

func (c Cause) String() string {
	return [Causes]string{"used", "unseen", "evicted", "gone", "busy", "policy", "elsewhere", "unavailable",
		"untrusted", "unusable", "mispredicted", "uncacheable", "unknown"}[c]
}

// Ages are the upper bounds of how long ago a token was last used when it was
// missed; the last class has none.
var Ages = [...]time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 15 * time.Minute, time.Hour, 6 * time.Hour}

// Sizes are caches as multiples of a member's GPU pool: how large one that drops
// the longest unused must be to have kept a token. The last class is beyond them,
// the first, 0, not known.
var Sizes = [...]int{1, 2, 4, 8, 16}

const (
	ageClasses  = len(Ages) + 1
	sizeClasses = len(Sizes) + 2
)

// Lost are evicted tokens by Ages and Sizes: the class i of ages is below Ages[i],
// the class i of sizes is kept by Sizes[i-1].
type Lost [ageClasses][sizeClasses]uint64

// BySize are the tokens by what would have kept them: "2x" for one that is twice
// as large as the member's GPU pool, "more" for what is beyond Sizes, "unknown".
func (l *Lost) BySize() map[string]uint64 {
	tokens := make(map[string]uint64, sizeClasses)
	for _, age := range l {
		for size, n := range age {
			tokens[sizeName(size)] += n
		}
	}
	return tokens
}

func sizeName(class int) string {
	switch {
	case class == 0:
		return "unknown"
	case class > len(Sizes):
		return "more"
	}
	return strconv.Itoa(Sizes[class-1]) + "x"
}

// Placement is what is known of a request when it is placed. Counts are of its
// leading tokens.
type Placement struct {
	Decision uint64
	Model    string
	// Prompt tokens; 0: not known. Keys are of their whole blocks, as far as
	// MaxBlocks.
	Prompt    int
	Keys      []blockkey.Key
	BlockSize int
	// Limit is the most that a cache can serve.
	Limit int
	// Chosen is what the member that was picked has, or will have when the request
	// starts, and Exact, that this stands on an EXACT cache state.
	Chosen int
	Exact  bool
	// Feasible is what a candidate has or will have, Priced that the policy goes
	// by time, and PriceMS how much more that candidate would have cost.
	Feasible int
	Priced   bool
	PriceMS  float64
	// Held is what a candidate holds, usable or not; Distrusted: it is not
	// credited. Ideal is what any member holds.
	Held       int
	Distrusted bool
	Ideal      int
	// Member that was picked, the epoch of its engine, and the tokens that the
	// request will write to its cache.
	Member uint32
	Epoch  uint64
	Writes int
}

// Home is what is known of a member that something was sent to before.
type Home struct {
	// Present: it is there, with an engine of this epoch.
	Present bool
	Epoch   uint64
	Exact   bool
	// Tokens of its GPU pool; 0: not known.
	Tokens uint64
}

// Report is the engine's own count for a request. Moved: another member than the
// one that was picked served it.
type Report struct {
	Decision       uint64
	Prompt, Cached uint64
	Moved          bool
}

// Stats are the books.
type Stats struct {
	// Requests that were booked; Unbooked, reported with counts and not placed
	// here, or too long ago. Open wait for their report.
	Requests, Unbooked uint64
	Open               int
	// Tokens by what became of them; they add up to the booked prompts.
	Tokens [Causes]uint64
	// Busy requests: those that lost tokens to that cause, and what those would
	// have cost besides in ms.
	Busy   uint64
	BusyMS float64
	// Evicted tokens by when they were last used, and what would have kept them.
	Evicted Lost
	// Remembered is for how long what was seen may be unused until it is forgotten,
	// in the mean; negative: nothing has been forgotten.
	Remembered time.Duration
	// Bytes that are taken.
	Bytes int
}

// Prompt tokens of the booked requests.
func (s *Stats) Prompt() (sum uint64) {
	for _, n := range s.Tokens {
		sum += n
	}
	return sum
}

// span is a piece of a prompt that ends at to and would be lost to a cause.
type span struct {
	to        int32
	cause     Cause
	age, size uint8
}

// account is a request that waits for its report: its prompt in spans, in order.
type account struct {
	price float32
	count uint8
	spans [maxSpans]span
}

// extend adds a span that ends at to, unless the account reaches as far.
func (a *account) extend(to int, s span) {
	var end int32
	if a.count > 0 {
		end = a.spans[a.count-1].to
	}
	if s.to = int32(min(to, 1<<31-1)); s.to <= end {
		return
	}
	if a.count > 0 {
		if last := &a.spans[a.count-1]; last.cause == s.cause && last.age == s.age && last.size == s.size {
			last.to = s.to
			return
		}
	}
	a.spans[a.count] = s
	a.count++
}

// Books are safe for concurrent use.
type Books struct {
	mu       sync.Mutex // guards all
	seen     seen
	prefixes prefixes
	open     map[uint64]account
	ring     []uint64 // decisions in open, and some that are no longer
	next     int      // in ring
	stats    Stats
}

// New returns empty books.
func New() *Books { return &Books{open: make(map[uint64]account)} }

// Place lays out the account of a request, and remembers its prompt. home says
// what is known of a member; it must not call the Books.
func (b *Books) Place(p *Placement, home func(member uint32) Home, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := account{price: float32(p.PriceMS)}
	wrong, diverted, held := Untrusted, Policy, Unusable
	if p.Exact {
		wrong = Mispredicted
	}
	if p.Priced {
		diverted = Busy
	}
	if p.Distrusted {
		held = Untrusted
	}
	a.extend(p.Chosen, span{cause: wrong})
	a.extend(p.Feasible, span{cause: diverted})
	a.extend(p.Held, span{cause: held})
	a.extend(p.Ideal, span{cause: Unavailable})
	if e, n := b.seen.visit(p, home, now, &a); e != nil {
		b.prefixes.offer(&b.seen, e, p, n)
	}
	a.extend(min(p.Limit, len(p.Keys)*p.BlockSize), span{cause: Unseen})
	a.extend(p.Limit, span{cause: Unknown})
	a.extend(p.Prompt, span{cause: Uncacheable})
	b.keep(p.Decision, a)
}

// keep opens an account, in place of the oldest where there is no room.
func (b *Books) keep(id uint64, a account) {
	if len(b.ring) < maxOpen {
		b.ring = append(b.ring, id)
	} else {
		delete(b.open, b.ring[b.next])
		b.ring[b.next] = id
		b.next = (b.next + 1) % maxOpen
	}
	b.open[id] = a
}

// Book closes the account of a request.
func (b *Books) Book(r Report) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a, ok := b.open[r.Decision]
	if !ok {
		b.stats.Unbooked++
		return
	}
	delete(b.open, r.Decision)
	b.stats.Requests++
	at := min(r.Cached, r.Prompt)
	b.stats.Tokens[Used] += at
	for i, s := range a.spans[:a.count] {
		to := min(uint64(s.to), r.Prompt)
		if to <= at {
			continue
		}
		lost := to - at
		at = to
		if i == 0 && r.Moved && (s.cause == Mispredicted || s.cause == Untrusted) {
			s.cause = Elsewhere
		}
		b.stats.Tokens[s.cause] += lost
		switch s.cause {
		case Busy:
			b.stats.Busy++
			b.stats.BusyMS += float64(a.price)
		case Evicted:
			b.stats.Evicted[s.age][s.size] += lost
		}
	}
	b.stats.Tokens[Unknown] += r.Prompt - at
}

// Stats returns the books as they are.
func (b *Books) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.stats
	s.Open, s.Remembered = len(b.open), b.seen.remembered()
	s.Bytes = b.seen.bytes() + len(b.ring)*8 + len(b.open)*int(accountBytes)
	return s
}
