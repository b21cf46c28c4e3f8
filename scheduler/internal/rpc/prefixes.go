package rpc

import (
	"context"
	"fmt"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/intake"
)

const (
	// usualPrefixes of an answer, and how many holders each has there.
	usualPrefixes, maxHolders = 20, 64
)

// ListPrefixes says what prompts share.
func (s *Service) ListPrefixes(_ context.Context, req *api.ListPrefixesRequest) (*api.ListPrefixesResponse, error) {
	most := int(req.GetMaxPrefixes())
	switch {
	case most == 0:
		most = usualPrefixes
	case most > books.MaxPrefixes:
		return nil, fmt.Errorf("max_prefixes %d, the limit is %d: %w", most, books.MaxPrefixes, intake.ErrInvalid)
	}
	now := time.Now()
	resp := new(api.ListPrefixesResponse)
	for _, p := range s.cfg.Picker.Prefixes(req.GetModel(), most, now) {
		to := &api.Prefix{
			Key: uint64(p.Keys[len(p.Keys)-1]), Model: p.Model, Tokens: uint32(p.Tokens()), Hits: p.Hits, Parted: p.Parted,
			UsedAgeMs: milliseconds(max(now.Sub(p.LastUsed), 0)), HolderCount: uint32(len(p.Holders)),
		}
		for _, h := range p.Holders[:min(len(p.Holders), maxHolders)] {
			holder := &api.PrefixHolder{Member: new(api.Member), CachedTokens: &api.CachedTokens{Gpu: uint32(h.Cached.GPU), Host: uint32(h.Cached.Host), Disk: uint32(h.Cached.Disk)}}
			setMember(holder.Member, h.Member)
			to.Holders = append(to.Holders, holder)
		}
		resp.Prefixes = append(resp.Prefixes, to)
	}
	return resp, nil
}
