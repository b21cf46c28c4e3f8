package vllm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// maxList bounds every list of a batch.
const maxList = 1_000_000

var (
	errShort = errors.New("payload ends inside a value")
	errList  = fmt.Errorf("list of more than %d elements", maxList)
)

// Codes of msgpack that are matched by name.
const (
	codeNil   = 0xc0
	codeFalse = 0xc2
	codeTrue  = 0xc3
)

// cursor reads msgpack from a payload that is in memory; docs/decisions/0005 says
// why it is our own. It never allocates by a length that the payload claims: a
// list has at most as many elements as bytes are left. Skip is a loop, so nesting
// costs no stack.
type cursor struct {
	b []byte
	i int
}

func (c *cursor) peek() (byte, error) {
	if c.i >= len(c.b) {
		return 0, errShort
	}
	return c.b[c.i], nil
}

func (c *cursor) left() int { return len(c.b) - c.i }

// uint reads n big-endian bytes, n being 1, 2, 4 or 8.
func (c *cursor) uint(n int) (uint64, error) {
	if c.left() < n {
		return 0, errShort
	}
	b := c.b[c.i:]
	c.i += n
	switch n {
	case 1:
		return uint64(b[0]), nil
	case 2:
		return uint64(binary.BigEndian.Uint16(b)), nil
	case 4:
		return uint64(binary.BigEndian.Uint32(b)), nil
	}
	return binary.BigEndian.Uint64(b), nil
}

// isNil consumes a nil if one is next.
func (c *cursor) isNil() bool {
	if c.i < len(c.b) && c.b[c.i] == codeNil {
		c.i++
		return true
	}
	return false
}

// array reads the head of an array.
func (c *cursor) array() (int, error) {
	code, err := c.peek()
	if err != nil {
		return 0, err
	}
	c.i++
	var n uint64
	switch {
	case code&0xf0 == 0x90:
		n = uint64(code & 0x0f)
	case code == 0xdc:
		n, err = c.uint(2)
	case code == 0xdd:
		n, err = c.uint(4)
	default:
		return 0, fmt.Errorf("code %#x where an array is due", code)
	}
	return c.bounded(n, 1, err)
}

// mapping reads the head of a map: the number of its pairs.
func (c *cursor) mapping() (int, error) {
	code, err := c.peek()
	if err != nil {
		return 0, err
	}
	c.i++
	var n uint64
	switch {
	case code&0xf0 == 0x80:
		n = uint64(code & 0x0f)
	case code == 0xde:
		n, err = c.uint(2)
	case code == 0xdf:
		n, err = c.uint(4)
	default:
		return 0, fmt.Errorf("code %#x where a map is due", code)
	}
	return c.bounded(n, 2, err)
}

func (c *cursor) bounded(n uint64, each int, err error) (int, error) {
	switch {
	case err != nil:
		return 0, err
	case n > maxList:
		return 0, errList
	case n*uint64(each) > uint64(c.left()):
		return 0, errShort
	}
	return int(n), nil
}

func isArray(code byte) bool { return code&0xf0 == 0x90 || code == 0xdc || code == 0xdd }

func isMap(code byte) bool { return code&0xf0 == 0x80 || code == 0xde || code == 0xdf }

func isText(code byte) bool { return code&0xe0 == 0xa0 || code >= 0xd9 && code <= 0xdb }

func isBin(code byte) bool { return code >= 0xc4 && code <= 0xc6 }

// bytes reads a text or a bin; the result is part of the payload.
func (c *cursor) bytes() ([]byte, error) {
	code, err := c.peek()
	if err != nil {
		return nil, err
	}
	c.i++
	var n uint64
	switch {
	case code&0xe0 == 0xa0:
		n = uint64(code & 0x1f)
	case code == 0xc4 || code == 0xd9:
		n, err = c.uint(1)
	case code == 0xc5 || code == 0xda:
		n, err = c.uint(2)
	case code == 0xc6 || code == 0xdb:
		n, err = c.uint(4)
	default:
		return nil, fmt.Errorf("code %#x where text is due", code)
	}
	if err != nil {
		return nil, err
	}
	if n > uint64(c.left()) {
		return nil, errShort
	}
	b := c.b[c.i : c.i+int(n)]
	c.i += int(n)
	return b, nil
}

// integer reads an int of any width. Negative ones come as two's complement.
func (c *cursor) integer() (v uint64, negative bool, err error) {
	code, err := c.peek()
	if err != nil {
		return 0, false, err
	}
	c.i++
	switch {
	case code < 0x80:
		return uint64(code), false, nil
	case code >= 0xe0:
		return uint64(int64(int8(code))), true, nil
	case code >= 0xcc && code <= 0xcf:
		v, err = c.uint(1 << (code - 0xcc))
		return v, false, err
	case code >= 0xd0 && code <= 0xd3:
		width := 1 << (code - 0xd0)
		v, err = c.uint(width)
		shift := 64 - 8*width
		s := int64(v<<shift) >> shift
		return uint64(s), s < 0, err
	}
	return 0, false, fmt.Errorf("code %#x where an integer is due", code)
}

// number reads an int or a float.
func (c *cursor) number() (float64, error) {
	code, err := c.peek()
	if err != nil {
		return 0, err
	}
	switch code {
	case 0xca:
		c.i++
		v, err := c.uint(4)
		return float64(math.Float32frombits(uint32(v))), err
	case 0xcb:
		c.i++
		v, err := c.uint(8)
		return math.Float64frombits(v), err
	}
	v, negative, err := c.integer()
	if negative {
		return float64(int64(v)), err
	}
	return float64(v), err
}

// skip passes over n values.
func (c *cursor) skip(n int) error {
	for n > 0 {
		// Every value has at least one byte.
		if n > c.left() {
			return errShort
		}
		n--
		code := c.b[c.i]
		c.i++
		size := 0
		var err error
		switch {
		case code < 0x80 || code >= 0xe0 || code == codeNil || code == codeFalse || code == codeTrue:
		case isArray(code):
			c.i--
			var more int
			more, err = c.array()
			n += more
		case isMap(code):
			c.i--
			var more int
			more, err = c.mapping()
			n += 2 * more
		case isText(code) || isBin(code):
			c.i--
			_, err = c.bytes()
		case code >= 0xc7 && code <= 0xc9: // ext: length, kind, data
			var v uint64
			v, err = c.uint(1 << (code - 0xc7))
			size = int(v) + 1
		case code == 0xca:
			size = 4
		case code == 0xcb:
			size = 8
		case code >= 0xcc && code <= 0xcf:
			size = 1 << (code - 0xcc)
		case code >= 0xd0 && code <= 0xd3:
			size = 1 << (code - 0xd0)
		case code >= 0xd4 && code <= 0xd8: // fixext: kind, data
			size = 1<<(code-0xd4) + 1
		default:
			return fmt.Errorf("code %#x is no msgpack", code)
		}
		if err != nil {
			return err
		}
		if size > c.left() {
			return errShort
		}
		c.i += size
	}
	return nil
}
