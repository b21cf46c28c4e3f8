package intake

import (
	"errors"
	"fmt"
	"strings"
)

const (
	// maxNames of headers and of fields, and maxName bytes of each.
	maxNames = 16
	maxName  = 256
	// MaxHeaders of a request.
	MaxHeaders = 256
)

// Sessions says where requests name their session if they do not do so
// themselves: first in a header, then in a field of the body, in this order.
// The zero value: nowhere.
type Sessions struct {
	headers []string
	fields  [][]string // path by path
}

// NewSessions takes lists separated by commas: names of headers, whatever
// their case, and of fields, with dots on the way to those inside others
// (metadata.session_id).
func NewSessions(headers, fields string) (Sessions, error) {
	var s Sessions
	names, err := split(headers)
	if err != nil {
		return Sessions{}, fmt.Errorf("headers: %w", err)
	}
	for _, n := range names {
		if strings.ContainsFunc(n, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == ':' }) {
			return Sessions{}, fmt.Errorf("headers: %q is no name of a header", n)
		}
	}
	s.headers = names
	names, err = split(fields)
	if err != nil {
		return Sessions{}, fmt.Errorf("fields: %w", err)
	}
	for _, n := range names {
		path := strings.Split(n, ".")
		for _, step := range path {
			if step == "" {
				return Sessions{}, fmt.Errorf("fields: %q has an empty name in it", n)
			}
		}
		s.fields = append(s.fields, path)
	}
	return s, nil
}

func split(list string) ([]string, error) {
	if list == "" {
		return nil, nil
	}
	names := strings.Split(list, ",")
	if len(names) > maxNames {
		return nil, fmt.Errorf("%d names, at most %d", len(names), maxNames)
	}
	for i, n := range names {
		switch n = strings.TrimSpace(n); {
		case n == "":
			return nil, errors.New("a name is empty")
		case len(n) > maxName:
			return nil, fmt.Errorf("a name of %d bytes, at most %d", len(n), maxName)
		}
		names[i] = strings.TrimSpace(n)
	}
	return names, nil
}

// Of returns the name of a request's session; "" if it has none. The body is a
// JSON object that was found valid, or empty. A value that is a string or a
// number names a session, the same one wherever it stands.
func (s *Sessions) Of(headers map[string]string, body []byte) string {
	if len(headers) > 0 {
		for _, name := range s.headers {
			if v := header(headers, name); v != "" {
				return v
			}
		}
	}
	if len(body) > 0 {
		for _, path := range s.fields {
			if v := field(body, path); v != "" {
				return v
			}
		}
	}
	return ""
}

// header returns the value under a name in any case; of several, that of the
// first in order.
func header(headers map[string]string, name string) string {
	if v, ok := headers[name]; ok {
		return v
	}
	found := ""
	for n := range headers {
		if strings.EqualFold(n, name) && (found == "" || n < found) {
			found = n
		}
	}
	if found == "" {
		return ""
	}
	return headers[found]
}

// field follows a path. As in Python, the last of equal names counts.
func field(doc []byte, path []string) string {
	var at span
	members(doc, func(name string, v span) {
		if name == path[0] {
			at = v
		}
	})
	v := at.of(doc)
	switch {
	case len(v) == 0:
		return ""
	case len(path) > 1:
		return field(v, path[1:])
	case v[0] == '"':
		return text(v)
	case v[0] == '-' || v[0] >= '0' && v[0] <= '9':
		return string(v)
	}
	return ""
}
