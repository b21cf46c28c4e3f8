package fakevllm

import (
	"sync"
	"time"
)

// sequence is one request inside a rank. The rank guards all but the output,
// which its client reads.
type sequence struct {
	scope     scope
	adapterID int
	// tokens are the prompt and what was generated behind it.
	tokens []uint32
	prompt int
	limit  int    // tokens to generate
	ending string // the reason to end there
	// order, then arrival, is the place in the queue.
	order, arrival int64
	hashes         []uint64  // of the whole blocks of tokens
	blocks         [][]int32 // by group; nil while it waits
	// boundaries, in blocks, are where others may resume; junction is the one
	// that its own lookup found a group to be missing at, 0: none.
	boundaries []int
	junction   int
	// computed tokens have their KV in blocks, the leading sealed blocks are
	// full and announced.
	computed, sealed int
	cached           int // prompt tokens found at admission; -1 before
	aborted          bool
	preempted        int // times since its last token

	// queued is when the rank took it from its clients, between two steps.
	arrived, queued, admitted, first, last time.Time

	// every says after how many tokens the client is woken; the first and the
	// last are never held back.
	every int
	wake  chan<- struct{}

	mu     sync.Mutex // guards what follows
	output []uint32   // generated and not yet read
	held   int
	reason string // why it ended; empty while it runs
}

func (s *sequence) generated() int { return len(s.tokens) - s.prompt }

// total is the number of tokens that must be stored at most. The last
// generated token is never computed.
func (s *sequence) total() int { return s.prompt + s.limit - 1 }

// deliver hands a token to the client, and the reason when it is the last.
func (s *sequence) deliver(token uint32, reason string) {
	s.mu.Lock()
	s.output = append(s.output, token)
	s.held++
	s.reason = reason
	wake := reason != "" || s.generated() == 1 || s.held >= s.every
	if wake {
		s.held = 0
	}
	s.mu.Unlock()
	if wake {
		signal(s.wake)
	}
}

// end tells the client that nothing more will come.
func (s *sequence) end(reason string) {
	s.mu.Lock()
	s.reason = reason
	s.mu.Unlock()
	signal(s.wake)
}

// read takes what was generated since the last call.
func (s *sequence) read(dst []uint32) (tokens []uint32, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dst = append(dst, s.output...)
	s.output = s.output[:0]
	return dst, s.reason
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
