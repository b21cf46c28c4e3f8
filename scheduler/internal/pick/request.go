package pick

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
)

// What a Pick can fail with.
var (
	// ErrModel: no member serves the model.
	ErrModel = errors.New("unknown model")
	// ErrGone: no member serves the model since a moment ago.
	ErrGone = errors.New("its last member left a moment ago")
	// ErrAdapter: members serve the model, but none with the adapter.
	ErrAdapter = errors.New("unknown adapter")
	// ErrPolicy: there is no such policy.
	ErrPolicy = policy.ErrUnknown
	// ErrNotAllowed: there is such a policy, but requests may not name it.
	ErrNotAllowed = errors.New("policy not allowed")
	// ErrPrompt: tokens or keys that cannot be, or keys of a block size that
	// no candidate has.
	ErrPrompt = errors.New("invalid prompt")
	// ErrExcluded: the request's own lists leave none of those that serve the
	// model.
	ErrExcluded = errors.New("excluded by the request itself")
	// ErrNoCandidate: none of those that serve the model is left otherwise.
	ErrNoCandidate = errors.New("no candidate")
	// ErrNoMembers: the fleet is empty.
	ErrNoMembers = errors.New("no members")
)

// Request is what is known of the request to place.
type Request struct {
	// Model is a served name or the name of an adapter. Adapter is given when
	// Model does not name it.
	Model, Adapter, Salt string
	// Items lie in the prompt's token coordinates, sorted by offset.
	Items  []blockkey.Item
	Prompt Prompt
	// SkipsCache: nothing that anybody holds serves the request.
	SkipsCache bool
	// Session keeps the requests of a conversation together; may be empty.
	Session string
	// Candidates restricts the choice; empty: all that serve the model.
	// Exclude are not to be chosen.
	Candidates, Exclude []Ref
	// Policy by name; empty: the picker's.
	Policy string
	// ExpectedOutput tokens; 0: not known. Pick fills in what it predicts, so
	// that a request that is tried again keeps its prediction.
	ExpectedOutput int
	// Tenant on whose behalf the request comes; may be empty.
	Tenant string
	// Targets of the request; zero: those of the profile or the configuration.
	// Elapsed is the time since it came.
	Targets policy.Targets
	Elapsed time.Duration
	// Admission, if set, makes Pick fail with a NoRoom where the first candidate should
	// not get the request yet.
	Admission *Admission
	// Top limits the ranked list; 0: 3, negative: all.
	Top int
	// Reserve makes a reservation on the first of the list.
	Reserve bool

	not    *fleet.Role   // members of this role are not meant; nil: all are
	decode *fleet.Member // that decodes what the first prefills; nil: the first
}

// Admission says what stands before a request that may wait.
type Admission struct {
	// BudgetMS is the prefill that a member may have before and with the
	// request.
	BudgetMS float64
	// Ahead are the requests that wait and are to be served before this one, by
	// number of the member that they wait for.
	Ahead []fleet.Ahead
	// Hold: it has to wait in any case, and Pick says for whom.
	Hold bool
	// Among, if set, gets the candidates that a request which has to wait can
	// use; none where that depends on more than its own lists.
	Among *[]fleet.ID
}

// NoRoom says that the request should wait.
type NoRoom struct {
	// Member that it waits for, and what it adds to what waits there.
	Member fleet.ID
	Adds   fleet.Ahead
	// SlackMS is what the predicted time leaves of the target; NaN: no target.
	SlackMS float64
}

func (f *NoRoom) Error() string { return "no candidate has room now" }

// Prompt has tokens, or keys with their block size, or neither.
type Prompt struct {
	// Tokens are ids as little-endian uint32.
	Tokens []byte
	// Keys for blocks of BlockSize tokens, and the prompt's Length in tokens.
	// A Length of 0 stands for whole blocks.
	Keys      []blockkey.Key
	BlockSize int
	Length    int
	// Beginnings are keys of the first characters of a prompt that is text, by
	// Beginnings.
	Beginnings []uint64
	// Fallback says why there are neither tokens nor keys.
	Fallback string
}

// length in tokens; 0: not known.
func (p *Prompt) length() int {
	switch {
	case len(p.Tokens) > 0:
		return len(p.Tokens) / 4
	case p.Length > 0:
		return p.Length
	}
	return len(p.Keys) * p.BlockSize
}

// Ref names members by what is not empty: a member, a pod with all its ranks,
// or an address.
type Ref struct{ Member, Pod, Address string }

// usualTop is the length of a ranked list of which nothing was said.
const usualTop = 3

// top limits the ranked list; 0: all.
func (r *Request) top() int {
	switch {
	case r.Top == 0:
		return usualTop
	case r.Top < 0:
		return 0
	}
	return r.Top
}

func (r *Request) check() error {
	p := &r.Prompt
	switch {
	case len(p.Tokens)%4 != 0:
		return fmt.Errorf("%d bytes of tokens: %w: %w", len(p.Tokens), ErrPrompt, blockkey.ErrRagged)
	case len(p.Tokens) > 0 && len(p.Keys) > 0:
		return fmt.Errorf("tokens and keys: %w", ErrPrompt)
	case p.BlockSize < 0 || p.Length < 0:
		return fmt.Errorf("block size %d, length %d: %w", p.BlockSize, p.Length, ErrPrompt)
	case len(p.Keys) > 0 && p.BlockSize == 0:
		return fmt.Errorf("keys without a block size: %w", ErrPrompt)
	case len(p.Tokens) == 0 && p.Length > 0 && p.Length/max(p.BlockSize, 1) < len(p.Keys):
		return fmt.Errorf("%d keys of %d tokens for a prompt of %d: %w", len(p.Keys), p.BlockSize, p.Length, ErrPrompt)
	}
	for i, k := range p.Keys {
		if k == 0 {
			return fmt.Errorf("key %d is 0: %w", i, ErrPrompt)
		}
	}
	return nil
}
