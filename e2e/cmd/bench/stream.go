package main

import (
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// shape says how an engine stores: so many blocks an event, in chains of so
// many, of which some grow side by side.
type shape struct {
	name        string
	least, most int // blocks of an event
	chain       int // blocks of a chain; 0: every event is a chain of its own
	beside      int // chains that grow at a time
}

const (
	vocabulary = 150000
	// cycle is how many blocks there are, in pools: one that was evicted comes
	// again when all others have.
	cycle = 3
)

// stream is an engine's cache and the batches that fill it: one stored event
// each, and before it the removal of as many blocks as must make room, the end
// of the oldest chain first.
type stream struct {
	stored  []stored
	removed [][]byte // the event for each block
	digests []uint64 // of each block's key
	evict   []int    // blocks in the order of eviction

	at, oldest int // in stored and evict
	payload    []byte

	// What the agent's cache state must come to.
	batches uint64
	blocks  uint64 // stored in all
	held    uint64
	digest  uint64
}

// stored is one BlockStored event.
type stored struct {
	event  []byte
	blocks []int
	keys   []blockkey.Key // of the whole prefix
}

func newStream(s shape) *stream {
	rng := rand.New(rand.NewPCG(1, uint64(s.least)<<32|uint64(s.most)))
	root := blockkey.Scope{Model: model, BlockSize: blockSize}.Root()
	t := &stream{}
	type growing struct {
		left   int
		parent uint64
		keys   []blockkey.Key
		blocks []int
	}
	for len(t.digests) < cycle*poolBlocks {
		chains := make([]growing, max(s.beside, 1))
		for i := range chains {
			chains[i].left = s.chain
			if s.chain == 0 {
				chains[i].left = s.least + rng.IntN(s.most-s.least+1)
			}
		}
		for open := len(chains); open > 0; {
			for i := range chains {
				c := &chains[i]
				if c.left == 0 {
					continue
				}
				n := c.left
				if s.chain > 0 {
					n = min(n, s.least+rng.IntN(s.most-s.least+1))
				}
				tokens := make([]uint32, n*blockSize)
				for k := range tokens {
					// Few words make most of a text.
					tokens[k] = uint32(math.Pow(vocabulary, rng.Float64()))
				}
				hashes := make([]uint64, n)
				event := stored{blocks: make([]int, n)}
				before := root
				if len(c.keys) > 0 {
					before = c.keys[len(c.keys)-1]
				}
				c.keys = blockkey.AppendTokens(c.keys[:len(c.keys):len(c.keys)], before, tokens, blockSize, nil)
				event.keys = c.keys
				for k := range n {
					hashes[k] = rng.Uint64()
					event.blocks[k] = len(t.digests)
					c.blocks = append(c.blocks, len(t.digests))
					t.digests = append(t.digests, blockkey.Digest(c.keys[len(c.keys)-n+k]))
					t.removed = append(t.removed, removedEvent(hashes[k]))
				}
				event.event = storedEvent(hashes, c.parent, len(c.keys) > n, tokens)
				t.stored = append(t.stored, event)
				c.parent = hashes[n-1]
				if c.left -= n; c.left == 0 {
					open--
				}
			}
		}
		for i := range chains {
			for k := len(chains[i].blocks) - 1; k >= 0; k-- {
				t.evict = append(t.evict, chains[i].blocks[k])
			}
		}
	}
	return t
}

// next makes a batch and gives the keys of the prefix that it stores. The
// payload lives until the next call.
func (t *stream) next() (payload []byte, keys []blockkey.Key) {
	e := &t.stored[t.at]
	t.at = (t.at + 1) % len(t.stored)
	room := max(0, int(t.held)+len(e.blocks)-poolBlocks)
	b := append(t.payload[:0], 0x93, 0xcb)
	b = binary.BigEndian.AppendUint64(b, math.Float64bits(float64(t.batches)))
	b = appendArray(b, room+1)
	for range room {
		block := t.evict[t.oldest]
		t.oldest = (t.oldest + 1) % len(t.evict)
		b = append(b, t.removed[block]...)
		t.digest ^= t.digests[block]
	}
	b = append(b, e.event...)
	t.payload = append(b, 0) // rank
	for _, block := range e.blocks {
		t.digest ^= t.digests[block]
	}
	t.batches++
	t.blocks += uint64(len(e.blocks))
	t.held += uint64(len(e.blocks) - room)
	return t.payload, e.keys
}

// removedEvent is one of vLLM 0.32, which names one hash in each.
func removedEvent(hash uint64) []byte {
	b := append([]byte(nil), 0x84)
	b = appendText(b, "type", "BlockRemoved", "block_hashes")
	b = appendUint(appendArray(b, 1), hash)
	b = appendText(b, "medium", "GPU", "group_idx")
	return appendUint(b, 0)
}

func storedEvent(hashes []uint64, parent uint64, hasParent bool, tokens []uint32) []byte {
	const null = 0xc0
	b := append([]byte(nil), 0x8b)
	b = appendText(b, "type", "BlockStored", "block_hashes")
	b = appendArray(b, len(hashes))
	for _, h := range hashes {
		b = appendUint(b, h)
	}
	b = appendText(b, "parent_block_hash")
	if hasParent {
		b = appendUint(b, parent)
	} else {
		b = append(b, null)
	}
	b = appendArray(appendText(b, "token_ids"), len(tokens))
	for _, t := range tokens {
		b = appendUint(b, uint64(t))
	}
	b = appendUint(appendText(b, "block_size"), blockSize)
	b = append(appendText(b, "lora_id"), null)
	b = appendText(b, "medium", "GPU")
	b = append(appendText(b, "lora_name"), null)
	b = appendArray(appendText(b, "extra_keys"), len(hashes))
	for range hashes {
		b = append(b, null)
	}
	b = appendUint(appendText(b, "group_idx"), 0)
	return appendText(b, "kv_cache_spec_kind", "full_attention")
}

func appendArray(b []byte, n int) []byte {
	if n < 16 {
		return append(b, 0x90|byte(n))
	}
	return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
}

// appendText appends texts of fewer than 32 bytes.
func appendText(b []byte, texts ...string) []byte {
	for _, s := range texts {
		b = append(append(b, 0xa0|byte(len(s))), s...)
	}
	return b
}

// appendUint uses the smallest width, as vLLM does.
func appendUint(b []byte, v uint64) []byte {
	switch {
	case v < 128:
		return append(b, byte(v))
	case v <= math.MaxUint8:
		return append(b, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}
