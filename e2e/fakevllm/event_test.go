package fakevllm

import (
	"bytes"
	"encoding/hex"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vmihailenco/msgpack/v5"
)

func TestMapsAreVLLM32Bytes(t *testing.T) {
	var b batch
	b.cleared()
	b.removed(name{hash: 0x393a0e04bf9da77a})
	b.stored(stored{first: true, hashes: []uint64{0x1122334455667788, 7}, tokens: []uint32{1, 200, 300, 70000}, blockSize: 2})
	b.stored(stored{hashes: []uint64{9}, parent: 7, hasParent: true, tokens: []uint32{5, 6}, blockSize: 2, adapter: "ad1", adapterID: 1, salt: "s"})
	// Taken apart from what vLLM 0.32 sent, with short lists.
	want := "93" + "cb41da22faa0100000" + "94" +
		"81" + "a474797065" + "b0416c6c426c6f636b73436c6561726564" +
		"84" + "a474797065" + "ac426c6f636b52656d6f766564" + "ac626c6f636b5f686173686573" + "91cf393a0e04bf9da77a" +
		"a66d656469756d" + "a3475055" + "a967726f75705f696478" + "00" +
		"8b" + "a474797065" + "ab426c6f636b53746f726564" + "ac626c6f636b5f686173686573" + "92cf112233445566778807" +
		"b1706172656e745f626c6f636b5f68617368" + "c0" + "a9746f6b656e5f696473" + "9401ccc8cd012cce00011170" +
		"aa626c6f636b5f73697a65" + "02" + "a76c6f72615f6964" + "c0" + "a66d656469756d" + "a3475055" + "a96c6f72615f6e616d65" + "c0" +
		"aa65787472615f6b657973" + "92c0c0" + "a967726f75705f696478" + "00" +
		"b26b765f63616368655f737065635f6b696e64" + "ae66756c6c5f617474656e74696f6e" +
		"8b" + "a474797065" + "ab426c6f636b53746f726564" + "ac626c6f636b5f686173686573" + "9109" +
		"b1706172656e745f626c6f636b5f68617368" + "07" + "a9746f6b656e5f696473" + "920506" +
		"aa626c6f636b5f73697a65" + "02" + "a76c6f72615f6964" + "01" + "a66d656469756d" + "a3475055" + "a96c6f72615f6e616d65" + "a3616431" +
		"aa65787472615f6b657973" + "9191a3616431" + "a967726f75705f696478" + "00" +
		"b26b765f63616368655f737065635f6b696e64" + "ae66756c6c5f617474656e74696f6e" +
		"00"
	if got := hex.EncodeToString(b.take(1754000000.25, 0)); got != want {
		t.Errorf("bytes differ: %s", cmp.Diff(want, got))
	}
	if b.take(1, 0) != nil {
		t.Error("an emptied batch is sent")
	}
}

func TestArraysAreFullLength(t *testing.T) {
	b := batch{era: Arrays}
	b.stored(stored{first: true, hashes: []uint64{math.MaxUint64}, tokens: []uint32{1, 2}, blockSize: 2, salt: "tenant"})
	b.removed(name{hash: 3})
	b.cleared()
	got, err := msgpack.NewDecoder(bytes.NewReader(b.take(1.5, 2))).DecodeInterface()
	if err != nil {
		t.Fatal(err)
	}
	want := []any{1.5, []any{
		[]any{"BlockStored", []any{uint64(math.MaxUint64)}, nil, []any{int8(1), int8(2)}, int8(2), nil, "GPU", nil,
			[]any{[]any{"tenant"}}, int8(0), "full_attention", nil},
		[]any{"BlockRemoved", []any{int8(3)}, "GPU", int8(0)},
		[]any{"AllBlocksCleared"},
	}, int8(2)}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestMsgpackWidths(t *testing.T) {
	for _, v := range []uint64{0, 127, 128, 255, 256, 65535, 65536, math.MaxUint32, math.MaxUint32 + 1, math.MaxUint64} {
		got, err := msgpack.NewDecoder(bytes.NewReader(appendUint(nil, v))).DecodeUint64()
		if err != nil || got != v {
			t.Errorf("%d became %d, %v", v, got, err)
		}
	}
	for _, n := range []int{0, 15, 16, 65535, 65536} {
		got, err := msgpack.NewDecoder(bytes.NewReader(appendArray(nil, n))).DecodeArrayLen()
		if err != nil || got != n {
			t.Errorf("array of %d became %d, %v", n, got, err)
		}
	}
	for _, n := range []int{0, 31, 32, 255, 256, 65536} {
		s := string(bytes.Repeat([]byte("x"), n))
		got, err := msgpack.NewDecoder(bytes.NewReader(appendString(nil, s))).DecodeString()
		if err != nil || got != s {
			t.Errorf("string of %d became one of %d, %v", n, len(got), err)
		}
	}
}
