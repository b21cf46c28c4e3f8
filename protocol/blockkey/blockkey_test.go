package blockkey_test

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

var update = flag.Bool("update", false, "rewrite testdata/vectors.json from the code")

// vector is one language-neutral case. Keys are decimal strings, because JSON
// numbers lose 64-bit integers in some languages.
type vector struct {
	Name      string     `json:"name"`
	Model     string     `json:"model"`
	Adapter   string     `json:"adapter"`
	Salt      string     `json:"salt"`
	BlockSize int        `json:"block_size"`
	Tokens    []uint32   `json:"tokens"`
	Items     []itemJSON `json:"items,omitempty"`
	Root      string     `json:"root"`
	Keys      []string   `json:"keys"`
	Digest    string     `json:"digest"`
}

type itemJSON struct {
	ID     string `json:"id"`
	Offset int    `json:"offset"`
	Length int    `json:"length"`
}

func count(n int, from uint32) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = from + uint32(i)
	}
	return tokens
}

func cases() []vector {
	return []vector{
		{Name: "plain", Model: "tiny", BlockSize: 4, Tokens: count(10, 1)},
		{Name: "no whole block", Model: "tiny", BlockSize: 16, Tokens: count(15, 1)},
		{Name: "empty prompt", Model: "tiny", BlockSize: 16, Tokens: []uint32{}},
		{Name: "block of 16", Model: "meta-llama/Llama-3.1-8B", BlockSize: 16, Tokens: count(100, 1000)},
		{Name: "block of 1", Model: "tiny", BlockSize: 1, Tokens: []uint32{0, 1, 4294967295}},
		{Name: "adapter", Model: "tiny", Adapter: "ad1", BlockSize: 4, Tokens: count(10, 1)},
		{Name: "salt", Model: "tiny", Salt: "tenant-ü", BlockSize: 4, Tokens: count(10, 1)},
		{Name: "adapter and salt", Model: "tiny", Adapter: "ad1", Salt: "tenant-a", BlockSize: 4, Tokens: count(10, 1)},
		{Name: "item over two blocks", Model: "tiny", BlockSize: 4, Tokens: count(14, 1), Items: []itemJSON{{"img-a", 2, 4}}},
		{Name: "two items in one block", Model: "tiny", BlockSize: 8, Tokens: count(16, 1), Items: []itemJSON{{"img-a", 1, 2}, {"img-b", 4, 9}}},
	}
}

func compute(v vector) vector {
	scope := blockkey.Scope{Model: v.Model, Adapter: v.Adapter, Salt: v.Salt, BlockSize: v.BlockSize}
	items := make([]blockkey.Item, len(v.Items))
	for i, item := range v.Items {
		items[i] = blockkey.Item(item)
	}
	keys := blockkey.AppendTokens(nil, scope.Root(), v.Tokens, v.BlockSize, items)
	v.Root = strconv.FormatUint(uint64(scope.Root()), 10)
	v.Keys = []string{}
	var digest uint64
	for _, k := range keys {
		v.Keys = append(v.Keys, strconv.FormatUint(uint64(k), 10))
		digest ^= blockkey.Digest(k)
	}
	v.Digest = strconv.FormatUint(digest, 10)
	return v
}

func TestVectorsHold(t *testing.T) {
	var got []vector
	for _, v := range cases() {
		got = append(got, compute(v))
	}
	if *update {
		data, err := json.MarshalIndent(got, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("testdata/vectors.json", append(data, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var want []vector
	if err := json.Unmarshal(data, &want); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("keys differ from testdata/vectors.json (-want +got):\n%s", diff)
	}
}

// drawPrompt draws a prompt with items that do not overlap, as engines have them.
func drawPrompt(t *rapid.T) (tokens []uint32, size int, items []blockkey.Item) {
	tokens = rapid.SliceOfN(rapid.Uint32(), 0, 200).Draw(t, "tokens")
	size = rapid.IntRange(1, 20).Draw(t, "block size")
	for at := 0; at < len(tokens); {
		at += rapid.IntRange(0, 40).Draw(t, "gap")
		length := rapid.IntRange(1, 40).Draw(t, "length")
		if at+length > len(tokens) || rapid.Bool().Draw(t, "stop") {
			break
		}
		items = append(items, blockkey.Item{ID: rapid.StringN(0, 4, -1).Draw(t, "id"), Offset: at, Length: length})
		at += length
	}
	return tokens, size, items
}

// A chain built block by block, as an agent does it, has the keys that a
// caller computes from the whole prompt.
func TestBlockByBlockEqualsWholePrompt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tokens, size, items := drawPrompt(t)
		root := blockkey.Scope{Model: "m", BlockSize: size}.Root()
		var want []blockkey.Key
		parent := root
		for start := 0; start+size <= len(tokens); start += size {
			var refs []blockkey.Ref
			for _, item := range items {
				if item.Offset < start+size && item.Offset+item.Length > start {
					refs = append(refs, blockkey.Ref{ID: item.ID, Offset: item.Offset - start})
				}
			}
			parent = blockkey.Chain(parent, blockkey.Local(tokens[start:start+size], refs))
			want = append(want, parent)
		}
		got := blockkey.AppendTokens(nil, root, tokens, size, items)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("(-block by block +whole):\n%s", diff)
		}
		var raw []byte
		for _, token := range tokens {
			raw = binary.LittleEndian.AppendUint32(raw, token)
		}
		fromBytes, err := blockkey.AppendBytes(nil, root, raw, size, items)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, fromBytes); diff != "" {
			t.Fatalf("(-tokens +bytes):\n%s", diff)
		}
	})
}

func TestEveryInputReachesTheKeys(t *testing.T) {
	base := vector{Model: "m", Adapter: "a", Salt: "s", BlockSize: 4, Tokens: count(8, 1), Items: []itemJSON{{"i", 1, 6}}}
	seen := map[string]string{compute(base).Keys[1]: "base"}
	for name, change := range map[string]func(*vector){
		"model":                func(v *vector) { v.Model = "n" },
		"adapter":              func(v *vector) { v.Adapter = "b" },
		"salt":                 func(v *vector) { v.Salt = "t" },
		"adapter becomes salt": func(v *vector) { v.Adapter, v.Salt = "", "as" },
		"letters move":         func(v *vector) { v.Model, v.Adapter = "ma", "" },
		"first token":          func(v *vector) { v.Tokens = append([]uint32{9}, v.Tokens[1:]...) },
		"last token":           func(v *vector) { v.Tokens = append(count(7, 1), 99) },
		"swapped blocks":       func(v *vector) { v.Tokens = append(count(4, 5), count(4, 1)...) },
		"item":                 func(v *vector) { v.Items = []itemJSON{{"j", 1, 6}} },
		"item's offset":        func(v *vector) { v.Items = []itemJSON{{"i", 2, 5}} },
		"no item":              func(v *vector) { v.Items = nil },
	} {
		v := base
		change(&v)
		key := compute(v).Keys[1]
		if other, taken := seen[key]; taken {
			t.Errorf("%s has the key of %s", name, other)
		}
		seen[key] = name
	}
	other := base
	other.BlockSize = 8
	if _, taken := seen[compute(other).Keys[0]]; taken {
		t.Error("another block size gives a key already seen")
	}
}

func TestRaggedBytesAreRefused(t *testing.T) {
	_, err := blockkey.AppendBytes(nil, 1, make([]byte, 17), 4, nil)
	if !errors.Is(err, blockkey.ErrRagged) {
		t.Errorf("17 bytes: error %v, want ErrRagged", err)
	}
}

func TestNoWholeBlockWithoutASize(t *testing.T) {
	for _, size := range []int{0, -1} {
		if got := blockkey.AppendTokens(nil, 1, count(8, 0), size, nil); len(got) != 0 {
			t.Errorf("block size %d: %d keys, want none", size, len(got))
		}
	}
}

func TestKeysAllocateNothing(t *testing.T) {
	tokens := count(8192, 0)
	dst := make([]blockkey.Key, 0, 512)
	items := []blockkey.Item{{ID: "image", Offset: 100, Length: 700}}
	if n := testing.AllocsPerRun(20, func() {
		dst = blockkey.AppendTokens(dst[:0], 1, tokens, 16, nil)
		dst = blockkey.AppendTokens(dst[:0], 1, tokens, 16, items)
	}); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

// The rates are token bytes per second, by the clock and by CPU time.
func BenchmarkKeys(b *testing.B) {
	for _, size := range []int{16, 32, 64} {
		for _, length := range []int{512, 8192, 131072} {
			tokens := count(length, 0)
			dst := make([]blockkey.Key, 0, length/size)
			b.Run("block"+strconv.Itoa(size)+"/tokens"+strconv.Itoa(length), func(b *testing.B) {
				b.SetBytes(int64(4 * length))
				b.ReportAllocs()
				cpu := ownCPU(b)
				for b.Loop() {
					dst = blockkey.AppendTokens(dst[:0], 1, tokens, size, nil)
				}
				b.ReportMetric(float64(4*length*b.N)/float64(ownCPU(b)-cpu), "cpu-GB/s")
			})
		}
	}
}

// ownCPU is the processor time of this process.
func ownCPU(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
