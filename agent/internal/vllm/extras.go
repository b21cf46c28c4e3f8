package vllm

import (
	"bytes"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// extras is what the extra keys of an event say about its blocks.
type extras struct {
	salt string
	refs [][]blockkey.Ref // aligned with the hashes, nil when no block has any
	// clean counts the leading blocks whose hash covers nothing that the event
	// does not show. The blocks behind cannot be keyed.
	clean int
}

// extraKeys reads the list that stands at r.extras: for each of n blocks nil
// or the extra parts of its hash, untagged and in the order of hashing:
// adapter name, multimodal [identifier, offset] pairs, salt (only in a block
// that starts at token 0), digest of prompt embeddings. A bare text elsewhere
// is an image identifier of 0.17 to 0.18, whose offset is not known.
func (d *Decoder) extraKeys(r *raw, n int) (extras, error) {
	c := cursor{b: d.c.b, i: r.extras}
	m, err := c.array()
	if err != nil {
		return extras{}, err
	}
	if m == 0 {
		return extras{clean: n}, nil
	}
	if m != n {
		return extras{}, nil
	}
	x := extras{clean: n}
	for i := range n {
		if c.isNil() {
			continue
		}
		code, err := c.peek()
		if err != nil {
			return extras{}, err
		}
		if !isArray(code) {
			x.clean = i
			return x, nil
		}
		parts, err := c.array()
		if err != nil {
			return extras{}, err
		}
		for j := range parts {
			clear, err := x.part(&c, r, i, j, n)
			if err != nil {
				return extras{}, err
			}
			if !clear {
				x.clean = i
				return x, nil
			}
		}
	}
	return x, nil
}

// part reads part j of block i and says whether its meaning is clear.
func (x *extras) part(c *cursor, r *raw, i, j, n int) (bool, error) {
	code, err := c.peek()
	if err != nil {
		return false, err
	}
	switch {
	case isText(code):
		text, err := c.bytes()
		if err != nil {
			return false, err
		}
		if j == 0 && len(r.loraName) > 0 && bytes.Equal(text, r.loraName) {
			return true, nil
		}
		if i == 0 && !r.hasParent && x.salt == "" && len(text) > 0 {
			x.salt = string(text)
			return true, nil
		}
		return false, nil
	case isArray(code):
		two, err := c.array()
		if err != nil || two != 2 {
			return false, err
		}
		if code, err := c.peek(); err != nil || !isText(code) {
			return false, err
		}
		id, err := c.bytes()
		if err != nil {
			return false, err
		}
		if code, err := c.peek(); err != nil || !isInteger(code) {
			return false, err
		}
		offset, negative, err := c.integer()
		if err != nil {
			return false, err
		}
		v := int64(offset)
		if negative != (v < 0) || v < -maxOffset || v > maxOffset {
			return false, nil
		}
		if x.refs == nil {
			x.refs = make([][]blockkey.Ref, n)
		}
		x.refs[i] = append(x.refs[i], blockkey.Ref{ID: string(id), Offset: int(v)})
		return true, nil
	}
	return false, nil
}

// maxOffset bounds the distance of an item from its block's start.
const maxOffset = 1 << 40

func isInteger(code byte) bool {
	return code < 0x80 || code >= 0xe0 || code >= 0xcc && code <= 0xd3
}
