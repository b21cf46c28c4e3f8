package fakevllm

import (
	"encoding/binary"
	"math"
)

// Era is a shape of the KV events on the wire.
type Era int

const (
	// Maps: events are msgpack maps that leave defaults out (vLLM 0.24 and later).
	Maps Era = iota
	// Arrays: events are positional arrays of full length (vLLM 0.22 and 0.23).
	Arrays
)

const medium = "GPU"

// stored is a BlockStored: consecutive full blocks of one sequence, by the
// tokens of all and the hashes of those that a group keeps.
type stored struct {
	group     int
	spec      Group
	first     bool // the first hash is that of the sequence's first block
	hashes    []uint64
	parent    uint64
	hasParent bool
	tokens    []uint32
	blockSize int
	adapter   string
	adapterID int
	salt      string // of the chain; on the wire only with its first block
}

// batch collects the events of one step in the engine's order. The zero batch
// is empty and speaks in maps.
type batch struct {
	era    Era
	count  int
	events []byte
}

// take returns the encoded batch and empties it; nil if nothing happened.
func (b *batch) take(ts float64, rank int) []byte {
	if b.count == 0 {
		return nil
	}
	out := make([]byte, 0, len(b.events)+16)
	out = append(out, 0x93, 0xcb)
	out = binary.BigEndian.AppendUint64(out, math.Float64bits(ts))
	out = appendArray(out, b.count)
	out = append(out, b.events...)
	out = appendUint(out, uint64(rank))
	b.count, b.events = 0, b.events[:0]
	return out
}

func (b *batch) cleared() {
	b.count++
	if b.era == Arrays {
		b.events = appendArray(b.events, 1)
	} else {
		b.events = appendMap(b.events, 1)
		b.events = appendString(b.events, "type")
	}
	b.events = appendString(b.events, "AllBlocksCleared")
}

func (b *batch) removed(n name) {
	b.count++
	e := b.begin("BlockRemoved", 4, 4)
	e = b.key(e, "block_hashes")
	e = appendUint(appendArray(e, 1), n.hash)
	e = b.key(e, "medium")
	e = appendString(e, medium)
	e = b.key(e, "group_idx")
	b.events = appendUint(e, uint64(n.group))
}

func (b *batch) stored(s stored) {
	b.count++
	fields := 11
	if s.spec.Kind == Sliding {
		fields++
	}
	e := b.begin("BlockStored", fields, 12)
	e = b.key(e, "block_hashes")
	e = appendArray(e, len(s.hashes))
	for _, h := range s.hashes {
		e = appendUint(e, h)
	}
	e = b.key(e, "parent_block_hash")
	if s.hasParent {
		e = appendUint(e, s.parent)
	} else {
		e = appendNil(e)
	}
	e = b.key(e, "token_ids")
	e = appendArray(e, len(s.tokens))
	for _, t := range s.tokens {
		e = appendUint(e, uint64(t))
	}
	e = b.key(e, "block_size")
	e = appendUint(e, uint64(s.blockSize))
	e = b.key(e, "lora_id")
	if s.adapter != "" {
		e = appendUint(e, uint64(s.adapterID))
	} else {
		e = appendNil(e)
	}
	e = b.key(e, "medium")
	e = appendString(e, medium)
	e = b.key(e, "lora_name")
	if s.adapter != "" {
		e = appendString(e, s.adapter)
	} else {
		e = appendNil(e)
	}
	e = b.key(e, "extra_keys")
	e = appendArray(e, len(s.hashes))
	for i := range s.hashes {
		e = s.appendExtra(e, i)
	}
	e = b.key(e, "group_idx")
	e = appendUint(e, uint64(s.group))
	e = b.key(e, "kv_cache_spec_kind")
	e = appendString(e, s.spec.spec())
	switch {
	case s.spec.Kind == Sliding:
		e = b.key(e, "kv_cache_spec_sliding_window")
		e = appendUint(e, uint64(s.spec.Span))
	case b.era == Arrays:
		e = appendNil(e)
	}
	b.events = e
}

func (s *stored) appendExtra(e []byte, i int) []byte {
	salted := s.salt != "" && i == 0 && s.first
	n := 0
	if s.adapter != "" {
		n++
	}
	if salted {
		n++
	}
	if n == 0 {
		return appendNil(e)
	}
	e = appendArray(e, n)
	if s.adapter != "" {
		e = appendString(e, s.adapter)
	}
	if salted {
		e = appendString(e, s.salt)
	}
	return e
}

// begin opens an event of so many map fields or array elements, tag included.
func (b *batch) begin(tag string, fields, elements int) []byte {
	if b.era == Arrays {
		return appendString(appendArray(b.events, elements), tag)
	}
	return appendString(appendString(appendMap(b.events, fields), "type"), tag)
}

func (b *batch) key(e []byte, name string) []byte {
	if b.era == Arrays {
		return e
	}
	return appendString(e, name)
}

func appendNil(b []byte) []byte { return append(b, 0xc0) }

func appendArray(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x90|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n))
	}
}

// appendMap opens a map of fewer than 16 pairs.
func appendMap(b []byte, n int) []byte { return append(b, 0x80|byte(n)) }

func appendString(b []byte, s string) []byte {
	switch n := len(s); {
	case n < 32:
		b = append(b, 0xa0|byte(n))
	case n <= math.MaxUint8:
		b = append(b, 0xd9, byte(n))
	case n <= math.MaxUint16:
		b = binary.BigEndian.AppendUint16(append(b, 0xda), uint16(n))
	default:
		b = binary.BigEndian.AppendUint32(append(b, 0xdb), uint32(n))
	}
	return append(b, s...)
}

// appendUint uses the smallest width, as msgspec does.
func appendUint(b []byte, v uint64) []byte {
	switch {
	case v < 128:
		return append(b, byte(v))
	case v <= math.MaxUint8:
		return append(b, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return append(b, 0xcd, byte(v>>8), byte(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	default:
		return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
	}
}
