// Package blockhash recomputes the hashes that vLLM gives its KV-cache blocks,
// by which blocks are named that an event leaves out.
//
//	hash[i] = H(serialize(hash[i-1], tokens of block i, extra keys of block i))
//	hash[-1] = H(serialize(seed))
//
// What an engine sends for a hash are its last eight bytes. testdata/vectors.json
// holds hashes of vLLM's form, their inputs beside them.
package blockhash

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/zeebo/xxh3"
)

// DefaultSeed is the one of engines since 0.29 that were given none.
const DefaultSeed = "vllm-none-hash"

// Algorithms are the values of --prefix-caching-hash-algo that are known.
var Algorithms = []string{"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}

// Digest is a whole hash. Those of 16 bytes end with zeros.
type Digest [sha256.Size]byte

// Hasher computes hashes of one algorithm and seed. It belongs to one
// goroutine.
type Hasher struct {
	cbor   bool
	xxh    bool
	tagged bool
	root   Digest
	buf    []byte
}

// Item is a multimodal item as one block sees it.
type Item struct {
	ID     string
	Offset int // relative to the block's first token
}

// Extras is what the hash of a block covers apart from tokens.
type Extras struct {
	Adapter string
	// Root is where the adapter was loaded from. It counts where keys are tagged.
	Root  string
	Items []Item
	Salt  string
}

// New returns a Hasher. The seed is the text of PYTHONHASHSEED in the engine's
// environment. Since 0.31 extra keys are tagged with what they are.
func New(algorithm, seed string, tagged bool) (*Hasher, error) {
	h := &Hasher{tagged: tagged}
	switch algorithm {
	case "sha256":
	case "sha256_cbor":
		h.cbor = true
	case "xxhash":
		h.xxh = true
	case "xxhash_cbor":
		h.xxh, h.cbor = true, true
	default:
		return nil, fmt.Errorf("hash algorithm %q is not known", algorithm)
	}
	if h.cbor {
		h.root = h.sum(cborText(nil, seed))
	} else {
		h.root = h.sum(frame(pickleText(opened(nil), seed)))
	}
	return h, nil
}

// Root is the hash before the first block.
func (h *Hasher) Root() Digest { return h.root }

// Short is what the engine sends for a hash.
func (h *Hasher) Short(d *Digest) uint64 {
	return binary.BigEndian.Uint64(d[h.size()-8:])
}

func (h *Hasher) size() int {
	if h.xxh {
		return 16
	}
	return sha256.Size
}

// Next is the hash of a block. It is false for blocks whose serial form is not
// that of a short one.
func (h *Hasher) Next(parent *Digest, tokens []uint32, x *Extras) (Digest, bool) {
	if h.cbor {
		h.buf = h.appendCBOR(h.buf[:0], parent, tokens, x)
	} else {
		h.buf = h.appendPickle(h.buf[:0], parent, tokens, x)
		if len(h.buf)-frameHead > maxFrame {
			return Digest{}, false
		}
		frame(h.buf)
	}
	return h.sum(h.buf), true
}

func (h *Hasher) sum(data []byte) (d Digest) {
	if h.xxh {
		sum := xxh3.Hash128(data).Bytes()
		copy(d[:], sum[:])
		return d
	}
	return sha256.Sum256(data)
}

// keys is the number of extra keys.
func (x *Extras) keys() int {
	n := len(x.Items)
	if x.Adapter != "" {
		n++
	}
	if x.Salt != "" {
		n++
	}
	return n
}
