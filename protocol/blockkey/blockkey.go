// Package blockkey turns token ids into chained 64-bit block keys, the only
// names of cached content that agents, schedulers and callers exchange.
//
// A key names one whole prefix: equal keys mean equal model identity, adapter,
// cache salt, block size, tokens and multimodal items from the first token to
// the end of the block. Only whole blocks have keys.
//
//	root   = XXH64(scheme, block size, model, adapter, salt; see Scope.Root)
//	local  = XXH64(token ids as little-endian uint32), then folded with the
//	         block's multimodal items
//	key[0] = chain(root, local[0]);  key[i] = chain(key[i-1], local[i])
//
// Blocks are hashed on their own and chained afterwards, so a processor can
// overlap them. testdata/vectors.json holds vectors for other languages.
package blockkey

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/cespare/xxhash/v2"
)

// Scheme is the version of the key scheme; it is part of every root.
const Scheme = 1

// Key is the chained key of a block. Zero is never a key.
type Key uint64

// Keys are numbers from a wire as keys: the same memory, which nobody may change
// from then on.
func Keys(numbers []uint64) []Key {
	return unsafe.Slice((*Key)(unsafe.SliceData(numbers)), len(numbers))
}

// Lead is how many keys are named with a block to say what it follows: those
// before it, its parent last, fewer only where its chain begins. An index that
// has an entry for one key in Lead finds the parent by them.
const Lead = 16

// Before returns the keys that lead to position i of a chain.
func Before(chain []Key, i int) []Key { return chain[max(0, i-Lead):i:i] }

// BeforeNext returns the keys that lead to the position behind keys, which
// before leads to.
func BeforeNext(before, keys []Key) []Key {
	if len(keys) < Lead {
		keys = append(before[:len(before):len(before)], keys...)
	}
	return Before(keys, len(keys))
}

// Scope says within which cache content tokens are compared. Keys of different
// scopes never meet.
type Scope struct {
	Model     string // identity of the model: the first served name
	Adapter   string // LoRA adapter's name, empty for the base model
	Salt      string // cache salt of the request, empty for none
	BlockSize int    // tokens a block
}

// Item is a multimodal item at its place in a prompt.
type Item struct {
	ID     string // the engine's identifier of the content
	Offset int    // first placeholder token
	Length int    // placeholder tokens
}

// Ref is an item as one block sees it.
type Ref struct {
	ID     string
	Offset int // relative to the block's first token; negative when the item began earlier
}

const (
	mulA = 0x9E3779B97F4A7C15
	mulB = 0xD6E8FEB86659FD93
)

// Root returns the key before the first block of every chain in the scope.
func (s Scope) Root() Key {
	buf := make([]byte, 0, 64+len(s.Model)+len(s.Adapter)+len(s.Salt))
	buf = append(buf, "kvscout"...)
	buf = append(buf, Scheme)
	buf = binary.LittleEndian.AppendUint32(buf, uint32(s.BlockSize))
	for _, text := range [...]string{s.Model, s.Adapter, s.Salt} {
		buf = binary.LittleEndian.AppendUint32(buf, uint32(len(text)))
		buf = append(buf, text...)
	}
	return nonzero(xxhash.Sum64(buf))
}

// Local hashes one block on its own, without what came before it.
func Local(tokens []uint32, refs []Ref) uint64 {
	if littleEndian {
		return fold(xxhash.Sum64(view(tokens)), refs)
	}
	return fold(xxhash.Sum64(encode(nil, tokens)), refs)
}

// Chain returns the key of a block with the given local hash under its parent,
// which is the key of the block before or the scope's root.
func Chain(parent Key, local uint64) Key {
	// Both sides are mixed already: one multiplication keeps the order of the
	// blocks, the shift breaks the sum's linearity.
	x := uint64(parent)*mulA + local
	return nonzero(x ^ x>>32)
}

// Digest spreads a key over all bits. The XOR of the digests of a set is the
// set's digest: free of order, and cheap to keep while the set changes.
func Digest(k Key) uint64 {
	return mix(uint64(k) + mulA)
}

// AppendTokens appends the keys of all whole blocks of tokens to dst. It
// allocates nothing when dst has room. The items are sorted by offset. A
// blockSize below 1 has no whole block.
func AppendTokens(dst []Key, root Key, tokens []uint32, blockSize int, items []Item) []Key {
	if littleEndian {
		return appendKeys(dst, root, view(tokens), blockSize, items)
	}
	return appendKeys(dst, root, encode(nil, tokens), blockSize, items)
}

// ErrRagged reports token bytes that do not end on a token.
var ErrRagged = errors.New("token bytes are not a multiple of 4")

// AppendBytes is AppendTokens for token ids as little-endian uint32.
func AppendBytes(dst []Key, root Key, tokens []byte, blockSize int, items []Item) ([]Key, error) {
	if len(tokens)%4 != 0 {
		return dst, fmt.Errorf("%d bytes: %w", len(tokens), ErrRagged)
	}
	return appendKeys(dst, root, tokens, blockSize, items), nil
}

func appendKeys(dst []Key, key Key, tokens []byte, blockSize int, items []Item) []Key {
	if blockSize < 1 {
		return dst
	}
	width := 4 * blockSize
	if len(items) == 0 {
		// Four blocks are hashed before they are chained: their hashes do not
		// wait for each other.
		for ; len(tokens) >= 4*width; tokens = tokens[4*width:] {
			a := xxhash.Sum64(tokens[:width])
			b := xxhash.Sum64(tokens[width : 2*width])
			c := xxhash.Sum64(tokens[2*width : 3*width])
			d := xxhash.Sum64(tokens[3*width : 4*width])
			ka := Chain(key, a)
			kb := Chain(ka, b)
			kc := Chain(kb, c)
			key = Chain(kc, d)
			dst = append(dst, ka, kb, kc, key)
		}
		for ; len(tokens) >= width; tokens = tokens[width:] {
			key = Chain(key, xxhash.Sum64(tokens[:width]))
			dst = append(dst, key)
		}
		return dst
	}
	for start := 0; len(tokens) >= width; start, tokens = start+blockSize, tokens[width:] {
		for len(items) > 0 && items[0].Offset+items[0].Length <= start {
			items = items[1:]
		}
		local := xxhash.Sum64(tokens[:width])
		for _, item := range items {
			if item.Offset >= start+blockSize {
				break
			}
			if item.Offset+item.Length > start {
				local = foldOne(local, item.ID, item.Offset-start)
			}
		}
		key = Chain(key, local)
		dst = append(dst, key)
	}
	return dst
}

func fold(local uint64, refs []Ref) uint64 {
	for _, ref := range refs {
		local = foldOne(local, ref.ID, ref.Offset)
	}
	return local
}

func foldOne(local uint64, id string, offset int) uint64 {
	return mix(mix(local*mulA+xxhash.Sum64String(id)) + uint64(int64(offset)))
}

// mix is a bijection in which every bit of the input reaches every bit of the
// output.
func mix(x uint64) uint64 {
	x ^= x >> 32
	x *= mulB
	x ^= x >> 32
	x *= mulB
	return x ^ x>>32
}

func nonzero(x uint64) Key {
	if x == 0 {
		return 1
	}
	return Key(x)
}

var littleEndian = func() bool {
	probe := uint16(1)
	return *(*byte)(unsafe.Pointer(&probe)) == 1
}()

// view gives the tokens as bytes without a copy; right on little-endian
// machines only.
func view(tokens []uint32) []byte {
	if len(tokens) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&tokens[0])), 4*len(tokens))
}

func encode(dst []byte, tokens []uint32) []byte {
	for _, t := range tokens {
		dst = binary.LittleEndian.AppendUint32(dst, t)
	}
	return dst
}
