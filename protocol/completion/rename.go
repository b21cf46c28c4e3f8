package completion

import "encoding/json"

// Rename gives an answer's model another name as it passes: that by which the
// client asked for it.
type Rename struct {
	events bool
	lines  lines
	object object
	name   []byte // as JSON
}

// NewRename is for an answer whose body has that content type.
func NewRename(contentType, model string) *Rename {
	r := &Rename{events: New(contentType).events, lines: lines{blank: true}, name: quoted(model)}
	r.object.keep, r.object.found = func([]byte) int { return 0 }, func([]byte, []byte, bool) {}
	return r
}

// Pass reads the next piece, and returns it with the other name.
func (r *Rename) Pass(piece []byte) []byte {
	passed := make([]byte, 0, len(piece)+len(r.name))
	for _, c := range piece {
		if r.events {
			data, ended := r.lines.next(c)
			if ended {
				r.object.reset()
			}
			if !data {
				passed = append(passed, c)
				continue
			}
		}
		was := r.object.inside("model")
		r.object.byte(c)
		switch is := r.object.inside("model"); {
		case !is:
			passed = append(passed, c)
		case !was: // the colon
			passed = append(append(passed, c), r.name...)
		}
	}
	return passed
}

func quoted(text string) []byte {
	name, err := json.Marshal(text)
	if err != nil { // a string
		panic(err)
	}
	return name
}
