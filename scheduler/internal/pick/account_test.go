package pick

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// A prompt of 3,200 tokens on fleets where each of the causes is at work, from
// the decision to the report.
func TestTokensAreLostToWhatKeptThemAtTheDecision(t *testing.T) {
	p := prompt(1, 0, 3200)
	const limit, last = 3184, 16
	setBlocks := func(b *bed, id fleet.ID) {
		info := *b.fleet.View().Member(id).Info
		info.Blocks = 1000
		b.fleet.Receive(id, info, nil, t0)
	}
	for name, c := range map[string]struct {
		ask   Request
		set   func(b *bed, r *Request)
		after time.Duration
		found uint64
		by    string
		want  map[string]uint64
	}{
		"used":   {set: func(b *bed, r *Request) { b.gpu(b.join("a"), p, 100) }, found: 1600, want: map[string]uint64{"used": 1600, "unseen": 1584, "uncacheable": last}},
		"unseen": {set: func(b *bed, r *Request) { b.join("a") }, want: map[string]uint64{"unseen": limit, "uncacheable": last}},
		"busy": {set: func(b *bed, r *Request) {
			holder := b.join("holder")
			b.gpu(holder, p, 10)
			b.load(holder, 9, 40, t0)
			b.load(b.join("free"), 0, 0, t0)
		}, want: map[string]uint64{"busy": 160, "unseen": 3024, "uncacheable": last}},
		"policy": {ask: Request{Policy: "least-requests"}, set: func(b *bed, r *Request) {
			holder := b.join("holder")
			b.gpu(holder, p, 100)
			b.load(holder, 2, 0, t0)
			b.load(b.join("free"), 0, 0, t0)
		}, want: map[string]uint64{"policy": 1600, "unseen": 1584, "uncacheable": last}},
		"elsewhere": {by: "b", set: func(b *bed, r *Request) { b.gpu(b.join("a"), p, 100); b.join("b") },
			want: map[string]uint64{"elsewhere": 1600, "unseen": 1584, "uncacheable": last}},
		"unavailable": {ask: Request{Exclude: []Ref{{Member: "a"}}}, set: func(b *bed, r *Request) { b.gpu(b.join("a"), p, 100); b.join("b") },
			want: map[string]uint64{"unavailable": 1600, "unseen": 1584, "uncacheable": last}},
		"not credited": {set: func(b *bed, r *Request) {
			id := b.join("a")
			b.gpu(id, p, 100)
			b.trust(id, fleet.Syncing)
		}, want: map[string]uint64{"untrusted": 1600, "unseen": 1584, "uncacheable": last}},
		"no usable end": {set: func(b *bed, r *Request) {
			id := b.join("a")
			b.hold(id, index.LaneGPU, p, 100)
			b.fleet.SetCacheState(id, fleet.CacheState{Trust: fleet.Exact, Epoch: 1, Rule: fleet.HitRule{Ends: true}})
		}, want: map[string]uint64{"unusable": 1600, "unseen": 1584, "uncacheable": last}},
		"mispredicted": {set: func(b *bed, r *Request) { b.gpu(b.join("a"), p, 100) }, found: 800,
			want: map[string]uint64{"used": 800, "mispredicted": 800, "unseen": 1584, "uncacheable": last}},
		"skips the cache": {ask: Request{SkipsCache: true}, set: func(b *bed, r *Request) { b.gpu(b.join("a"), p, 100) },
			want: map[string]uint64{"uncacheable": 3200}},
		"no tokens": {set: func(b *bed, r *Request) { b.join("a"); r.Prompt = Prompt{} }, want: map[string]uint64{"unknown": 3200}},
		"evicted": {after: time.Minute, set: func(b *bed, r *Request) {
			setBlocks(b, b.join("a"))
			b.pick(Request{Prompt: tokens(p), Reserve: true})
			b.predictionsEnd()
		}, want: map[string]uint64{"evicted": limit, "uncacheable": last}},
		"gone": {set: func(b *bed, r *Request) {
			id := b.join("a")
			b.pick(Request{Prompt: tokens(p), Reserve: true})
			b.fleet.SetCacheState(id, fleet.CacheState{Trust: fleet.Exact, Epoch: 2})
		}, want: map[string]uint64{"gone": limit, "uncacheable": last}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			b.books = books.New()
			r := c.ask
			r.Prompt, r.Reserve = tokens(p), true
			c.set(b, &r)
			now := t0.Add(c.after)
			d := b.pickAt(r, now)
			length := uint64(3200)
			b.Report(Report{Decision: d.ID, Outcome: fleet.Finished, Member: c.by, PromptTokens: &length, CachedTokens: &c.found}, now)
			got := make(map[string]uint64)
			s := b.books.Stats()
			for cause, n := range s.Tokens {
				if n > 0 {
					got[books.Cause(cause).String()] = n
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("%s; %s", d.Reason, diff)
			}
			if name == "evicted" && s.Evicted.BySize()["1x"] != limit || name == "busy" && !(s.BusyMS > 0) {
				t.Errorf("%+v", s)
			}
		})
	}
}

// The counts of a first token and of the end are one account.
func TestCountsThatComeTwiceAreBookedOnce(t *testing.T) {
	b := newBed(t)
	b.books = books.New()
	b.join("a")
	d := b.pick(Request{Prompt: tokens(prompt(1, 0, 160)), Reserve: true})
	length, found := uint64(160), uint64(0)
	for _, outcome := range []fleet.Outcome{fleet.FirstToken, fleet.Finished, fleet.Finished} {
		b.Report(Report{Decision: d.ID, Outcome: outcome, PromptTokens: &length, CachedTokens: &found}, t0)
	}
	if s := b.books.Stats(); s.Requests != 1 || s.Unbooked != 0 || s.Prompt() != 160 {
		t.Errorf("%+v", s)
	}
}

// predictionsEnd lets all that was sent go unconfirmed for too long.
func (b *bed) predictionsEnd() { b.predicted.Tick(t0.Add(time.Minute)) }

func TestLeastLoadIsWhatFewestRequestsWouldHaveHad(t *testing.T) {
	b, r := shaded(t)
	r.Reserve = true
	if d := b.pick(r); first(d) != "owner" {
		t.Fatal(d.Reason)
	}
	if h := b.Stats().HitTokens; h.Routed != 1900*16 || h.LeastLoad != 0 {
		t.Errorf("%+v", h)
	}
	// The owner has the fewest requests by now.
	for range 5 {
		b.pick(Request{Prompt: tokens(prompt(9, 0, 64)), Candidates: []Ref{{Member: "idle"}}, Reserve: true})
	}
	b.pick(r)
	if h := b.Stats().HitTokens; h.LeastLoad != 1900*16 {
		t.Errorf("%+v", h)
	}
}
