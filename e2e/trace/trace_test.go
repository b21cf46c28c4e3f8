package trace

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestConversationIsWhatItSays(t *testing.T) {
	list, err := Conversation()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for _, q := range list {
		sum += q.Input
		if q.At%ConversationTick > time.Millisecond && q.At%ConversationTick < ConversationTick-time.Millisecond {
			t.Fatalf("%v is not at a tick", q.At)
		}
	}
	if rate := float64(sum) / ConversationSpan.Seconds(); len(list) != 3658 || math.Abs(rate-40857) > 1 {
		t.Errorf("%d requests, %.0f tokens/s", len(list), rate)
	}
	if last := list[len(list)-1].At; last >= ConversationSpan {
		t.Errorf("last at %v", last)
	}
}

func TestSpreadKeepsTheTickAndTheOrder(t *testing.T) {
	list := []Request{{At: 0, Input: 1}, {At: 0, Input: 2}, {At: 2999 * time.Millisecond, Input: 3}, {At: 3 * time.Second, Input: 4}, {At: 3 * time.Second, Input: 5}}
	again := slices.Clone(list)
	Spread(list, 3*time.Second, rand.New(rand.NewPCG(1, 2)))
	for i, q := range list {
		if first := q.At < 3*time.Second; first != (q.Input <= 3) {
			t.Errorf("request %d moved to %v", q.Input, q.At)
		}
		if i > 0 && q.At < list[i-1].At {
			t.Error("out of order")
		}
	}
	Spread(again, 3*time.Second, rand.New(rand.NewPCG(1, 2)))
	if d := cmp.Diff(list, again); d != "" {
		t.Errorf("the seed does not decide: %s", d)
	}
}

func TestTokensFollowFromIDs(t *testing.T) {
	a := Request{Input: 1200, IDs: []uint32{0, 1, 2}}.AppendTokens(nil)
	b := Request{Input: 1100, IDs: []uint32{0, 1, 3}}.AppendTokens(nil)
	if len(a) != 1200 || len(b) != 1100 {
		t.Fatalf("%d and %d tokens", len(a), len(b))
	}
	if !slices.Equal(a[:1024], b[:1024]) || slices.Equal(a[1024:1040], b[1024:1040]) {
		t.Error("equal ids are not equal tokens, or different ids are")
	}
	if lo, hi := slices.Min(a), slices.Max(a); lo < firstToken || hi >= firstToken+tokenKinds || hi-lo < tokenKinds/2 {
		t.Errorf("tokens from %d to %d", lo, hi)
	}
}

func TestBadLinesAreNamed(t *testing.T) {
	good := `{"timestamp":1000,"input_length":5,"output_length":1,"hash_ids":[0]}` + "\n"
	for _, bad := range []string{`{`, `{"timestamp":2000,"input_length":600,"output_length":1,"hash_ids":[0]}`, strings.Replace(good, "1000", "1", 1), `{"timestamp":2000,"input_length":0,"output_length":1,"hash_ids":[]}`} {
		if _, err := Read(strings.NewReader(good + bad)); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestCeilingCountsLeadingIDs(t *testing.T) {
	list := []Request{
		{Input: 1024, IDs: []uint32{0, 1}},
		{Input: 1024, IDs: []uint32{0, 1}},    // all but the last token
		{Input: 1536, IDs: []uint32{0, 2, 1}}, // the 1 stands behind a miss
	}
	if got, want := Ceiling(list), float64(1023+512)/(1024+1024+1536); got != want {
		t.Errorf("%v, want %v", got, want)
	}
	all, err := Conversation()
	if err != nil {
		t.Fatal(err)
	}
	if got := Ceiling(all); math.Abs(got-.3236) > .001 {
		t.Errorf("the conversation's ceiling is %.4f", got)
	}
}
