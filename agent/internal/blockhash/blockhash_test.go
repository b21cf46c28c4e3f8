package blockhash

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
)

// vector is a chain of blocks as vLLM hashes it.
type vector struct {
	Name      string `json:"name"`
	Algorithm string `json:"algo"`
	Seed      string `json:"none_hash_seed"`
	Root      string `json:"none_hash_hex"`
	Tagged    bool   `json:"tagged"`
	Adapter   string `json:"lora_name"`
	Path      string `json:"lora_path"`
	Salt      string `json:"cache_salt"`
	Items     []struct {
		ID     string `json:"identifier"`
		Offset int    `json:"offset"`
		Length int    `json:"length"`
	} `json:"mm_features"`
	Blocks []struct {
		Tokens []uint32 `json:"tokens"`
		Hash   string   `json:"hash_hex"`
		Event  uint64   `json:"event_int"`
	} `json:"blocks"`
}

// The inputs and hashes are those of vLLM; the tagged ones were computed by
// Python's own pickle and cbor2 from the tuples that vLLM 0.31 hashes.
func TestHashesAreVLLMs(t *testing.T) {
	data, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []vector
	if err := json.Unmarshal(data, &vectors); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) {
			h, err := New(v.Algorithm, v.Seed, v.Tagged)
			if err != nil {
				t.Fatal(err)
			}
			seen[v.Algorithm] = true
			digest := h.Root()
			if got := hex.EncodeToString(digest[:h.size()]); got != v.Root {
				t.Fatalf("root %s, want %s", got, v.Root)
			}
			start := 0
			for i, b := range v.Blocks {
				x := Extras{Adapter: v.Adapter, Root: v.Path}
				if i == 0 {
					x.Salt = v.Salt
				}
				for _, item := range v.Items {
					if item.Offset < start+len(b.Tokens) && item.Offset+item.Length > start {
						x.Items = append(x.Items, Item{ID: item.ID, Offset: item.Offset - start})
					}
				}
				next, ok := h.Next(&digest, b.Tokens, &x)
				if got := hex.EncodeToString(next[:h.size()]); !ok || got != b.Hash || h.Short(&next) != b.Event {
					t.Fatalf("block %d: %s (%d), want %s (%d)", i, got, h.Short(&next), b.Hash, b.Event)
				}
				digest = next
				start += len(b.Tokens)
			}
		})
	}
	if len(seen) != len(Algorithms) {
		t.Errorf("vectors of %d algorithms, there are %d", len(seen), len(Algorithms))
	}
}

func TestUnknownAlgorithmIsRefused(t *testing.T) {
	if _, err := New("md5", "0", false); err == nil {
		t.Error("no error")
	}
}

// A block whose pickle has several frames is none that can be computed here.
func TestLargestBlock(t *testing.T) {
	h, _ := New("sha256", "0", false)
	root := h.Root()
	for tokens, want := range map[int]bool{1: true, 13_000: true, 14_000: false} {
		if _, ok := h.Next(&root, large(tokens), &Extras{}); ok != want {
			t.Errorf("%d tokens: %t, want %t", tokens, ok, want)
		}
	}
}

func large(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = 1 << 20
	}
	return tokens
}

func BenchmarkNext(b *testing.B) {
	for _, algorithm := range Algorithms {
		b.Run(algorithm, func(b *testing.B) {
			h, _ := New(algorithm, DefaultSeed, true)
			digest := h.Root()
			tokens := large(16)
			b.ReportAllocs()
			for b.Loop() {
				digest, _ = h.Next(&digest, tokens, &Extras{})
			}
		})
	}
}
