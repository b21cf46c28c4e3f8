package completion

import "bytes"

// object finds members of a JSON object that comes in pieces. It does not check
// the object: of what is no JSON it finds little, or nonsense that nobody can
// read.
type object struct {
	// keep says how many bytes of a member's value are wanted, found is told the
	// value, or its beginning if it is longer. Neither may keep the slices.
	keep  func(name []byte) int
	found func(name, value []byte, whole bool)

	depth           int // of brackets; 0: the object has not begun
	part            part
	quoted, escaped bool
	over            bool
	name, value     []byte
	room            int // what may still be kept of the value
	cut             bool
}

// part of a member that is read, of the object itself.
type part uint8

const (
	beforeName part = iota
	inName
	afterName
	inValue
)

// maxName bytes of a member's name: no name that is wanted is longer.
const maxName = 32

func (o *object) reset() {
	*o = object{keep: o.keep, found: o.found, name: o.name[:0], value: o.value[:0]}
}

func (o *object) take(piece []byte) {
	for len(piece) > 0 {
		if n := o.skipped(piece); n > 0 {
			o.cut = true
			piece = piece[n:]
			continue
		}
		o.byte(piece[0])
		piece = piece[1:]
	}
}

// skipped is how many bytes at the beginning change nothing: outside the object,
// and inside a value of which no more is kept.
func (o *object) skipped(piece []byte) int {
	stops := `"[]{}`
	switch {
	case o.over:
		return len(piece)
	case o.depth == 0:
		stops = "{"
	case o.part != inValue || o.room > 0 || o.escaped:
		return 0
	case o.quoted:
		stops = `"\\`
	case o.depth == 1:
		return 0
	}
	if n := bytes.IndexAny(piece, stops); n >= 0 {
		return n
	}
	return len(piece)
}

func (o *object) byte(c byte) {
	switch {
	case o.over:
	case o.depth == 0:
		if c == '{' {
			o.depth = 1
		}
	case o.quoted:
		o.inString(c)
	default:
		o.plain(c)
	}
}

func (o *object) inString(c byte) {
	switch {
	case o.escaped:
		o.escaped = false
	case c == '\\':
		o.escaped = true
	case c == '"':
		o.quoted = false
		if o.part == inName {
			o.part = afterName
			return
		}
	}
	if o.part == inName {
		if len(o.name) < maxName {
			o.name = append(o.name, c)
		}
		return
	}
	o.put(c)
}

func (o *object) plain(c byte) {
	switch c {
	case ' ', '\t', '\r', '\n':
		return
	case '"':
		o.quoted = true
		if o.part == beforeName {
			o.part, o.name = inName, o.name[:0]
			return
		}
	case ':':
		if o.depth == 1 && o.part == afterName {
			o.part, o.value, o.cut, o.room = inValue, o.value[:0], false, o.keep(o.name)
			return
		}
	case ',':
		if o.depth == 1 {
			o.end()
			return
		}
	case '{', '[':
		o.depth++
	case '}', ']':
		if o.depth--; o.depth == 0 {
			o.end()
			o.over = true
			return
		}
	}
	o.put(c)
}

// begins tells whether the next byte may begin an object that is the value of that
// member.
func (o *object) begins(name string) bool { return o.depth == 1 && !o.quoted && o.inside(name) }

// inside tells whether the value of that member is read.
func (o *object) inside(name string) bool { return o.part == inValue && string(o.name) == name }

// put keeps a byte of the value, if it is wanted and has room.
func (o *object) put(c byte) {
	switch {
	case o.part != inValue:
	case o.room > 0:
		o.value = append(o.value, c)
		o.room--
	default:
		o.cut = true
	}
}

// end is that of a member.
func (o *object) end() {
	if o.part == inValue && len(o.value) > 0 {
		o.found(o.name, o.value, !o.cut)
	}
	o.part = beforeName
}
