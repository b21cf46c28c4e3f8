package telemetry

import "strconv"

// Scope is the instrumentation scope of everything that kvscout records.
const Scope = "github.com/kvscout/kvscout"

// Attributes of the resource.
const (
	AttrServiceName    = "service.name"
	AttrInstance       = "service.instance.id"
	AttrServiceVersion = "service.version"
)

// Labels of metrics: their attributes. Every one has a bounded set of values.
const (
	// LabelMethod: pick or score.
	LabelMethod = "method"
	// LabelPolicy: name of the scoring policy that was applied.
	LabelPolicy = "policy"
	// LabelFallback: true when the answer does not stand on exact prefixes.
	LabelFallback = "fallback"
	// LabelTrust: exact, syncing, approximate, unknown.
	LabelTrust = "trust"
	// LabelOutcome of a decision, a call or a message.
	LabelOutcome = "outcome"
	// LabelEndpoint of an engine that turns text into tokens.
	LabelEndpoint = "endpoint"
	// LabelSource: the form in which a caller sent a prompt.
	LabelSource = "source"
	// LabelReason: why the first candidate is first, in one word: cost, near
	// (others were as good), session, only, policy. Of a session that was taken
	// from its member: gone, full, slow, crowded. Of what was lost or discarded:
	// why.
	LabelReason = "reason"
	// LabelShadow: name of the policy that does not decide. LabelSame: it would
	// have decided the same. LabelDirection: more or less than what was done.
	LabelShadow    = "shadow"
	LabelSame      = "same"
	LabelDirection = "direction"
	// LabelStat: min, median, max.
	LabelStat = "stat"
	// LabelStage on the way from prompts to cache hits.
	LabelStage = "stage"
	// LabelCause that prompt tokens were lost to.
	LabelCause = "cause"
	// LabelKept: the multiple of a cache that would have kept what was evicted.
	LabelKept = "kept"
	// LabelKind of messages, faults and events.
	LabelKind = "kind"
	// LabelState of blocks.
	LabelState = "state"
	// LabelProblem with an address: unvouched, shared, loopback.
	LabelProblem = "problem"
	// LabelRank: the data-parallel rank.
	LabelRank = "rank"
	// LabelLane: gpu, host, disk.
	LabelLane = "lane"
)

// Attributes of spans, without bounds on their values.
const (
	// What the labels of the same names say.
	AttrMethod  = "kvscout.method"
	AttrPolicy  = "kvscout.policy"
	AttrReason  = "kvscout.reason"
	AttrTrust   = "kvscout.trust"
	AttrOutcome = "kvscout.outcome"
	AttrShadow  = "kvscout.shadow"
	AttrSame    = "kvscout.same"
	// AttrDecision: id of the decision, as named in Report.
	AttrDecision = "kvscout.decision"
	// AttrMember: the member that came first.
	AttrMember = "kvscout.member"
	// AttrFallbackReason: what was missing; empty for an exact answer.
	AttrFallbackReason = "kvscout.fallback.reason"
	// AttrPromptTokens and AttrCachedTokens: the prompt's length, and how much
	// of it the first member's cache state promises.
	AttrPromptTokens = "kvscout.prompt_tokens"
	AttrCachedTokens = "kvscout.cached_tokens"
)

// Spans, and what they say beside the attributes above.
const (
	// SpanDecision is one decision, below the call's span. It links to the span of
	// the last delta that changed the first member's cache state, where the agent
	// recorded one.
	SpanDecision = "kvscout.decision"
	// SpanTokenize is the time in which an engine turned a prompt into tokens,
	// SpanWait that in which a request waited for room, both below the call's span.
	SpanTokenize = "kvscout.tokenize"
	SpanWait     = "kvscout.wait"
	// AttrRequest, AttrSession and AttrTenant: what the caller calls them.
	// AttrAddress: where the request was sent.
	AttrRequest = "kvscout.request"
	AttrSession = "kvscout.session"
	AttrTenant  = "kvscout.tenant"
	AttrAddress = "kvscout.address"
	// SpanPublish is one delta sent by an agent.
	SpanPublish = "kvscout.publish"
	// AttrModel of the request, as the convention for models names it.
	AttrModel = "gen_ai.request.model"
	// AttrPredictedTokens are sent and not confirmed.
	AttrPredictedTokens = "kvscout.predicted_tokens"
	// AttrDepth: leading blocks that the first member has.
	AttrDepth = "kvscout.depth"
	// AttrCandidates: how many there were. AttrTop, AttrTopMS and AttrTopCached:
	// names of the first three, their costs in ms, and their cached tokens.
	AttrCandidates = "kvscout.candidates"
	AttrTop        = "kvscout.top.members"
	AttrTopMS      = "kvscout.top.ms"
	AttrTopCached  = "kvscout.top.cached_tokens"
	// AttrReceipt: the reason in a sentence.
	AttrReceipt = "kvscout.receipt"
	// AttrAge: ms since the first member was heard.
	AttrAge = "kvscout.age_ms"
	// AttrEpoch and AttrSequence: the last change of the first member's cache state.
	// An epoch is written as decimal digits: it does not fit a signed number.
	AttrEpoch    = "kvscout.epoch"
	AttrSequence = "kvscout.sequence"
	// AttrKeys changed by a delta.
	AttrKeys = "kvscout.keys"
)

// Epoch writes an epoch as AttrEpoch does.
func Epoch(e uint64) string { return strconv.FormatUint(e, 10) }
