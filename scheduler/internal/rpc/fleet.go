package rpc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

const (
	// usualInterval and shortestInterval of Watch.
	usualInterval    = time.Second
	shortestInterval = 100 * time.Millisecond
)

var (
	errWatchers = errors.New("too many open Watch streams")
	errCalls    = errors.New("too many calls at a time")
)

// Fleet says who is there.
func (s *Service) Fleet(_ context.Context, req *pb.FleetRequest) (*pb.FleetResponse, error) {
	return s.fleet(req.GetModel(), time.Now()), nil
}

// Watch sends the fleet at once and then, at most once an interval, whenever
// anything but an age has changed.
func (s *Service) Watch(req *pb.WatchRequest, stream grpc.ServerStreamingServer[pb.WatchResponse]) error {
	if s.watchers.Add(1) > int64(s.cfg.MaxWatchers) {
		s.watchers.Add(-1)
		return fmt.Errorf("watch: %d are open: %w", s.cfg.MaxWatchers, errWatchers)
	}
	defer s.watchers.Add(-1)
	interval := usualInterval
	if ms := req.GetIntervalMs(); ms > 0 {
		interval = max(shortestInterval, time.Duration(ms)*time.Millisecond)
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var last *pb.FleetResponse
	for {
		now := s.fleet(req.GetModel(), time.Now())
		if ageless := ageless(now); !proto.Equal(last, ageless) {
			last = ageless
			if err := stream.Send(&pb.WatchResponse{Fleet: now}); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-s.closed:
			return admission.ErrClosed
		case <-tick.C:
		}
	}
}

// ageless returns a copy in which only changes differ. Of the speed, which is
// learned all the time, that is whether it is the member's own.
func ageless(r *pb.FleetResponse) *pb.FleetResponse {
	c := proto.CloneOf(r)
	for _, m := range c.Members {
		m.Picture.AgeMs, m.LoadAgeMs, m.FailingMs = 0, 0, min(m.FailingMs, 1)
		m.Speed = &pb.Speed{Learned: m.GetSpeed().GetLearned()}
	}
	return c
}

func (s *Service) fleet(model string, now time.Time) *pb.FleetResponse {
	view := s.cfg.Fleet.View()
	r := &pb.FleetResponse{Ready: s.cfg.Ready(), Decisions: s.cfg.Fleet.Stats().Decided}
	for _, m := range view.Members {
		if model == "" || slices.Contains(m.Info.Models, model) || m.HasAdapter(model) {
			r.Members = append(r.Members, s.memberState(view, m, now))
		}
	}
	return r
}

func (s *Service) memberState(view *fleet.View, m *fleet.Member, now time.Time) *pb.MemberState {
	reserved, reported := m.Reserved(), m.Reported()
	st := &pb.MemberState{
		Member:                &pb.Member{},
		Picture:               &pb.Picture{},
		Models:                m.Info.Models,
		EngineVersion:         m.Info.EngineVersion,
		BlockSize:             uint32(m.Info.BlockSize),
		Blocks:                m.Info.Blocks,
		HeldGpu:               m.Picture.Held[0],
		HeldHost:              m.Picture.Held[1],
		HeldDisk:              m.Picture.Held[2],
		LoadAgeMs:             loadAge(m, now),
		ReservedTokens:        reserved.Tokens,
		ReservedRequests:      uint32(max(0, reserved.Unseen)),
		Chosen:                !view.Silent(m, now) && !m.Load.Sleeping && !m.Load.Unreachable,
		ReportedRequests:      reported.Requests,
		ReportedPromptTokens:  reported.PromptTokens,
		ReportedCachedTokens:  reported.CachedTokens,
		PredictedCachedTokens: reported.PredictedTokens,
		Speed:                 speedOf(s.cfg.Picker.Speed(m)),
	}
	if until := m.Failing().Until(now); !until.IsZero() {
		st.FailingMs, st.Chosen = max(1, milliseconds(until.Sub(now))), false
	}
	setMember(st.Member, m)
	setPicture(st.Picture, m, view.Believe(m, now), now)
	st.Labels, st.Warning = m.Info.Labels, s.warn(m.Info.Name)
	for _, a := range m.Info.Adapters {
		st.Adapters = append(st.Adapters, a.Name)
	}
	if m.Load.Running >= 0 {
		st.Running = proto.Uint32(uint32(m.Load.Running))
	}
	if m.Load.Waiting >= 0 {
		st.Waiting = proto.Uint32(uint32(m.Load.Waiting))
	}
	if !math.IsNaN(m.Load.KVUsage) {
		st.KvUsage = proto.Float64(m.Load.KVUsage)
	}
	return st
}

func speedOf(l learn.Speed) *pb.Speed {
	sp := &pb.Speed{
		Learned:     l.Learned,
		RequestMs:   l.A,
		TokenMs:     l.B,
		ContextMs:   l.C,
		HostTokenMs: l.HostMS,
		DiskTokenMs: l.DiskMS,
		StepMs:      l.StepBaseMS,

		StepRequestMs: l.StepRequestMS,
		OverheadMs:    l.OverheadMS,
	}
	if !math.IsNaN(l.Busy) {
		sp.Busy = proto.Float64(l.Busy)
	}
	return sp
}

func setMember(to *pb.Member, m *fleet.Member) {
	to.Id, to.Namespace, to.Pod = m.Info.Name, m.Info.Namespace, m.Info.Pod
	to.Address, to.Rank = m.Info.Address, uint32(m.Info.Rank)
}

// setPicture writes a member's picture as far as it is believed.
func setPicture(to *pb.Picture, m *fleet.Member, b fleet.Belief, now time.Time) {
	to.Trust, to.Reason = trustOf(b.Trust), b.Reason
	to.Epoch, to.Sequence, to.EngineBatches = m.Picture.Epoch, m.Picture.Sequence, m.Picture.EngineBatches
	to.AgeMs = milliseconds(now.Sub(m.Heard))
}

func trustOf(t fleet.Trust) pb.Trust {
	switch t {
	case fleet.Exact:
		return pb.Trust_TRUST_EXACT
	case fleet.Syncing:
		return pb.Trust_TRUST_SYNCING
	case fleet.Approximate:
		return pb.Trust_TRUST_APPROXIMATE
	}
	return pb.Trust_TRUST_UNKNOWN
}

// loadAge is that of the load sample; the largest number when there was none.
func loadAge(m *fleet.Member, now time.Time) uint32 {
	if m.Load.At.IsZero() {
		return math.MaxUint32
	}
	return milliseconds(now.Sub(m.Load.At))
}

func milliseconds(d time.Duration) uint32 {
	return uint32(min(max(d.Milliseconds(), 0), math.MaxUint32))
}
