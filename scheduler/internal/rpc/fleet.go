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

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler/internal/admission"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

const (
	// usualInterval, shortestInterval and longestIntervalMS of WatchMembers.
	usualInterval     = time.Second
	shortestInterval  = 100 * time.Millisecond
	longestIntervalMS = 3_600_000
)

var (
	errWatchers = errors.New("too many open Watch streams")
	errCalls    = errors.New("too many calls at a time")
)

// ListMembers says who is there.
func (s *Service) ListMembers(_ context.Context, req *api.ListMembersRequest) (*api.ListMembersResponse, error) {
	return s.fleet(req.GetModel(), time.Now()), nil
}

// WatchMembers sends the fleet at once and then, at most once an interval, whenever
// anything but an age has changed.
func (s *Service) WatchMembers(req *api.WatchMembersRequest, stream grpc.ServerStreamingServer[api.WatchMembersResponse]) error {
	if s.watchers.Add(1) > int64(s.cfg.MaxWatchers) {
		s.watchers.Add(-1)
		return fmt.Errorf("watch: %d are open: %w", s.cfg.MaxWatchers, errWatchers)
	}
	defer s.watchers.Add(-1)
	interval := usualInterval
	if ms := req.GetIntervalMs(); ms > 0 {
		interval = max(shortestInterval, time.Duration(min(ms, longestIntervalMS)*float64(time.Millisecond)))
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var last *api.ListMembersResponse
	for {
		now := s.fleet(req.GetModel(), time.Now())
		if ageless := ageless(now); !proto.Equal(last, ageless) {
			last = ageless
			if err := stream.Send(&api.WatchMembersResponse{Fleet: now}); err != nil {
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
func ageless(r *api.ListMembersResponse) *api.ListMembersResponse {
	c := proto.CloneOf(r)
	c.Scheduler.TimeMs = 0
	for _, m := range c.Members {
		m.CacheState.AgeMs, m.LoadAgeMs, m.FailingForMs = 0, nil, min(m.FailingForMs, 1)
		m.Speed = &api.Speed{Learned: m.GetSpeed().GetLearned()}
	}
	return c
}

func (s *Service) fleet(model string, now time.Time) *api.ListMembersResponse {
	view := s.cfg.Fleet.View()
	r := &api.ListMembersResponse{Ready: s.cfg.Ready(), Decisions: s.cfg.Fleet.Stats().Decided, Scheduler: &api.SchedulerState{}}
	if s.cfg.Self != nil {
		r.Scheduler = s.cfg.Self()
	}
	r.Scheduler.TimeMs = float64(now.UnixMicro()) / 1000
	for _, m := range view.Members {
		if model == "" || slices.Contains(m.Info.Models, model) || m.HasAdapter(model) {
			r.Members = append(r.Members, s.memberState(view, m, now))
		}
	}
	return r
}

// withdrawals by what they are in the API.
var withdrawals = [fleet.Withdrawals]api.Ineligible{
	fleet.Cordoned: api.Ineligible_INELIGIBLE_CORDONED,
	fleet.NotReady: api.Ineligible_INELIGIBLE_NOT_READY,
	fleet.Evicted:  api.Ineligible_INELIGIBLE_EVICTED,
	fleet.Deleting: api.Ineligible_INELIGIBLE_DELETING,
	fleet.Ended:    api.Ineligible_INELIGIBLE_ENDED,
}

func (s *Service) memberState(view *fleet.View, m *fleet.Member, now time.Time) *api.MemberState {
	reserved, reported := m.Reserved(), m.Reported()
	st := &api.MemberState{
		Member:                &api.Member{},
		CacheState:            &api.CacheState{},
		Models:                m.Info.Models,
		EngineVersion:         m.Info.EngineVersion,
		AgentRelease:          m.Info.AgentRelease,
		BlockSizeTokens:       uint32(m.Info.BlockSize),
		CapacityBlocks:        m.Info.Blocks,
		HeldGpuBlocks:         m.CacheState.Held[0],
		HeldHostBlocks:        m.CacheState.Held[1],
		HeldDiskBlocks:        m.CacheState.Held[2],
		ReservedTokens:        reserved.Tokens,
		ReservedRequests:      uint32(max(0, reserved.Unsampled)),
		ReportedRequests:      reported.Requests,
		ReportedPromptTokens:  reported.PromptTokens,
		ReportedCachedTokens:  reported.CachedTokens,
		PredictedCachedTokens: reported.PredictedTokens,
		Speed:                 speedOf(s.cfg.Picker.Speed(m)),
	}
	if age, ok := loadAge(m, now); ok {
		st.LoadAgeMs = &age
	}
	failing := m.Failing().Until(now)
	if !failing.IsZero() {
		st.FailingForMs = max(1, milliseconds(failing.Sub(now)))
	}
	switch {
	case m.Load.Sleeping:
		st.Ineligible = api.Ineligible_INELIGIBLE_SLEEPING
	case view.Silent(m, now):
		st.Ineligible = api.Ineligible_INELIGIBLE_SILENT
	case m.Load.Unreachable:
		st.Ineligible = api.Ineligible_INELIGIBLE_UNREACHABLE
	case !failing.IsZero():
		st.Ineligible = api.Ineligible_INELIGIBLE_FAILING
	case m.Withdrawn != fleet.InService:
		st.Ineligible = withdrawals[m.Withdrawn]
	}
	setMember(st.Member, m)
	setState(st.CacheState, m, view.Believe(m, now), now)
	st.Labels, st.Warning = m.Info.Labels, s.warn(m.Info.Name)
	for _, a := range m.Info.Adapters {
		st.Adapters = append(st.Adapters, a.Name)
	}
	if m.Load.Running >= 0 {
		st.RunningRequests = proto.Uint32(uint32(m.Load.Running))
	}
	if m.Load.Waiting >= 0 {
		st.WaitingRequests = proto.Uint32(uint32(m.Load.Waiting))
	}
	if !math.IsNaN(m.Load.KVUsage) {
		st.KvUsage = proto.Float64(m.Load.KVUsage)
	}
	return st
}

func speedOf(l learn.Speed) *api.Speed {
	sp := &api.Speed{
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
		sp.PrefillBusy = proto.Float64(l.Busy)
	}
	return sp
}

func setMember(to *api.Member, m *fleet.Member) {
	to.Id, to.Namespace, to.Pod = m.Info.Name, m.Info.Namespace, m.Info.Pod
	to.Address, to.Tls, to.Rank = m.Info.Address, m.Info.TLS, uint32(m.Info.Rank)
}

// setState writes what is believed of a member's cache.
func setState(to *api.CacheState, m *fleet.Member, b fleet.Belief, now time.Time) {
	to.Trust, to.Explanation = api.Trust(b.Trust.Wire()), b.Reason
	to.Epoch, to.Sequence, to.EngineBatches = m.CacheState.Epoch, m.CacheState.Sequence, m.CacheState.EngineBatches
	to.AgeMs = milliseconds(now.Sub(m.LastHeartbeat))
}

// loadAge is that of the load sample in ms; false: there is none.
func loadAge(m *fleet.Member, now time.Time) (float64, bool) {
	if m.Load.At.IsZero() {
		return 0, false
	}
	return milliseconds(now.Sub(m.Load.At)), true
}

func milliseconds(d time.Duration) float64 { return float64(max(d, 0)) / float64(time.Millisecond) }
