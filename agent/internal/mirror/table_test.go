package mirror

import (
	"testing"

	"pgregory.net/rapid"
)

func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newTable()
		want := map[uint64]int32{}
		// Few different keys, so that most actions meet one that is there.
		keys := rapid.SliceOfNDistinct(rapid.Uint64(), 1, 200, rapid.ID[uint64]).Draw(t, "keys")
		for range rapid.IntRange(1, 1000).Draw(t, "actions") {
			key := rapid.SampledFrom(keys).Draw(t, "key")
			if node := rapid.Int32Range(0, 9).Draw(t, "node"); node > 0 {
				m.put(key, node)
				want[key] = node
			} else {
				m.remove(key)
				delete(want, key)
			}
			if m.used != len(want) {
				t.Fatalf("%d entries, want %d", m.used, len(want))
			}
		}
		for _, key := range keys {
			if got := m.get(key); got != want[key] {
				t.Fatalf("%x leads to %d, want %d", key, got, want[key])
			}
		}
	})
}

// A wrong home after a removal would lose entries of the same neighbourhood.
func TestTableClosesHoles(t *testing.T) {
	m := newTable()
	var crowd []uint64 // all at home in the last slot
	for key := uint64(1); len(crowd) < firstSlots/2; key++ {
		if int(m.mark(key)>>m.shift) == firstSlots-1 {
			crowd = append(crowd, key)
			m.put(key, int32(len(crowd)))
		}
	}
	for gone, key := range crowd {
		m.remove(key)
		for i, other := range crowd {
			want := int32(i + 1)
			if i <= gone {
				want = 0
			}
			if got := m.get(other); got != want {
				t.Fatalf("after %d removals entry %d leads to %d, want %d", gone+1, i, got, want)
			}
		}
	}
	if m.used != 0 {
		t.Errorf("%d entries left", m.used)
	}
}
