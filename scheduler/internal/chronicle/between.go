package chronicle

import (
	"strings"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Between is what changed from one answer to the next, in the order of members,
// without times; from nil, who is there.
func Between(last, now *api.ListMembersResponse) (list []*api.Change) {
	before := make(map[string]*api.MemberState, len(last.GetMembers()))
	for _, m := range last.GetMembers() {
		before[m.GetMember().GetId()] = m
	}
	for _, m := range now.GetMembers() {
		id := m.GetMember().GetId()
		was := before[id]
		delete(before, id)
		if was == nil {
			what := "joined"
			if last == nil {
				what = "there"
			}
			list = append(list, &api.Change{MemberId: id, What: what, To: Trust(m.GetCacheState().GetTrust()), Why: Reason(m)})
			continue
		}
		list = append(list, different(id, was, m)...)
	}
	for _, m := range last.GetMembers() {
		if id := m.GetMember().GetId(); before[id] != nil {
			list = append(list, &api.Change{MemberId: id, What: "left"})
		}
	}
	if was, is := last.GetScheduler().GetReadiness(), now.GetScheduler().GetReadiness(); was != is {
		list = append(list, &api.Change{What: "scheduler", From: was, To: is})
	}
	return list
}

// different is what changed of one member.
func different(id string, was, is *api.MemberState) (list []*api.Change) {
	add := func(what, from, to, why string) {
		if from != to {
			list = append(list, &api.Change{MemberId: id, What: what, From: from, To: to, Why: why})
		}
	}
	if a, b := was.GetCacheState().GetEpoch(), is.GetCacheState().GetEpoch(); a != b && a != 0 && b != 0 {
		add("incarnation", since(a), since(b), "another process of the engine, or its cache was dropped")
	}
	trust := len(list)
	add("trust", Trust(was.GetCacheState().GetTrust()), Trust(is.GetCacheState().GetTrust()), is.GetCacheState().GetExplanation())
	if trust == len(list) {
		add("reason", was.GetCacheState().GetExplanation(), is.GetCacheState().GetExplanation(), "")
	}
	add("eligible", eligible(was), eligible(is), "")
	add("warning", was.GetWarning(), is.GetWarning(), "")
	add("address", was.GetMember().GetAddress(), is.GetMember().GetAddress(), "")
	add("models", names(was.GetModels()), names(is.GetModels()), "")
	add("adapters", names(was.GetAdapters()), names(is.GetAdapters()), "")
	add("engine", was.GetEngineVersion(), is.GetEngineVersion(), "")
	add("agent", was.GetAgentRelease(), is.GetAgentRelease(), "")
	return list
}

// names as a text; one has mostly the same, which costs nothing.
func names(list []string) string {
	if len(list) == 1 {
		return list[0]
	}
	return strings.Join(list, ",")
}

func eligible(m *api.MemberState) string {
	if m.GetIneligible() == api.Ineligible_INELIGIBLE_UNSPECIFIED {
		return "yes"
	}
	return strings.ToLower(strings.TrimPrefix(m.GetIneligible().String(), "INELIGIBLE_"))
}

// since is when an incarnation began.
func since(epoch uint64) string {
	return time.Unix(0, int64(epoch)).Format("15:04:05.000")
}
