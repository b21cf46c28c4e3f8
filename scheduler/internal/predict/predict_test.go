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
