package predict

import (
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

var t0 = time.Unix(1_700_000_000, 0)

func TestPredictionsAreBounded(t *testing.T) {
	b := New(index.New(index.Config{}))
	keys := make([]blockkey.Key, 2500)
	for i := range 300 {
		for j := range keys {
			keys[j] = blockkey.Key(i*len(keys) + j + 1)
		}
		b.Add(Sent{Member: index.Member(i % 7), Epoch: 1, Keys: keys, First: time.Second}, t0)
		if n := b.Stats().Marks; n > maxAll || n == 0 {
			t.Fatalf("%d marks after %d prompts", n, i+1)
		}
	}
	b.Tick(t0.Add(time.Minute))
	if n := b.Stats().Marks; n != 0 {
		t.Errorf("%d marks are kept", n)
	}
}

// A prompt that comes again and again takes no more room than once, pushes out
// nobody, and is believed until the last of them runs out.
func TestRenewingPushesNobodyOut(t *testing.T) {
	b := New(index.New(index.Config{}))
	chain := func(from int) []blockkey.Key {
		keys := make([]blockkey.Key, 800)
		for i := range keys {
			keys[i] = blockkey.Key(from + i + 1)
		}
		return keys
	}
	once, often := chain(0), chain(1000)
	found := func(keys []blockkey.Key, now time.Time) int {
		var s Search
		return b.Match(keys, &s, now)
	}
	ttl := b.Add(Sent{Member: 1, Epoch: 1, Keys: once, First: 10 * time.Second}, t0)
	now := t0
	for range 2 * maxAll / 100 {
		now = now.Add(time.Millisecond)
		b.Add(Sent{Member: 2, Epoch: 1, Keys: often, First: 10 * time.Second}, now)
	}
	if n := b.Stats().Marks; n != 200 || len(b.queue)-b.head != n {
		t.Errorf("%d marks, %d in the queue", n, len(b.queue)-b.head)
	}
	if found(once, now) != len(once) || found(often, now) != len(often) {
		t.Error("somebody was pushed out")
	}
	b.Tick(t0.Add(ttl))
	if n := b.Stats().Marks; n != 100 || found(often, t0.Add(ttl)) != len(often) {
		t.Errorf("%d marks when the first has run out", n)
	}
	b.Tick(now.Add(ttl))
	if n := b.Stats().Marks; n != 0 || len(b.queue)-b.head != 0 {
		t.Errorf("%d marks when all have run out", n)
	}
}
