package vllm

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/vmihailenco/msgpack/v5"
)

var update = flag.Bool("update", false, "write the golden files")

func pack(t testing.TB, v any) []byte {
	t.Helper()
	var buf bytes.Buffer
	enc := msgpack.NewEncoder(&buf)
	enc.UseCompactInts(true)
	if err := enc.Encode(v); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

type (
	list   = []any
	object = map[string]any
)

// batchOf is a batch with one event.
func batchOf(event any) any { return list{1.5, list{event}, 0} }

func TestDecodeEveryForm(t *testing.T) {
	tokens := list{1, 200, 70000, 4_000_000_000}
	store := mirror.Store{Hashes: []uint64{7}, Tokens: []uint32{1, 200, 70000, 4_000_000_000}, BlockSize: 4, Physical: true}
	with := func(change func(*mirror.Store)) []Event {
		s := store
		change(&s)
		return []Event{{Kind: Stored, Store: s}}
	}
	digest := []byte("0123456789abcdefghijklmn\x00\x00\x00\x00\x00\x00\x01\x02")
	for _, c := range []struct {
		name  string
		batch any
		want  []Event
		skips Skips
	}{
		{name: "0.9 array", batch: list{1, list{list{"BlockStored", list{7}, nil, tokens, 4, nil}}},
			want: with(func(s *mirror.Store) { s.HidesExtras = true })},
		{name: "0.10.2 array with medium", batch: batchOf(list{"BlockStored", list{7}, 9, tokens, 4, nil, "GPU"}),
			want: with(func(s *mirror.Store) { s.HidesExtras, s.HasParent, s.Parent = true, true, 9 })},
		{name: "0.14 array with adapter", batch: batchOf(list{"BlockStored", list{7}, nil, tokens, 4, 1, "GPU", "sql"}),
			want: with(func(s *mirror.Store) { s.HidesExtras, s.Adapter = true, "sql" })},
		{name: "0.17 array with extra keys", batch: batchOf(list{"BlockStored", list{7}, nil, tokens, 4, nil, "GPU", nil, nil}),
			want: with(func(*mirror.Store) {})},
		{name: "0.23 array", batch: batchOf(list{"BlockStored", list{7}, nil, tokens, 4, nil, "GPU", nil, list{nil}, 2, "sliding_window", 128}),
			want: with(func(s *mirror.Store) { s.Group, s.Kind, s.Window = 2, mirror.Sliding, 128 })},
		{name: "map with foreign keys", batch: batchOf(object{"type": "BlockStored", "block_hashes": list{7}, "parent_block_hash": nil,
			"token_ids": tokens, "block_size": 4, "lora_id": nil, "medium": "GPU", "lora_name": nil, "session_id": "x", "ownership": object{"a": list{1}}, "colour": object{"a": list{1}}, "session": 5}),
			want: with(func(s *mirror.Store) { s.Physical = false }), skips: Skips{UnknownFields: 2}},
		{name: "map as batch", batch: object{"ts": 1, "events": list{object{"type": "AllBlocksCleared"}}, "data_parallel_rank": nil, "other": 1},
			want: []Event{{Kind: Cleared}}},
		{name: "parent 0 of a simulator", batch: batchOf(list{"BlockStored", list{7}, 0, tokens, 4, nil}),
			want: with(func(s *mirror.Store) { s.HidesExtras = true })},
		{name: "bytes hashes", batch: batchOf(list{"BlockStored", list{digest}, digest, tokens, 4, nil, "GPU", nil, nil}),
			want: with(func(s *mirror.Store) { s.Hashes, s.HasParent, s.Parent = []uint64{258}, true, 258 })},
		{name: "signed and small hashes", batch: batchOf(list{"BlockStored", list{-1, -129, int64(-1 << 62), 5, 300}, -3, nil, 4, nil, "GPU", nil, nil}),
			want: with(func(s *mirror.Store) {
				s.Hashes = []uint64{^uint64(0), ^uint64(128), 3 << 62, 5, 300}
				s.HasParent, s.Parent, s.Tokens = true, ^uint64(2), nil
			})},
		{name: "placeholder of an offloading connector", batch: batchOf(object{"type": "BlockStored", "block_hashes": list{7}, "parent_block_hash": nil,
			"token_ids": list{}, "block_size": 0, "lora_id": nil, "medium": "CPU", "lora_name": nil, "group_idx": 0}),
			want: with(func(s *mirror.Store) {
				s.Tier, s.HidesExtras, s.Physical, s.Tokens, s.BlockSize = mirror.Host, true, false, nil, 0
			})},
		{name: "removes", batch: list{1, list{list{"BlockRemoved", list{7}}, list{"BlockRemoved", list{7, 8}, "cpu"}, list{"BlockRemoved", list{9}, "GPU", 3},
			object{"type": "BlockRemoved", "block_hashes": list{1}, "medium": "STORAGE", "locality": "LOCAL"}, list{"BlockRemoved", list{}}}, nil},
			want: []Event{
				{Kind: Removed, Remove: mirror.Remove{Hashes: []uint64{7}}},
				{Kind: Removed, Remove: mirror.Remove{Tier: mirror.Host, Hashes: []uint64{7, 8}}},
				{Kind: Removed, Remove: mirror.Remove{Group: 3, HasGroup: true, Hashes: []uint64{9}}},
				{Kind: Removed, Remove: mirror.Remove{Tier: mirror.Disk, Hashes: []uint64{1}}},
			}},
		{name: "unknown events", batch: list{1, list{list{"BlockInactive", list{7}, object{"a": 1}}, object{"type": "Cleared", "medium": 5, "block_hashes": "x"}, list{"AllBlocksCleared"}}, 0},
			want: []Event{{Kind: Cleared}}, skips: Skips{UnknownEvents: 2}},
		{name: "unknown medium is not the GPU", batch: list{1, list{list{"BlockStored", list{7}, nil, tokens, 4, nil, "HOLOGRAM"}, list{"BlockRemoved", list{7}, strings.Repeat("x", 300)}}},
			skips: Skips{UnknownMediums: 2}},
		{name: "shared and remote storage", batch: list{1, list{
			list{"BlockStored", list{7}, nil, tokens, 4, nil, "OBJ"},
			object{"type": "BlockStored", "block_hashes": list{7}, "parent_block_hash": nil, "token_ids": tokens, "block_size": 4, "medium": "STORAGE"},
			object{"type": "BlockStored", "block_hashes": list{7}, "parent_block_hash": nil, "token_ids": tokens, "block_size": 4, "medium": "STORAGE", "locality": "REMOTE"},
			object{"type": "BlockStored", "block_hashes": list{7}, "parent_block_hash": nil, "token_ids": tokens, "block_size": 4, "medium": "CPU", "locality": "REMOTE"}}},
			skips: Skips{SharedStorage: 4}},
		{name: "local storage", batch: batchOf(object{"type": "BlockStored", "block_hashes": list{7}, "parent_block_hash": nil, "token_ids": tokens, "block_size": 4, "medium": "Storage", "locality": "local"}),
			want: with(func(s *mirror.Store) { s.Tier, s.HidesExtras, s.Physical = mirror.Disk, true, false })},
		{name: "adapter id without a name", batch: batchOf(list{"BlockStored", list{7}, nil, tokens, 4, 1, "GPU"}),
			want: with(func(s *mirror.Store) { s.HidesExtras, s.Withhold = true, true }), skips: Skips{NamelessLoRA: 1}},
		{name: "metadata where the adapter's name is due", batch: batchOf(list{"BlockStored", list{7}, nil, tokens, 4, nil, "GPU", object{"cache_salt": "a"}}),
			want: with(func(s *mirror.Store) { s.HidesExtras, s.Withhold = true, true }), skips: Skips{NamelessLoRA: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var d Decoder
			b, err := d.Decode(pack(t, c.batch))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, b.Events, cmpopts.EquateEmpty()); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(c.skips, d.Skips); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDecodeExtraKeys(t *testing.T) {
	stored := func(parent any, lora any, extras any) any {
		return batchOf(list{"BlockStored", list{7, 8, 9}, parent, list{1, 2, 3, 4, 5, 6}, 2, nil, "GPU", lora, extras})
	}
	image := list{"cat", -3}
	for _, c := range []struct {
		name  string
		batch any
		// Of the first event: blocks, salt, refs of block 0 and 1; withheld blocks in all.
		clean    int
		salt     string
		refs     [][]blockkey.Ref
		withheld int
	}{
		{name: "plain", batch: stored(nil, nil, list{nil, nil, nil}), clean: 3},
		{name: "empty", batch: stored(nil, nil, list{}), clean: 3},
		{name: "salt on the first block", batch: stored(nil, nil, list{list{"t"}, nil, nil}), clean: 3, salt: "t"},
		{name: "adapter is no salt", batch: stored(nil, "sql", list{list{"sql"}, list{"sql"}, list{"sql"}}), clean: 3},
		{name: "salt that is named like the adapter", batch: stored(nil, "sql", list{list{"sql", "sql"}, list{"sql"}, list{"sql"}}), clean: 3, salt: "sql"},
		{name: "adapter, image, salt", batch: stored(nil, "sql", list{list{"sql", image, "t"}, list{"sql", image}, list{"sql"}}), clean: 3, salt: "t",
			refs: [][]blockkey.Ref{{{ID: "cat", Offset: -3}}, {{ID: "cat", Offset: -3}}, nil}},
		{name: "two images", batch: stored(5, nil, list{nil, list{image, list{"dog", 1}}, nil}), clean: 3,
			refs: [][]blockkey.Ref{nil, {{ID: "cat", Offset: -3}, {ID: "dog", Offset: 1}}, nil}},
		{name: "bare identifier behind the root", batch: stored(nil, nil, list{nil, list{"cat"}, nil}), clean: 1, withheld: 2},
		{name: "bare identifier, not a root", batch: stored(5, nil, list{list{"cat"}, nil, nil}), withheld: 3},
		{name: "two bare texts in the root", batch: stored(nil, nil, list{list{"cat", "t"}, nil, nil}), withheld: 3},
		{name: "embeddings", batch: stored(nil, nil, list{nil, nil, list{[]byte("digest")}}), clean: 2, withheld: 1},
		{name: "salt, then embeddings", batch: stored(nil, nil, list{list{"t"}, list{[]byte("digest")}, nil}), clean: 1, salt: "t", withheld: 2},
		{name: "triple", batch: stored(nil, nil, list{list{list{"mm", "cat", 1}}, nil, nil}), withheld: 3},
		{name: "float offset", batch: stored(nil, nil, list{nil, list{list{"cat", 1.5}}, nil}), clean: 1, withheld: 2},
		{name: "offset beyond reason", batch: stored(nil, nil, list{nil, list{list{"cat", uint64(1 << 63)}}, nil}), clean: 1, withheld: 2},
		{name: "no list", batch: stored(nil, nil, list{nil, "cat", nil}), clean: 1, withheld: 2},
		{name: "fewer than blocks", batch: stored(nil, nil, list{nil}), withheld: 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			var d Decoder
			b, err := d.Decode(pack(t, c.batch))
			if err != nil {
				t.Fatal(err)
			}
			withheld, clean := 0, 0
			for i, e := range b.Events {
				s := e.Store
				if len(s.Tokens) != len(s.Hashes)*s.BlockSize {
					t.Errorf("event %d: %d tokens for %d blocks", i, len(s.Tokens), len(s.Hashes))
				}
				if i > 0 && (!s.HasParent || s.Parent != b.Events[i-1].Store.Hashes[len(b.Events[i-1].Store.Hashes)-1]) {
					t.Errorf("event %d does not follow its parent", i)
				}
				if s.Withhold {
					withheld += len(s.Hashes)
					if s.Salt != "" || s.Refs != nil {
						t.Errorf("withheld event has salt %q, refs %v", s.Salt, s.Refs)
					}
					continue
				}
				clean += len(s.Hashes)
				if s.Salt != c.salt {
					t.Errorf("salt %q, want %q", s.Salt, c.salt)
				}
				if diff := cmp.Diff(c.refs, s.Refs); diff != "" {
					t.Error(diff)
				}
			}
			if clean != c.clean || withheld != c.withheld {
				t.Errorf("%d clean and %d withheld blocks, want %d and %d", clean, withheld, c.clean, c.withheld)
			}
			if d.Skips.UnknownExtras != uint64(c.withheld) {
				t.Errorf("counted %d withheld blocks, want %d", d.Skips.UnknownExtras, c.withheld)
			}
		})
	}
}

// unknownShapes are batches that are sound and that no release sends.
func unknownShapes() map[string]any {
	tokens := list{1, 2, 3, 4}
	whole := func(change func(object)) any {
		o := object{"type": "BlockStored", "block_hashes": list{7}, "parent_block_hash": nil, "token_ids": tokens, "block_size": 4,
			"lora_id": nil, "medium": "GPU", "lora_name": nil, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
		change(o)
		return batchOf(o)
	}
	return map[string]any{
		"stored, 4 fields":            batchOf(list{"BlockStored", list{7}, nil, tokens, 4}),
		"stored, 10 fields":           batchOf(list{"BlockStored", list{7}, nil, tokens, 4, nil, "GPU", nil, nil, 0, "full_attention"}),
		"stored, 12 fields":           batchOf(list{"BlockStored", list{7}, nil, tokens, 4, nil, "GPU", nil, nil, 0, "full_attention", nil, "LOCAL"}),
		"stored, a field in between":  batchOf(list{"BlockStored", 1, list{7}, nil, tokens, 4, nil}),
		"removed, 4 fields":           batchOf(list{"BlockRemoved", list{7}, "GPU", 0, 1}),
		"removed without hashes":      batchOf(list{"BlockRemoved"}),
		"cleared, of something":       batchOf(list{"AllBlocksCleared", "CPU"}),
		"hashes of another name":      whole(func(o object) { delete(o, "block_hashes"); o["hashes"] = list{7} }),
		"no parent":                   whole(func(o object) { delete(o, "parent_block_hash") }),
		"no tokens":                   whole(func(o object) { delete(o, "token_ids") }),
		"no block size":               whole(func(o object) { delete(o, "block_size") }),
		"removed, of another name":    batchOf(object{"type": "BlockRemoved", "hashes": list{7}}),
		"hashes in ranges":            whole(func(o object) { o["block_hashes"] = list{list{7, 9}} }),
		"hashes as text":              whole(func(o object) { o["block_hashes"] = list{"07"} }),
		"tokens as a digest":          whole(func(o object) { o["token_ids"] = []byte("0123") }),
		"parent with its group":       whole(func(o object) { o["parent_block_hash"] = list{0, 7} }),
		"group with a name":           whole(func(o object) { o["group_idx"] = "full" }),
		"medium with a node":          whole(func(o object) { o["medium"] = object{"kind": "GPU"} }),
		"batch in an envelope":        list{object{"v": 2, "batch": list{1.5, list{}, 0}}},
		"batch that names its events": list{"v2", list{}, 0},
	}
}

func TestUnknownShapesAreTold(t *testing.T) {
	for name, batch := range unknownShapes() {
		t.Run(name, func(t *testing.T) {
			var d Decoder
			if b, err := d.Decode(pack(t, batch)); !errors.Is(err, ErrShape) {
				t.Errorf("%+v, %v", b, err)
			}
		})
	}
	// What is cut on its way says nothing of a release.
	whole := pack(t, batchOf(list{"BlockStored", list{7}, nil, list{1}, 1, nil}))
	var d Decoder
	if _, err := d.Decode(whole[:len(whole)-1]); err == nil || errors.Is(err, ErrShape) {
		t.Errorf("cut: %v", err)
	}
}

func TestDecodeRefusesGarbage(t *testing.T) {
	head := "\x93\x00\x91"
	for name, payload := range map[string]string{
		"nothing":                "",
		"scalar":                 "\x05",
		"batch of one":           "\x91\x00",
		"events are no list":     "\x92\x00\x05",
		"event is a number":      head + "\x05\x00",
		"event without tag":      head + "\x90\x00",
		"map without type":       head + "\x81\xa1a\x01\x00",
		"claims 4 G events":      "\x92\x00\xdd\xff\xff\xff\xff",
		"claims 2 M hashes":      head + "\x92\xabBlockStored\xdd\x00\x20\x00\x00" + strings.Repeat("\x01", 1<<21),
		"claims 4 GB of text":    head + "\x91\xdb\xff\xff\xff\xff",
		"claims 4 GB of ext":     "\x93\x00\x90\xc9\xff\xff\xff\xff\x01",
		"reserved code":          "\x94\x00\x90\x00\xc1",
		"negative token":         string(pack(t, batchOf(list{"BlockStored", list{7}, nil, list{1, -1}, 2, nil}))),
		"token beyond 32 bits":   string(pack(t, batchOf(list{"BlockStored", list{7}, nil, list{1, 1 << 32}, 2, nil}))),
		"negative block size":    string(pack(t, batchOf(list{"BlockStored", list{7}, nil, list{1}, -1, nil}))),
		"text as hash":           string(pack(t, batchOf(list{"BlockStored", list{"a"}, nil, list{1}, 1, nil}))),
		"empty digest":           string(pack(t, batchOf(list{"BlockRemoved", list{[]byte{}}}))),
		"group beyond reason":    string(pack(t, batchOf(list{"BlockRemoved", list{1}, "GPU", 1 << 20}))),
		"bytes behind the batch": "\x92\x00\x90\x00",
		"endless nesting":        "\x93\x00\x90" + strings.Repeat("\x91", 1<<20),
		"events named twice":     "\x82\xa6events\x90\xa6events\x90",
	} {
		t.Run(name, func(t *testing.T) {
			var d Decoder
			if b, err := d.Decode([]byte(payload)); err == nil {
				t.Errorf("decoded to %+v", b)
			}
		})
	}
	// Whatever a good payload is cut to, it is an error.
	good := pack(t, batchOf(object{"type": "BlockStored", "block_hashes": list{7}, "token_ids": list{1, 300}, "extra_keys": list{list{"x"}}}))
	var d Decoder
	for i := range good {
		if _, err := d.Decode(good[:i]); err == nil {
			t.Errorf("%d of %d bytes decoded", i, len(good))
		}
	}
}

func TestDecoderReusesItsBuffers(t *testing.T) {
	var d Decoder
	payload := benchPayload(t, 16)
	if _, err := d.Decode(payload); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { _, _ = d.Decode(payload) }); n > 0 {
		t.Errorf("%v allocations a batch", n)
	}
}

type sample struct {
	Name       string `json:"name"`
	PayloadHex string `json:"payload_hex"`
}

func wireSamples(t testing.TB) []sample {
	t.Helper()
	data, err := os.ReadFile("testdata/wire-samples.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Samples []sample }
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	return file.Samples
}

type recordedBatch struct {
	Recording string `json:"recording"`
	Sequence  uint64 `json:"sequence"`
	Payload   []byte `json:"payload"` // base64
}

func recorded(t testing.TB) []recordedBatch {
	t.Helper()
	f, err := os.Open("testdata/recorded.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var all []recordedBatch
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r recordedBatch
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	return all
}

// TestDecodeGolden holds what the samples of every era and batches of running
// engines mean.
func TestDecodeGolden(t *testing.T) {
	var out bytes.Buffer
	write := func(name string, payload []byte) {
		var d Decoder
		b, err := d.Decode(payload)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		fmt.Fprintf(&out, "%s rank %d\n", name, b.Rank)
		for _, e := range b.Events {
			switch e.Kind {
			case Stored:
				s := e.Store
				fmt.Fprintf(&out, "  stored tier %d group %d kind %d window %d hashes %x parent %v %x tokens %d %x size %d adapter %q salt %q refs %v withhold %v hides %v physical %v\n",
					s.Tier, s.Group, s.Kind, s.Window, s.Hashes, s.HasParent, s.Parent, len(s.Tokens), blockkey.Local(s.Tokens, nil), s.BlockSize,
					s.Adapter, s.Salt, s.Refs, s.Withhold, s.HidesExtras, s.Physical)
			case Removed:
				r := e.Remove
				fmt.Fprintf(&out, "  removed tier %d group %v %d hashes %x\n", r.Tier, r.HasGroup, r.Group, r.Hashes)
			case Cleared:
				fmt.Fprintln(&out, "  cleared")
			}
		}
		if d.Skips != (Skips{}) {
			fmt.Fprintf(&out, "  skips %+v\n", d.Skips)
		}
	}
	for _, s := range wireSamples(t) {
		payload, err := hex.DecodeString(s.PayloadHex)
		if err != nil {
			t.Fatal(err)
		}
		write(s.Name, payload)
	}
	for _, r := range recorded(t) {
		write(fmt.Sprintf("%s/%d", r.Recording, r.Sequence), r.Payload)
	}
	const golden = "testdata/decoded.golden"
	if *update {
		if err := os.WriteFile(golden, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), out.String()); diff != "" {
		t.Error(diff)
	}
}

// FuzzDecode looks for panics, for events that contradict themselves, and for
// memory beyond a fixed multiple of the payload.
func FuzzDecode(f *testing.F) {
	for _, s := range wireSamples(f) {
		payload, err := hex.DecodeString(s.PayloadHex)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(payload)
	}
	for _, r := range recorded(f) {
		f.Add(r.Payload)
	}
	for _, batch := range unknownShapes() {
		f.Add(pack(f, batch))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var d Decoder
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		b, err := d.Decode(payload)
		runtime.ReadMemStats(&after)
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 1<<20+1000*uint64(len(payload)) {
			t.Fatalf("%d bytes of payload took %d bytes", len(payload), grown)
		}
		if err != nil {
			return
		}
		for _, e := range b.Events {
			s := e.Store
			if s.Refs != nil && len(s.Refs) != len(s.Hashes) {
				t.Fatalf("%d refs for %d blocks", len(s.Refs), len(s.Hashes))
			}
			if s.HasParent && s.Salt != "" {
				t.Fatalf("salt %q away from the root", s.Salt)
			}
		}
		again := Decoder{}
		if b2, err := again.Decode(payload); err != nil || cmp.Diff(b.Events, b2.Events) != "" {
			t.Fatalf("second decode differs: %v", err)
		}
	})
}

// benchPayload is one event of 64 blocks of the given size, as 0.32 sends it.
func benchPayload(t testing.TB, blockSize int) []byte {
	hashes, tokens, extras := list{}, list{}, list{}
	for i := range 64 {
		hashes = append(hashes, uint64(i+1)*0x9E3779B97F4A7C15)
		extras = append(extras, nil)
		for j := range blockSize {
			tokens = append(tokens, (i*7919+j*104729)%128000)
		}
	}
	return pack(t, batchOf(object{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": uint64(1) << 63, "token_ids": tokens, "block_size": blockSize,
		"lora_id": nil, "medium": "GPU", "lora_name": nil, "extra_keys": extras, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}))
}

func BenchmarkDecode(b *testing.B) {
	var d Decoder
	payload := benchPayload(b, 16)
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Decode(payload); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(64*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
}
