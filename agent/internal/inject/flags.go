package inject

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// flags are vLLM's arguments by name, without dashes and with - for _, as vLLM
// takes them.
type flags struct {
	values map[string]flagValue
	// hidden are arguments that are not written in the pod as a whole: any flag
	// may stand there.
	hidden []string
}

type flagValue struct {
	word
	// prefix is what stands before the value in the same word, like --port=.
	prefix string
}

// short are vLLM's short forms of flags that are read here.
var short = map[string]string{
	"dp": "data-parallel-size", "dpl": "data-parallel-size-local", "dpn": "data-parallel-rank", "sc": "speculative-config",
}

// parseFlags reads the arguments of vLLM's server. A flag that is given twice
// has its last value, as there.
func parseFlags(args []word) flags {
	f := flags{values: make(map[string]flagValue)}
	for i := 0; i < len(args); i++ {
		w := args[i]
		dashes := len(w.text) - len(strings.TrimLeft(w.text, "-"))
		if dashes == 0 || dashes > 2 {
			if !w.known && i > 0 { // a hidden model is the first
				f.hidden = append(f.hidden, shorten(w.text, 80))
			}
			continue
		}
		name, value, assigned := strings.Cut(w.text[dashes:], "=")
		name, nested, isNested := strings.Cut(strings.ReplaceAll(name, "_", "-"), ".")
		if dashes == 1 {
			if name = short[name]; name == "" {
				continue
			}
		}
		if isNested {
			name += "." + strings.ReplaceAll(nested, "-", "_")
		}
		v := flagValue{word: w}
		switch {
		case assigned:
			v.text, v.prefix, v.variable = value, w.text[:len(w.text)-len(value)], nil
		case i+1 < len(args) && (!strings.HasPrefix(args[i+1].text, "-") || isNumber(args[i+1].text)):
			i++
			v = flagValue{word: args[i]}
		default:
			v.text = ""
		}
		f.values[name] = v
	}
	return f
}

func isNumber(text string) bool {
	_, err := strconv.Atoi(text)
	return err == nil
}

func (f flags) has(name string) bool {
	_, ok := f.values[name]
	return ok
}

// number of a flag, or absent without it; ok is false if it is not written in
// the pod, or none.
func (f flags) number(name string, absent int) (n int, ok bool) {
	v, given := f.values[name]
	if !given {
		return absent, true
	}
	n, err := strconv.Atoi(v.text)
	return n, v.known && err == nil
}

// object of a flag whose value is JSON, with the keys that are given one by one
// (--flag.key value); nil without it. whole tells that it is written as one
// argument.
func (f flags) object(name string) (object map[string]any, whole bool, err error) {
	v, given := f.values[name]
	if given {
		if !v.known {
			return nil, true, fmt.Errorf("--%s: %w", name, errUnknown)
		}
		if err := json.Unmarshal([]byte(v.text), &object); err != nil || object == nil {
			return nil, true, fmt.Errorf("--%s is not a JSON object: %.80q", name, v.text)
		}
	}
	whole = given
	for key, v := range f.values {
		nested, ok := strings.CutPrefix(key, name+".")
		if !ok {
			continue
		}
		whole = false
		if !v.known {
			return nil, false, fmt.Errorf("--%s: %w", key, errUnknown)
		}
		if object == nil {
			object = make(map[string]any)
		}
		var value any
		if json.Unmarshal([]byte(strings.ToLower(v.text)), &value) != nil {
			value = v.text
		}
		object[nested] = value
	}
	return object, whole, nil
}
