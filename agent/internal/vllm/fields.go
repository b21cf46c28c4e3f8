package vllm

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/kvscout/kvscout/agent/internal/mirror"
)

// field is what a position or a key of an event holds.
type field uint8

const (
	fieldHashes field = iota
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoRAID
	fieldMedium
	fieldLoRAName
	fieldExtraKeys
	fieldGroup
	fieldKind
	fieldWindow
	fieldLocality
	fieldIgnored // known, and of no use here
	fieldUnknown
)

// form is how an event that is known looks.
type form struct {
	fields  []field // in the order of arrays, after the tag
	lengths []int   // of arrays in the releases, without the tag
	needed  int     // so many of the fields stand in every map
}

var forms = map[string]form{
	"BlockStored": {[]field{
		fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldLoRAID, fieldMedium,
		fieldLoRAName, fieldExtraKeys, fieldGroup, fieldKind, fieldWindow,
	}, []int{5, 6, 7, 8, 9, 11}, 4},
	"BlockRemoved":     {[]field{fieldHashes, fieldMedium, fieldGroup}, []int{1, 2, 3}, 1},
	"AllBlocksCleared": {nil, []int{0}, 0},
}

// extraKeysLength is the length of a stored event that has room for extra keys.
const extraKeysLength = 9

// fieldNames in maps.
var fieldNames = [...]string{
	"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
	"lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
}

func fieldOf(key []byte) field {
	for f, name := range fieldNames {
		if string(key) == name {
			return field(f)
		}
	}
	switch string(key) {
	case "type", "session_id", "ownership":
		return fieldIgnored
	}
	return fieldUnknown
}

// raw holds the fields of one event as they stand on the wire.
type raw struct {
	hashes    []uint64
	parent    uint64
	hasParent bool
	tokens    []uint32
	blockSize int
	loraID    bool // set at all: the number means nothing outside the engine
	loraName  []byte
	medium    medium
	extras    int // where the extra keys begin in the payload; 0: none
	noExtras  bool
	array     bool
	group     int
	hasGroup  bool
	kind      mirror.GroupKind
	window    int
	local     bool
	remote    bool
	has       uint16 // bits by field that a map names
}

func (d *Decoder) read(r *raw, f field) (err error) {
	switch f {
	case fieldHashes:
		r.hashes, err = d.hashList()
	case fieldParent:
		if d.c.isNil() {
			return nil
		}
		bin := d.c.i < len(d.c.b) && isBin(d.c.b[d.c.i])
		r.parent, err = d.hash()
		// Simulators write 0 for a chain's first block.
		r.hasParent = bin || r.parent != 0
	case fieldTokens:
		r.tokens, err = d.tokenList()
	case fieldBlockSize:
		r.blockSize, err = d.small("block size", maxBlockSize)
	case fieldLoRAID:
		if d.c.isNil() {
			return nil
		}
		r.loraID = true
		err = d.c.skip(1)
	case fieldMedium:
		if d.c.isNil() {
			return nil
		}
		var name []byte
		name, err = d.c.bytes()
		r.medium = mediumOf(name)
	case fieldLoRAName:
		if d.c.isNil() {
			return nil
		}
		if code, err := d.c.peek(); err != nil || !isText(code) {
			// Other engines have something else here: a scope we cannot name.
			r.loraID = true
			return d.c.skip(1)
		}
		r.loraName, err = d.c.bytes()
	case fieldExtraKeys:
		if d.c.isNil() {
			return nil
		}
		r.extras = d.c.i
		err = d.c.skip(1)
	case fieldGroup:
		if d.c.isNil() {
			return nil
		}
		r.hasGroup = true
		r.group, err = d.small("group", maxGroup)
	case fieldKind:
		if d.c.isNil() {
			return nil
		}
		var name []byte
		name, err = d.c.bytes()
		r.kind = kindOf(name)
	case fieldWindow:
		if d.c.isNil() {
			return nil
		}
		r.window, err = d.small("window", 1<<30)
	case fieldLocality:
		if d.c.isNil() {
			return nil
		}
		var name []byte
		name, err = d.c.bytes()
		r.local = bytes.EqualFold(name, []byte("LOCAL"))
		r.remote = !r.local
	}
	return err
}

func (d *Decoder) small(what string, most uint64) (int, error) {
	if d.c.isNil() {
		return 0, nil
	}
	v, negative, err := d.c.integer()
	if err != nil {
		return 0, err
	}
	if negative || v > most {
		return 0, fmt.Errorf("%s of %d", what, int64(v))
	}
	return int(v), nil
}

// kindOf knows the kinds whose hits have a known rule; the set is open.
func kindOf(name []byte) mirror.GroupKind {
	switch string(name) {
	case "full_attention", "mla", "mla_attention", "sink_full", "sink_full_attention":
		return mirror.Full
	}
	switch {
	case bytes.HasPrefix(name, []byte("sliding_window")):
		return mirror.Sliding
	case bytes.Equal(name, []byte("mamba")):
		return mirror.State
	case bytes.HasPrefix(name, []byte("chunked_local")):
		return mirror.Chunked
	}
	return mirror.Other
}

// hash reads an int of any width and sign, or the last 8 bytes of a digest:
// the same 64 bits in both forms.
func (d *Decoder) hash() (uint64, error) {
	code, err := d.c.peek()
	if err != nil {
		return 0, err
	}
	if !isBin(code) {
		v, _, err := d.c.integer()
		return v, err
	}
	b, err := d.c.bytes()
	if err != nil {
		return 0, err
	}
	if len(b) == 0 {
		return 0, errors.New("empty block hash")
	}
	var v uint64
	for _, x := range b[max(0, len(b)-8):] {
		v = v<<8 | uint64(x)
	}
	return v, nil
}

func (d *Decoder) hashList() ([]uint64, error) {
	if d.c.isNil() {
		return nil, nil
	}
	n, err := d.c.array()
	if err != nil {
		return nil, err
	}
	at := len(d.hashes)
	for range n {
		v, err := d.hash()
		if err != nil {
			return nil, err
		}
		d.hashes = append(d.hashes, v)
	}
	return d.hashes[at:len(d.hashes):len(d.hashes)], nil
}

func (d *Decoder) tokenList() ([]uint32, error) {
	if d.c.isNil() {
		return nil, nil
	}
	n, err := d.c.array()
	if err != nil {
		return nil, err
	}
	at := len(d.tokens)
	d.tokens = slices.Grow(d.tokens, n)[:at+n]
	tokens := d.tokens[at : at+n : at+n]
	b, i := d.c.b, d.c.i
	for k := range tokens {
		// The widths that nearly all token ids have.
		if i+2 < len(b) && b[i] == 0xcd {
			tokens[k] = uint32(b[i+1])<<8 | uint32(b[i+2])
			i += 3
			continue
		}
		if i < len(b) && b[i] < 0x80 {
			tokens[k] = uint32(b[i])
			i++
			continue
		}
		d.c.i = i
		v, negative, err := d.c.integer()
		if err != nil {
			return nil, err
		}
		if negative || v>>32 != 0 {
			return nil, fmt.Errorf("token id of %d", int64(v))
		}
		tokens[k] = uint32(v)
		i = d.c.i
	}
	d.c.i = i
	return tokens, nil
}
