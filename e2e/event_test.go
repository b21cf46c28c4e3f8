package e2e

import (
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// stored is a BlockStored as engines write it now. Hashes are made up.
type stored struct {
	hashes []uint64
	parent uint64 // 0: none
	tokens []uint32
	size   int    // 0: the usual one
	medium string // empty: GPU
}

func (s stored) event() map[string]any {
	e := map[string]any{
		"type": "BlockStored", "block_hashes": s.hashes, "parent_block_hash": nil, "token_ids": s.tokens,
		"block_size": size, "lora_id": nil, "medium": "GPU", "lora_name": nil,
		"group_idx": 0, "kv_cache_spec_kind": "full_attention",
	}
	if s.parent != 0 {
		e["parent_block_hash"] = s.parent
	}
	if s.size != 0 {
		e["block_size"] = s.size
	}
	if s.medium != "" {
		e["medium"] = s.medium
	}
	return e
}

func removed(hashes ...uint64) map[string]any {
	return map[string]any{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}
}

// batch encodes events as one payload.
func batch(t testing.TB, events ...any) []byte {
	t.Helper()
	payload, err := msgpack.Marshal([]any{1700000000.5, events, 0})
	if err != nil {
		t.Fatal(err)
	}
	return payload
}

// hashes are n made-up hashes from first on.
func hashes(first uint64, n int) []uint64 {
	list := make([]uint64, n)
	for i := range list {
		list[i] = first + uint64(i)
	}
	return list
}
