package rpc

import (
	"cmp"
	"context"
	"slices"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/books"
)

// GetBooks says what became of prompt tokens.
func (s *Service) GetBooks(context.Context, *api.GetBooksRequest) (*api.GetBooksResponse, error) {
	b, hits := s.cfg.Books.Stats(), s.cfg.Picker.Stats().HitTokens
	resp := &api.GetBooksResponse{
		Picked: &api.HitTokens{
			PromptTokens: hits.Prompt, IdealTokens: hits.Ideal, FeasibleTokens: hits.Feasible,
			RoutedTokens: hits.Routed, LeastLoadTokens: hits.LeastLoad,
		},
		BookedRequests: b.Requests, BookedPromptTokens: b.Prompt(), UsedTokens: b.Tokens[books.Used],
		DivertedRequests: b.Busy, DivertedMs: b.BusyMS,
		UnbookedRequests: b.Unbooked, OpenRequests: uint64(b.Open),
		Evicted: evicted(&b.Evicted),
	}
	for cause, n := range b.Tokens {
		if n > 0 && books.Cause(cause) != books.Used {
			resp.Lost = append(resp.Lost, &api.LostTokens{Cause: losses[cause].cause, Tokens: n, Explanation: losses[cause].text})
		}
	}
	slices.SortStableFunc(resp.Lost, func(a, b *api.LostTokens) int { return cmp.Compare(b.GetTokens(), a.GetTokens()) })
	if b.Remembered >= 0 {
		ms := milliseconds(b.Remembered)
		resp.RememberedMs = &ms
	}
	return resp, nil
}

// evicted are the classes that have tokens.
func evicted(l *books.Lost) (list []*api.EvictedTokens) {
	for age, sizes := range l {
		for size, n := range sizes {
			if n == 0 {
				continue
			}
			e := &api.EvictedTokens{Tokens: n, PoolUnknown: size == 0}
			if age < len(books.Ages) {
				ms := float64(books.Ages[age]) / float64(time.Millisecond)
				e.UsedWithinMs = &ms
			}
			if size > 0 && size <= len(books.Sizes) {
				pools := uint32(books.Sizes[size-1])
				e.KeptByPools = &pools
			}
			list = append(list, e)
		}
	}
	return list
}

// losses are the causes on the wire, each with what it means.
var losses = [books.Causes]struct {
	cause api.Loss
	text  string
}{
	books.Unseen:       {api.Loss_LOSS_UNSEEN, "no request had it before, as far as is remembered"},
	books.Evicted:      {api.Loss_LOSS_EVICTED, "it was in a cache, and had to make room"},
	books.Gone:         {api.Loss_LOSS_GONE, "the engine that had it left or began anew"},
	books.Busy:         {api.Loss_LOSS_BUSY, "a member that had it would have cost more time"},
	books.Policy:       {api.Loss_LOSS_POLICY, "the policy goes by something else than time"},
	books.Elsewhere:    {api.Loss_LOSS_ELSEWHERE, "the caller sent the request to another member than the one that was picked"},
	books.Unavailable:  {api.Loss_LOSS_UNAVAILABLE, "only members that could not be picked had it"},
	books.Untrusted:    {api.Loss_LOSS_UNTRUSTED, "the cache state of the member that had it, or may have it, is not EXACT"},
	books.Unusable:     {api.Loss_LOSS_UNUSABLE, "it is held where the engine accepts no hit to end"},
	books.Mispredicted: {api.Loss_LOSS_MISPREDICTED, "it was promised, and the engine did not find it"},
	books.Uncacheable:  {api.Loss_LOSS_UNCACHEABLE, "no cache serves it: last tokens, and requests that skip the cache"},
	books.Unknown:      {api.Loss_LOSS_UNKNOWN, "the request came without tokens, or its engine counts others"},
}
