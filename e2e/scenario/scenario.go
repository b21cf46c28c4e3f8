// Package scenario is a list of requests that is played on an engine, fake or
// real, while its metrics and events are read: what each step of a request moves
// becomes a text, and the texts of two engines can be compared.
// docs/ENGINE-METRICS.md says the same in words.
package scenario

import (
	_ "embed"
	"fmt"
	"strings"
)

// How an engine must be configured for the list.
const (
	BlockSize        = 32
	Blocks           = 64 // of the pool, the null block included
	MaxModelLen      = 2000
	MaxBatchedTokens = 64 // two blocks in a step
	MaxSequences     = 4
	Adapter          = "ad1" // is loaded
)

// Scenario is one story.
type Scenario struct {
	Name string
	play func(p *Play)
}

//go:embed testdata/moved.txt
var moved string

// Moved is what moves on the fake engine.
func (s Scenario) Moved() string {
	_, text, _ := strings.Cut(moved, "== "+s.Name+"\n")
	text, _, _ = strings.Cut(text, "== ")
	return "== " + s.Name + "\n" + text
}

// List is everything that happens to requests. The last leaves its engine
// asleep.
var List = []Scenario{
	{"a request", func(p *Play) {
		p.finish(p.send("a", Request{Prompt: 100, Output: 5}))
		p.look("it was answered")
	}},
	{"a streamed request", func(p *Play) {
		p.finish(p.send("a", Request{Prompt: 100, Output: 5, Stream: true}))
		p.look("it was answered")
	}},
	{"one token", func(p *Play) {
		p.finish(p.send("a", Request{Prompt: 20, Output: 1}))
		p.look("it was answered")
	}},
	{"a prefix that is cached", func(p *Play) {
		p.finish(p.send("a", Request{Prompt: 200, Output: 1}))
		p.look("nobody had it")
		p.finish(p.send("a", Request{Prompt: 250, Output: 1}))
		p.look("6 blocks were there")
		p.finish(p.send("a", Request{Prompt: 192, Output: 1}))
		p.look("all was there, and its last block is computed again")
	}},
	{"a long prompt", func(p *Play) {
		p.hold()
		a := p.send("a", Request{Prompt: 1900, Output: 3, Stream: true})
		p.look("it was sent to an engine that takes no step")
		p.cut = true
		p.until("it prefills", prefilling, a)
		p.look("it is half computed")
		p.cut = false
		p.resume()
		p.finish(a)
		p.look("it was answered")
	}},
	{"six at once, four may run", func(p *Play) {
		list := p.stop(6, Request{Prompt: 40, Output: 150, Stream: true}, "four decode", began(MaxSequences))
		p.look("four decode, two wait")
		p.cut = false
		p.resume()
		p.finish(list...)
		p.look("all were answered")
	}},
	{"aborted while waiting", func(p *Play) {
		list := p.stop(4, Request{Prompt: 40, Output: 300}, "four decode", began(MaxSequences))
		waits := p.send("fifth", Request{Prompt: 40, Output: 1})
		p.until("one waiting", func(s sheet) bool { return s["num_requests_waiting"] == 1 }, list...)
		p.look("four decode, one waits")
		p.leave(waits)
		p.look("who waits has left")
		p.cut = false
		p.resume()
		p.finish(list...)
		p.look("the others were answered")
	}},
	{"aborted while prefilling", func(p *Play) {
		list := p.stop(1, Request{Prompt: 1900, Output: 3}, "it prefills", prefilling)
		p.look("it is half computed")
		p.leave(list[0])
		p.look("it has left")
		p.resume()
	}},
	{"aborted while decoding", func(p *Play) {
		list := p.stop(1, Request{Prompt: 40, Output: 1500, Stream: true}, "it decodes", began(1))
		p.look("it decodes")
		p.leave(list[0])
		p.look("it has left")
		p.resume()
	}},
	{"two choices of one prompt", func(p *Play) {
		p.hold()
		a := p.send("a", Request{Prompt: 100, Output: 5, Choices: 2})
		p.linger()
		p.resume()
		p.finish(a)
		p.look("it was answered")
	}},
	{"preempted", func(p *Play) {
		first, second := p.preempted()
		p.look("the second gave its blocks to the first")
		p.cut = false
		p.resume()
		p.finish(first, second)
		p.look("both were answered")
	}},
	{"preempted and aborted", func(p *Play) {
		first, second := p.preempted()
		p.leave(second)
		p.look("the second has left")
		p.cut = false
		p.resume()
		p.finish(first)
		p.cut = true // the second has some tokens
		p.look("the first was answered")
	}},
	{"two prompts in one call", func(p *Play) {
		p.hold()
		a := p.send("a", Request{Prompt: 50, Output: 5, Prompts: 2})
		p.linger()
		p.resume()
		p.finish(a)
		p.look("they were answered")
	}},
	{"an adapter", func(p *Play) {
		list := p.stop(1, Request{Prompt: 40, Output: 150, Stream: true, Adapter: Adapter}, "it decodes", began(1))
		p.look("it decodes")
		p.cut = false
		p.resume()
		p.finish(list...)
		p.look("it was answered")
	}},
	{"the cache is emptied while idle", func(p *Play) {
		p.finish(p.send("a", Request{Prompt: 100, Output: 1}))
		p.post("/reset_prefix_cache")
		p.look("it is empty")
		p.finish(p.send("a", Request{Prompt: 100, Output: 1}))
		p.look("and filled again")
	}},
	{"put to sleep", func(p *Play) {
		list := p.stop(5, Request{Prompt: 40, Output: 150}, "four decode", began(MaxSequences))
		p.post("/sleep?level=1")
		p.finish(list...)
		p.look("all were aborted by the engine")
	}},
}

func prefilling(s sheet) bool {
	return s["num_requests_running"] == 1 && s["time_to_first_token_seconds_count"] == 0
}

// preempted holds the engine when the second of two requests has given its
// blocks back: both fit while they are prompts, and not with what they generate.
func (p *Play) preempted() (first, second *request) {
	r := Request{Prompt: 900, Output: 400, Stream: true}
	first = p.stop(1, r, "the first prefills", prefilling)[0]
	second = p.send("second", r)
	p.until("one preempted", func(s sheet) bool {
		return s["time_to_first_token_seconds_count"] == 2 && s["num_requests_waiting"] == 1
	}, first, second)
	return first, second
}

// began holds when so many requests have a token.
func began(n float64) func(sheet) bool {
	return func(s sheet) bool { return s["time_to_first_token_seconds_count"] == n }
}

// stop sends n requests that share nothing, one after the other, to a held
// engine, lets it go on, and holds it again where it should stand.
func (p *Play) stop(n int, r Request, where string, stands func(sheet) bool) []*request {
	p.hold()
	var list []*request
	for i := range n {
		list = append(list, p.send(fmt.Sprint("one of several ", i), r))
	}
	p.cut = true
	p.until(where, stands, list...)
	return list
}
