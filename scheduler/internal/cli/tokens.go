package cli

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// worthIt is the share of prompt tokens from which on a cause is spoken of.
	worthIt = 0.05
	// mostOf what was evicted is what a cache is recommended for.
	mostOf = 0.8
)

// examineTokens looks at what became of prompt tokens, and says what to buy.
func (d *examination) examineTokens(ctx context.Context) {
	ctx, cancel := d.bounded(ctx)
	defer cancel()
	books, err := d.admin.GetBooks(ctx, &api.GetBooksRequest{})
	switch {
	case status.Code(err) == codes.Unimplemented:
		return // a scheduler of an older release keeps none
	case err != nil:
		d.find(mend, "tokens", d.explained(ctx, err).Error(), "")
		return
	case books.GetBookedRequests() < enough || books.GetBookedPromptTokens() == 0:
		return
	}
	whole := float64(books.GetBookedPromptTokens())
	text := fmt.Sprintf("of the %d prompt tokens of %d requests %s were found cached", books.GetBookedPromptTokens(), books.GetBookedRequests(), percent(float64(books.GetUsedTokens())/whole))
	if hits := books.GetPicked(); hits.GetPromptTokens() > 0 {
		part := func(n uint64) string { return percent(float64(n) / float64(hits.GetPromptTokens())) }
		text += fmt.Sprintf("; when they were picked for, any member had %s, the one that was picked %s, the one with the fewest requests %s",
			part(hits.GetIdealTokens()), part(hits.GetRoutedTokens()), part(hits.GetLeastLoadTokens()))
	}
	d.find(well, "tokens", text, "")
	for _, l := range books.GetLost() {
		share := float64(l.GetTokens()) / whole
		if do := remedy(l.GetCause(), books); share >= worthIt && do != "" {
			d.find(look, "tokens", fmt.Sprintf("%s of the prompt tokens were lost: %s", percent(share), l.GetExplanation()), do)
		}
	}
}

// remedy is what would change a loss; empty: nothing would.
func remedy(cause api.Loss, books *api.GetBooksResponse) string {
	switch cause {
	case api.Loss_LOSS_EVICTED:
		return "more memory for caches" + memory(books)
	case api.Loss_LOSS_BUSY:
		return fmt.Sprintf("more engines: those that had it were %s ms dearer in the mean, by load that they already had", ms(books.GetDivertedMs()/float64(max(books.GetDivertedRequests(), 1))))
	case api.Loss_LOSS_POLICY:
		return "the policy default, which weighs what is cached: kvscout explain -compare default shows it"
	case api.Loss_LOSS_GONE:
		return "see why engines restart or leave, or bring their caches back from host memory and disk"
	case api.Loss_LOSS_ELSEWHERE:
		return "see why the proxy does not follow the picks"
	case api.Loss_LOSS_UNAVAILABLE:
		return "see the members above that fail, sleep or are silent, and what requests exclude"
	case api.Loss_LOSS_UNTRUSTED:
		return "see the members above that are not EXACT"
	case api.Loss_LOSS_MISPREDICTED:
		return "see whether callers report the engine's own cached_tokens, of the member that served them, and whether requests reach the engine in the order of their picks"
	case api.Loss_LOSS_UNKNOWN:
		return "have requests come with tokens, or engines reachable that make them: kvscout_scheduler_intake_unresolved_total counts those without"
	}
	return ""
}

// memory says how large a cache would have kept most of what was evicted.
func memory(books *api.GetBooksResponse) string {
	kept := make(map[uint32]uint64)
	var known uint64
	for _, e := range books.GetEvicted() {
		if !e.GetPoolUnknown() {
			known += e.GetTokens()
			kept[e.GetKeptByPools()] += e.GetTokens()
		}
	}
	if known == 0 {
		return ""
	}
	var sum uint64
	for pools := uint32(1); pools <= 64; pools++ {
		sum += kept[pools]
		if kept[pools] > 0 && float64(sum) >= mostOf*float64(known) {
			if pools == 1 {
				return fmt.Sprintf(": %s would have been kept by caches of their present size, if outputs and requests under way took less of them", percent(float64(sum)/float64(known)))
			}
			return fmt.Sprintf(": host memory for %d times what the GPUs hold would have kept %s", pools-1, percent(float64(sum)/float64(known)))
		}
	}
	return ": much more, as most was evicted long before it was wanted again"
}
