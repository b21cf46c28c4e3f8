package client

import (
	"slices"
	"strconv"
	"strings"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// ControlHeaders of a client's request are for the scheduler alone: an engine need
// not see them.
var ControlHeaders = []string{
	"x-llm-d-inference-objective", "x-gateway-inference-objective", "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id",
	"x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-ttft-ms", "x-slo-tpot-ms",
}

// Request is what the headers of an HTTP request, by their names in lower case,
// say to the scheduler: tenant, targets, and what sessions go by.
func Request(headers map[string]string) *api.Request {
	return &api.Request{
		Headers: headers,
		Tenant:  first(headers, "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"),
		Slo: &api.Slo{
			TtftMs: milliseconds(first(headers, "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")),
			TpotMs: milliseconds(first(headers, "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")),
		},
	}
}

// Objective that the request names, by whatever name it has there.
func Objective(headers map[string]string) string {
	return first(headers, "x-llm-d-inference-objective", "x-gateway-inference-objective")
}

// milliseconds of a header; what is none is no target.
func milliseconds(text string) float64 {
	ms, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || !(ms > 0) || ms > 1e9 {
		return 0
	}
	return ms
}

func first(headers map[string]string, names ...string) string {
	i := slices.IndexFunc(names, func(n string) bool { return headers[n] != "" })
	if i < 0 {
		return ""
	}
	return headers[names[i]]
}

const (
	// RankHeader tells vLLM which of its data-parallel ranks is to serve a request.
	RankHeader = "x-data-parallel-rank"
	// PrefillHeader and PullHeader tell the proxy beside the engine, as llm-d's, who
	// is to compute the prompt, and whose cache has what can be pulled.
	PrefillHeader = "x-prefiller-host-port"
	PullHeader    = "x-kv-cache-source-host-port"
)

// headersOf a decision are for the engine. Ranks that share an address are seen
// where several of them are candidates.
func headersOf(r *api.Ranking) map[string]string {
	headers := make(map[string]string)
	best, to := r.GetCandidates()[0], target(r)
	if pull := best.GetPull().GetFrom().GetAddress(); pull != "" {
		headers[PullHeader] = pull
	}
	if r.GetDecode() != nil {
		headers[PrefillHeader] = best.GetMember().GetAddress()
	}
	for _, c := range r.GetCandidates() {
		if m := c.GetMember(); m.GetAddress() == to.GetAddress() && m.GetRank() != to.GetRank() {
			headers[RankHeader] = strconv.FormatUint(uint64(to.GetRank()), 10)
		}
	}
	return headers
}

// target of a decision: who decodes is asked, and has the prompt computed by the
// first candidate, if that is another one.
func target(r *api.Ranking) *api.Member {
	if d := r.GetDecode(); d != nil {
		return d.GetMember()
	}
	return r.GetCandidates()[0].GetMember()
}
