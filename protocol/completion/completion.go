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
	line   int // of an event's line: bytes of "data:" seen; -1: another field
	blank  bool

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
	a := &Answer{events: strings.EqualFold(strings.TrimSpace(media), "text/event-stream"), blank: true}
	a.object.keep, a.object.found = a.keep, a.found
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

const field = "data:"

// event reads a byte of server-sent events, and tells whether one ends: what is in
// the data of an event, up to a blank line, is one object.
func (a *Answer) event(c byte) (ended bool) {
	switch {
	case c == '\r':
	case c == '\n':
		if ended = a.blank; ended {
			a.object.reset()
			a.counts, a.empty = false, false
		}
		a.line, a.blank = 0, true
	case a.line == len(field):
		a.object.byte(c)
	case a.line >= 0 && c == field[a.line]:
		a.line, a.blank = a.line+1, false
	default:
		a.line, a.blank = -1, false
	}
	return ended
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
	case "choices":
		a.empty = whole && string(value) == "[]"
		a.begun = a.begun || !whole || generated(value)
	}
}

// count reads the usage; null, as in all but the last event, says nothing.
func (a *Answer) count(value []byte) {
	var u *struct {
		PromptTokens     uint32 `json:"prompt_tokens"`
		CompletionTokens uint32 `json:"completion_tokens"`
		Details          struct {
			CachedTokens *uint32 `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	if json.Unmarshal(value, &u) == nil && u != nil {
		a.counts = true
		a.usage = &Usage{PromptTokens: u.PromptTokens, OutputTokens: u.CompletionTokens, CachedTokens: u.Details.CachedTokens}
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
			switch string(part) {
			case "null", `""`, "[]", "{}":
			default:
				if name != "role" {
					return true
				}
			}
		}
	}
	return false
}
