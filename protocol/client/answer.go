package client

import (
	"github.com/kvscout/kvscout/protocol/completion"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Answer is what an engine answers as it passes: what it shows goes into the
// report. It is for one caller at a time.
type Answer struct {
	read   *completion.Answer
	place  *Placement
	status int
}

// Answer begins an answer with that status and content type.
func (p *Placement) Answer(status int, contentType string) *Answer {
	return &Answer{read: completion.New(contentType), place: p, status: status}
}

// Events tells whether the body is server-sent events.
func (a *Answer) Events() bool { return a.read.Events() }

// Take reads the next piece of the body.
func (a *Answer) Take(piece []byte) {
	a.read.Take(piece)
	a.begun()
}

// Pass reads the next piece of events, and returns what is for a client that did
// not ask for usage, as completion.Answer does.
func (a *Answer) Pass(piece []byte) []byte {
	defer a.begun()
	return a.read.Pass(piece)
}

// Rest is what Pass has held back: an event without an end.
func (a *Answer) Rest() []byte { return a.read.Rest() }

func (a *Answer) begun() {
	if a.read.Begun() {
		a.place.FirstToken()
	}
}

// Report is what the answer says. An engine that failed says so by its status, or
// after it had begun; one that refused the request did not do what it was sent
// for. Otherwise the outcome is left to how sending ended.
func (a *Answer) Report() *api.Report {
	r := new(api.Report)
	switch {
	case a.status >= 500 || a.read.Failed():
		r.Outcome = api.Outcome_OUTCOME_FAILED
	case a.status >= 400:
		r.Outcome = api.Outcome_OUTCOME_CANCELLED
	}
	if u := a.read.Usage(); u != nil && r.Outcome == api.Outcome_OUTCOME_UNSPECIFIED {
		r.PromptTokens, r.OutputTokens, r.CachedTokens = &u.PromptTokens, &u.OutputTokens, u.CachedTokens
	}
	return r
}
