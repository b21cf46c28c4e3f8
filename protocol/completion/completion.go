// Package completion reads an OpenAI request, and what an engine answers to it,
// while they pass by: whether the answer has begun, whether it failed, and what the
// engine counted. It keeps a few kilobytes whatever the length and however it is
// cut, and knows nothing of who passes it on.
package completion

import (
	"encoding/json"
	"strings"
)

const (
	// maxUsage bytes of usage are kept, and maxChoices of an event's choices until
	// something was generated.
	maxUsage   = 4 << 10
	maxChoices = 16 << 10
	// maxHeld bytes of an event are held until its end shows whether it passes: more
	// than an event of usage alone has.
	maxHeld = 64 << 10
)

// Usage is what the engine counted.
type Usage struct {
	PromptTokens, OutputTokens uint32
	// CachedTokens of the prompt; nil: the engine does not say.
	CachedTokens *uint32
}

// Answer is one answer's body: a JSON object, or server-sent events of them.
// What is neither has no usage.
type Answer struct {
	events bool
	object object
	within object // of an event of /v1/responses: what stands under "response"
	lines  lines

	begun, failed bool
	usage         *Usage

	// Of the event that is read: it has counts, and no choices.
	counts, empty bool
	held          []byte // by Pass
	passes        bool   // whatever its end shows
}

// New is an answer whose body has that content type.
func New(contentType string) *Answer {
	media, _, _ := strings.Cut(contentType, ";")
	a := &Answer{events: strings.EqualFold(strings.TrimSpace(media), "text/event-stream"), lines: lines{blank: true}}
	a.object.keep, a.object.found = a.keep, a.found
	a.within.keep, a.within.found = keepWithin, a.foundWithin
	return a
}

// Take reads the next piece of the body.
func (a *Answer) Take(piece []byte) {
	if !a.events {
		a.object.take(piece)
		return
	}
	for _, c := range piece {
		a.event(c)
	}
}

// Pass reads the next piece, and returns what is for a client that did not ask
// for usage: all but the event that has nothing else. An event passes when it is
// whole, which is when a client can read it.
func (a *Answer) Pass(piece []byte) []byte {
	if !a.events {
		a.Take(piece)
		return piece
	}
	var passed []byte
	for _, c := range piece {
		a.held = append(a.held, c)
		usageAlone := a.counts && a.empty
		if ended := a.event(c); ended && usageAlone && !a.passes {
			a.held = a.held[:0]
		} else if ended || len(a.held) == maxHeld {
			passed, a.held, a.passes = append(passed, a.held...), a.held[:0], !ended
		}
	}
	return passed
}

// Rest is what Pass has held back: an event without an end.
func (a *Answer) Rest() []byte {
	defer func() { a.held = nil }()
	return a.held
}

// event reads a byte of server-sent events, and tells whether one ends: what is in
// the data of an event, up to a blank line, is one object.
func (a *Answer) event(c byte) (ended bool) {
	data, ended := a.lines.next(c)
	switch {
	case ended:
		a.object.reset()
		a.within.reset()
		a.counts, a.empty = false, false
	case data:
		if a.within.depth > 0 || c == '{' && a.object.begins("response") {
			a.within.byte(c)
		}
		a.object.byte(c)
	}
	return ended
}

const field = "data:"

// lines of server-sent events.
type lines struct {
	seen  int // bytes of "data:"; -1: another field
	blank bool
}

// next takes a byte, and tells whether it is one of data, or ends an event.
func (l *lines) next(c byte) (data, ended bool) {
	switch {
	case c == '\r':
	case c == '\n':
		ended = l.blank
		l.seen, l.blank = 0, true
	case l.seen == len(field):
		return true, false
	case l.seen >= 0 && c == field[l.seen]:
		l.seen, l.blank = l.seen+1, false
	default:
		l.seen, l.blank = -1, false
	}
	return false, ended
}

// Events tells whether the body is server-sent events.
func (a *Answer) Events() bool { return a.events }

// Begun tells whether generated content has come; of a body that is no stream,
// nothing tells when that was.
func (a *Answer) Begun() bool { return a.begun }

// Failed tells whether the engine gave up after its answer had begun.
func (a *Answer) Failed() bool { return a.failed }

// Usage is the engine's last count; nil: there is none.
func (a *Answer) Usage() *Usage { return a.usage }

func (a *Answer) keep(name []byte) int {
	switch string(name) {
	case "usage":
		return maxUsage
	case "error":
		return len("null")
	case "type":
		return len(responseFailed) + 1
	case "delta":
		return len("null")
	case "choices":
		switch {
		case a.events && !a.begun:
			return maxChoices
		case a.events:
			return len("[]")
		}
	}
	return 0
}

func (a *Answer) found(name, value []byte, whole bool) {
	switch string(name) {
	case "usage":
		if whole {
			a.count(value)
		}
	case "error":
		a.failed = a.failed || string(value) != "null"
	case "type":
		a.failed = a.failed || a.events && (string(value) == responseFailed || string(value) == responseError)
	case "delta":
		a.begun = a.begun || a.events && !nothing(value)
	case "choices":
		a.empty = whole && string(value) == "[]"
		a.begun = a.begun || !whole || generated(value)
	}
}

// Types of events of /v1/responses that end an answer before its time.
const responseFailed, responseError = `"response.failed"`, `"error"`

// keepWithin and foundWithin are for the object under "response", of which the last
// event has the counts.
func keepWithin(name []byte) int {
	if string(name) == "usage" {
		return maxUsage
	}
	return 0
}

func (a *Answer) foundWithin(_, value []byte, whole bool) {
	if whole {
		a.count(value)
	}
}

// count reads the usage; null, as in all but the last event, says nothing.
func (a *Answer) count(value []byte) {
	type details struct {
		CachedTokens *uint32 `json:"cached_tokens"`
	}
	var u *struct {
		PromptTokens     uint32  `json:"prompt_tokens"`
		CompletionTokens uint32  `json:"completion_tokens"`
		Details          details `json:"prompt_tokens_details"`
		// The same in /v1/responses.
		InputTokens  uint32  `json:"input_tokens"`
		OutputTokens uint32  `json:"output_tokens"`
		InputDetails details `json:"input_tokens_details"`
	}
	if json.Unmarshal(value, &u) == nil && u != nil {
		a.counts = true
		a.usage = &Usage{PromptTokens: u.PromptTokens, OutputTokens: u.CompletionTokens, CachedTokens: u.Details.CachedTokens}
		if u.InputTokens > 0 {
			a.usage = &Usage{PromptTokens: u.InputTokens, OutputTokens: u.OutputTokens, CachedTokens: u.InputDetails.CachedTokens}
		}
	}
}

// generated tells whether there is anything of the model's in an event's choices.
// The first event of a chat may name nothing but the role.
func generated(value []byte) bool {
	var choices []struct {
		Text   string                     `json:"text"`
		Delta  map[string]json.RawMessage `json:"delta"`
		Reason *string                    `json:"finish_reason"`
	}
	if json.Unmarshal(value, &choices) != nil {
		return false
	}
	for _, c := range choices {
		if c.Text != "" || c.Reason != nil {
			return true
		}
		for name, part := range c.Delta {
			if name != "role" && !nothing(part) {
				return true
			}
		}
	}
	return false
}

// nothing tells whether a value has nothing in it.
func nothing(value []byte) bool {
	switch string(value) {
	case "null", `""`, "[]", "{}":
		return true
	}
	return false
}
