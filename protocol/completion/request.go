package completion

import (
	"bytes"
	"encoding/json"
)

// maxModel bytes of a model's name are read.
const maxModel = 1 << 10

// Request is the body of a request.
type Request struct {
	object                     object
	streams, options, priority bool
	model                      string
}

// Take reads the next piece of the body.
func (r *Request) Take(piece []byte) {
	if r.object.keep == nil {
		r.object.keep, r.object.found = r.keep, r.found
	}
	r.object.take(piece)
}

func (r *Request) keep(name []byte) int {
	switch string(name) {
	case "stream", "stream_options", "priority":
		return len("null")
	case "model":
		return maxModel
	}
	return 0
}

func (r *Request) found(name, value []byte, whole bool) {
	switch string(name) {
	case "stream":
		r.streams = string(value) == "true"
	case "stream_options":
		r.options = string(value) != "null"
	case "priority":
		r.priority = string(value) != "null"
	case "model":
		if r.model = ""; whole && json.Unmarshal(value, &r.model) != nil {
			r.model = ""
		}
	}
}

// HidesUsage tells whether the request is for events and says nothing of usage:
// then its answer has none.
func (r *Request) HidesUsage() bool { return r.streams && !r.options }

// NamesPriority tells whether the client has given the request a priority of its
// own at the engine.
func (r *Request) NamesPriority() bool { return r.priority }

// Model that the client names; empty: none, or none that can be read.
func (r *Request) Model() string { return r.model }

// ForModel is the member that names that model.
func ForModel(name string) string { return `"model":` + string(quoted(name)) }

// WantsUsage is the member that asks for usage.
const WantsUsage = `"stream_options":{"include_usage":true}`

// With is the body of a request with another member: of equal names the last counts,
// as with one that is null. What is no JSON object stays what it is.
func With(body []byte, member string) []byte {
	end := bytes.LastIndexByte(body, '}')
	if end < 0 {
		return body
	}
	with := make([]byte, 0, len(body)+1+len(member))
	with = append(with, body[:end]...)
	with = append(with, ',')
	with = append(with, member...)
	return append(with, body[end:]...)
}
