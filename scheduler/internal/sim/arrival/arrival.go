// Package arrival says which requests come to a simulated fleet and when:
// traces that were recorded, load in stages and other generators, and closed loops
// that go on when an answer is complete. It knows nothing of engines, members
// or policies.
//
// Equal keys of two requests mean equal prompts up to there, whatever the
// source: its content ids are chained before they become keys.
package arrival

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Request is one request of a source.
type Request struct {
	ID     int           // 0, 1, 2 in order of issue
	At     time.Duration // since the start; never before that of the request before
	Length int           // prompt tokens, at least 1
	Output int           // tokens to generate, at least 1
	// Keys of the whole blocks. The prompt's are the first Length/BlockSize.
	// Where there are more, they are of prompt and output together, and later
	// prompts may carry them; where not, the output is private.
	Keys            []blockkey.Key
	Session, Tenant string
	Priority        int32
}

// Source hands out requests in order of time. It belongs to one caller.
type Source interface {
	BlockSize() int
	Len() int                      // requests in all; for progress
	Next() (Request, bool)         // earliest request known and not returned; false: none is known at present
	Done(id int, at time.Duration) // the request's last token, or its refusal; closed loops go on from it
	Peek() (time.Duration, bool)   // At of what Next would return
}

// Workload is a source that can be played again and again: the same seed
// gives the same requests. Its methods may run beside each other.
type Workload struct {
	Name   string
	Stages []Stage // of load that has them, in order; else empty
	play   func(seed uint64) Source
}

// Stage is a stretch of load with one rate.
type Stage struct {
	QPS        float64
	Start, End time.Duration
}

// Play starts the workload from its beginning.
func (w Workload) Play(seed uint64) Source { return w.play(seed) }

// Options of every workload.
type Options struct {
	BlockSize int     // tokens a block, at least 1
	Speed     float64 // divides a trace's times; zero means 1; generators state their own rates
	// First cuts a trace off after so much time of the run; zero plays all of it.
	First time.Duration
}

func (o Options) check() error {
	if o.BlockSize < 1 || o.BlockSize > maxTokens {
		return fmt.Errorf("block size %d: want 1 to %d tokens", o.BlockSize, maxTokens)
	}
	if o.Speed != 0 && !(o.Speed >= 1e-3 && o.Speed <= 1e4) {
		return fmt.Errorf("speed %v: want 0.001 to 10000", o.Speed)
	}
	if o.First < 0 {
		return fmt.Errorf("first %v: want no less than 0", o.First)
	}
	return nil
}

// maxTokens bounds every length that is read or drawn.
const maxTokens = 1 << 24

// span is a piece of content: equal ids mean equal tokens, as many.
type span struct {
	id     uint64
	tokens int
}

var root = blockkey.Scope{Model: "simulated"}.Root()

// appendKeys appends the keys of the whole blocks that the spans make up.
func appendKeys(dst []blockkey.Key, spans []span, size int) []blockkey.Key {
	chain, start, end := root, 0, size // tokens before the span; where the next block ends
	for _, s := range spans {
		chain = blockkey.Chain(chain, blockkey.Digest(blockkey.Key(s.id)))
		for ; end <= start+s.tokens; end += size {
			dst = append(dst, blockkey.Chain(chain, blockkey.Digest(blockkey.Key(end-start))))
		}
		start += s.tokens
	}
	return dst
}

// private is the id of content that nobody else has. It lies far from the
// small numbers that name shared content.
func private(n int) uint64 { return 1<<63 | blockkey.Digest(blockkey.Key(n))>>1 }

// planned is a request whose time is known in advance.
type planned struct {
	at             time.Duration
	length, output int
	session        string
	spans          func(dst []span) []span // of the prompt
}

// schedule is a source of requests all of whose times are known.
type schedule struct {
	size    int
	list    []planned
	next    int
	scratch []span
}

// newSchedule sorts the list by time; it keeps the order of equals.
func newSchedule(size int, list []planned) *schedule {
	slices.SortStableFunc(list, func(a, b planned) int { return cmp.Compare(a.at, b.at) })
	return &schedule{size: size, list: list}
}

func (s *schedule) BlockSize() int          { return s.size }
func (s *schedule) Len() int                { return len(s.list) }
func (s *schedule) Done(int, time.Duration) {}

func (s *schedule) Peek() (time.Duration, bool) {
	if s.next == len(s.list) {
		return 0, false
	}
	return s.list[s.next].at, true
}

func (s *schedule) Next() (Request, bool) {
	if s.next == len(s.list) {
		return Request{}, false
	}
	p := s.list[s.next]
	s.scratch = p.spans(s.scratch[:0])
	r := Request{ID: s.next, At: p.at, Length: p.length, Output: p.output, Session: p.session,
		Keys: appendKeys(make([]blockkey.Key, 0, p.length/s.size), s.scratch, s.size)}
	s.next++
	return r, true
}
