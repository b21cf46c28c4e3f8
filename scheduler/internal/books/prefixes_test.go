package books

import (
	"fmt"
	"testing"
	"time"
)

// place a prompt of 64 blocks whose first ones are those of a seed.
func place(b *Books, seed uint64, shared int, other uint64, now time.Time) {
	b.Place(&Placement{Model: fmt.Sprint("m", seed), Prompt: 1025, Keys: chain(seed, shared, other, 64), BlockSize: 16, Limit: 1024}, still(Home{}), now)
}

func TestSharedPrefixesAreFound(t *testing.T) {
	b := New()
	for i := range uint64(30) {
		place(b, 1, 32, 2+i, t0.Add(time.Duration(i)*time.Second))
		if i < 10 {
			place(b, 2, 48, 2+i, t0)
		}
		place(b, 100+i, 0, 1, t0) // nothing in common with anybody
	}
	got := b.Prefixes("", 10)
	if len(got) != 2 || got[0].Model != "m1" || got[0].Tokens() != 512 || got[0].Hits != 29 || got[0].Parted != 29 || !got[0].LastUsed.Equal(t0.Add(29*time.Second)) ||
		got[1].Model != "m2" || got[1].Tokens() != 768 || got[1].Hits != 9 || got[0].Value() != 29*512 {
		t.Errorf("%+v", got)
	}
	if got := b.Prefixes("m2", 10); len(got) != 1 || got[0].Model != "m2" {
		t.Errorf("of a model: %+v", got)
	}
	if got := b.Prefixes("", 1); len(got) != 1 || got[0].Model != "m1" {
		t.Errorf("the first: %+v", got)
	}
}

// A conversation goes through its own beginnings again and again, and parts from
// none of them twice.
func TestConversationsShareNothing(t *testing.T) {
	b := New()
	for turn := 4; turn <= 60; turn += 8 {
		b.Place(&Placement{Keys: chain(1, turn, 1, turn), BlockSize: 16, Prompt: turn*16 + 1, Limit: turn * 16}, still(Home{}), t0)
	}
	if got := b.Prefixes("", 10); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}

func TestTheMostValuablePrefixesAreFollowed(t *testing.T) {
	b := New()
	const all = 3 * MaxPrefixes
	for round := range uint64(4) {
		for i := range uint64(all) {
			if round < 3 || i%3 == 0 { // every third is worth more
				place(b, i, 32, 2+round, t0)
			}
		}
	}
	for range 20 {
		for i := uint64(0); i < all; i += 3 {
			place(b, i, 32, 77, t0)
			place(b, i, 32, 78, t0)
		}
	}
	got := b.Prefixes("", 1000)
	if len(got) != MaxPrefixes {
		t.Fatalf("%d prefixes", len(got))
	}
	for _, p := range got {
		var seed int
		if _, err := fmt.Sscanf(p.Model, "m%d", &seed); err != nil || seed%3 != 0 {
			t.Errorf("%s is followed: %d hits", p.Model, p.Hits)
		}
	}
}
