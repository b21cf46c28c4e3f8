package intake

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
)

// The functions here walk JSON that encoding/json has found valid. They build
// no tree: a body of 16 MiB may hold millions of values, and of most of them
// nothing is wanted.

// span is a value's place in a document.
type span struct{ from, to int }

func (s span) of(doc []byte) []byte { return doc[s.from:s.to] }

// members calls f for each member of the object that doc is. It reports false
// when doc is no object.
func members(doc []byte, f func(name string, value span)) bool {
	i := space(doc, 0)
	if i >= len(doc) || doc[i] != '{' {
		return false
	}
	for i = space(doc, i+1); doc[i] != '}'; {
		from := i
		i = skip(doc, i)
		name := text(doc[from:i])
		i = space(doc, space(doc, i)+1) // past the colon
		value := span{from: i, to: skip(doc, i)}
		f(name, value)
		if i = space(doc, value.to); doc[i] == ',' {
			i = space(doc, i+1)
		}
	}
	return true
}

// elements calls f for each element of the array that doc is, until f returns
// false. A doc that is no array has none.
func elements(doc []byte, f func(value span) bool) {
	i := space(doc, 0)
	if i >= len(doc) || doc[i] != '[' {
		return
	}
	for i = space(doc, i+1); doc[i] != ']'; {
		value := span{from: i, to: skip(doc, i)}
		if !f(value) {
			return
		}
		if i = space(doc, value.to); doc[i] == ',' {
			i = space(doc, i+1)
		}
	}
}

// skip returns where the value that starts at i ends.
func skip(doc []byte, i int) int {
	switch doc[i] {
	case '"':
		return skipString(doc, i)
	case '{', '[':
		for depth := 0; ; {
			switch doc[i] {
			case '"':
				i = skipString(doc, i)
				continue
			case '{', '[':
				depth++
			case '}', ']':
				depth--
				if depth == 0 {
					return i + 1
				}
			}
			i++
		}
	}
	for i < len(doc) {
		switch doc[i] {
		case ',', ']', '}', ' ', '\t', '\n', '\r':
			return i
		}
		i++
	}
	return i
}

func skipString(doc []byte, i int) int {
	for i++; doc[i] != '"'; i++ {
		if doc[i] == '\\' {
			i++
		}
	}
	return i + 1
}

func space(doc []byte, i int) int {
	for i < len(doc) && (doc[i] == ' ' || doc[i] == '\t' || doc[i] == '\n' || doc[i] == '\r') {
		i++
	}
	return i
}

// text returns the string that value is, or "".
func text(value []byte) string {
	var s string
	if json.Unmarshal(value, &s) != nil {
		return ""
	}
	return s
}

func isNull(value []byte) bool { return len(value) == 0 || string(value) == "null" }

// first returns the first byte of a value, 0 when there is none.
func first(value []byte) byte {
	if i := space(value, 0); i < len(value) {
		return value[i]
	}
	return 0
}

var errIDs = errors.New("not a list of token ids")

// tokenIDs returns a list of token ids as little-endian uint32.
func tokenIDs(value []byte) ([]byte, error) {
	i := space(value, 0)
	if i >= len(value) || value[i] != '[' {
		return nil, errIDs
	}
	// Most ids have four to six characters with their comma.
	le := make([]byte, 0, 4+len(value)*4/5)
	for i = space(value, i+1); value[i] != ']'; {
		id, digits := uint64(0), 0
		for ; value[i] >= '0' && value[i] <= '9' && id <= math.MaxUint32; i++ {
			id, digits = id*10+uint64(value[i]-'0'), digits+1
		}
		if digits == 0 || id > math.MaxUint32 {
			return nil, errIDs
		}
		le = binary.LittleEndian.AppendUint32(le, uint32(id))
		switch i = space(value, i); value[i] {
		case ',':
			i = space(value, i+1)
		case ']':
		default:
			return nil, errIDs
		}
	}
	return le, nil
}
