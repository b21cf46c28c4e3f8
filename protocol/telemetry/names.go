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
	// from its member: gone, full, slow, crowded.
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
	// LabelEvent: name of a counted event, for groups of rare counters.
	LabelEvent = "event"
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

// Metrics of the scheduler. Units follow UCUM; the metrics page appends them.
const (
	// SchedulerDecisions counts answers to Pick and Score (method, policy,
	// reason, fallback).
	SchedulerDecisions = "kvscout.scheduler.decisions"
	// SchedulerHitTokens are the stages from prompts to hits, in tokens of
	// requests that were picked (stage: prompt; ideal, the longest prefix that any
	// member has; feasible, the longest that a candidate has; routed, that of the
	// member chosen). SchedulerLostTokens are lost on the way (stage: unavailable,
	// between ideal and feasible; diversion, between feasible and routed; index,
	// predicted and not delivered, of requests that were reported).
	SchedulerHitTokens  = "kvscout.scheduler.hit.tokens"
	SchedulerLostTokens = "kvscout.scheduler.lost.tokens"
	// SchedulerDelivered are cached tokens of reported requests (stage: prompt,
	// predicted, delivered), since the start.
	SchedulerDelivered = "kvscout.scheduler.delivered.tokens"
	// SchedulerStickyBroken counts requests of a session, or of a conversation
	// that was recognised, that did not go to its last member (reason).
	SchedulerStickyBroken = "kvscout.scheduler.sticky_broken"
	// SchedulerShadowDecisions counts decisions that were shown to the policy that
	// does not decide (policy, shadow, same). SchedulerShadowTime and
	// SchedulerShadowTokens: predicted time to the first token, and cached tokens,
	// that following it would have taken more or less (policy, shadow, direction).
	SchedulerShadowDecisions = "kvscout.scheduler.shadow.decisions"
	SchedulerShadowTime      = "kvscout.scheduler.shadow.first_token"
	SchedulerShadowTokens    = "kvscout.scheduler.shadow.cached_tokens"
	// SchedulerDecisionDuration is the time from decoded request to answer, in
	// seconds (method).
	SchedulerDecisionDuration = "kvscout.scheduler.decision.duration"
	// SchedulerOpenDecisions are decisions that can still be reported.
	SchedulerOpenDecisions = "kvscout.scheduler.decisions.open"
	// SchedulerReports counts calls of Report (outcome).
	SchedulerReports = "kvscout.scheduler.reports"
	// SchedulerPromptTokens, SchedulerCachedTokens: the engines' own counts as
	// reported; SchedulerPredictedTokens: what was predicted for the same
	// requests. Sums over the members that are there.
	SchedulerPromptTokens    = "kvscout.scheduler.reported.prompt_tokens"
	SchedulerCachedTokens    = "kvscout.scheduler.reported.cached_tokens"
	SchedulerPredictedTokens = "kvscout.scheduler.reported.predicted_cached_tokens"

	// SchedulerFleetEvents counts what became of decisions and members (event).
	SchedulerFleetEvents = "kvscout.scheduler.fleet.events"
	// SchedulerMembers counts members (trust).
	SchedulerMembers = "kvscout.scheduler.members"
	// SchedulerAddresses counts members with something wrong with their address
	// (event: unvouched, shared, loopback).
	SchedulerAddresses = "kvscout.scheduler.addresses"
	// SchedulerLearned counts members whose speed was learned from themselves,
	// SchedulerPrefillSpeed is what members compute in a second (stat: min,
	// median, max).
	SchedulerLearned      = "kvscout.scheduler.members.learned"
	SchedulerPrefillSpeed = "kvscout.scheduler.prefill.speed"
	// SchedulerReady is 1 when every announced member is exact, or the wait is over.
	SchedulerReady = "kvscout.scheduler.ready"
	// SchedulerConnected is 1 while members can be heard over NATS.
	SchedulerConnected = "kvscout.scheduler.connected"

	// SchedulerIndexBlocks, ...Entries, ...Bytes: distinct blocks, (member, lane,
	// block) entries, and bytes in use.
	SchedulerIndexBlocks  = "kvscout.scheduler.index.blocks"
	SchedulerIndexEntries = "kvscout.scheduler.index.entries"
	SchedulerIndexBytes   = "kvscout.scheduler.index.bytes"
	// SchedulerIndexEvents counts what happened in the index (event).
	SchedulerIndexEvents = "kvscout.scheduler.index.events"
	// SchedulerSentBlocks are what members are believed to hold because it was
	// sent there, SchedulerSentEvents count what was noted of that (event).
	SchedulerSentBlocks = "kvscout.scheduler.sent.blocks"
	SchedulerSentEvents = "kvscout.scheduler.sent.events"
	// SchedulerConfirm is how long a prediction is believed.
	SchedulerConfirm = "kvscout.scheduler.predictions.confirm"

	// SchedulerIngestEvents counts messages and what became of them (event).
	SchedulerIngestEvents = "kvscout.scheduler.ingest.events"

	// SchedulerSnapshotsAwaited are snapshots asked for and not there yet.
	SchedulerSnapshotsAwaited = "kvscout.scheduler.ingest.snapshots.awaited"

	// SchedulerAwaitedBytes are held of snapshots that are not complete, and of
	// deltas that wait for them.
	SchedulerAwaitedBytes = "kvscout.scheduler.ingest.awaited.bytes"

	// SchedulerPeers are other schedulers of the pool that are heard,
	// SchedulerPeerEvents count what they and this one told each other (event).
	SchedulerPeers      = "kvscout.scheduler.peers"
	SchedulerPeerEvents = "kvscout.scheduler.peer.events"

	// SchedulerIntakePrompts counts prompts by what the caller sent (source).
	SchedulerIntakePrompts = "kvscout.scheduler.intake.prompts"
	// SchedulerIntakeCalls counts requests to engines (endpoint, outcome).
	SchedulerIntakeCalls = "kvscout.scheduler.intake.calls"
	// SchedulerIntakeEvents counts cache hits, misses, evictions, shared calls
	// and prompts that stayed without tokens (event).
	SchedulerIntakeEvents = "kvscout.scheduler.intake.events"
	// SchedulerIntakeCacheBytes are held by the cache of rendered prompts.
	SchedulerIntakeCacheBytes = "kvscout.scheduler.intake.cache.bytes"

	// SchedulerQueueWaiting requests wait for room, SchedulerQueueBytes are what
	// they take; SchedulerQueueEvents counts what became of requests that had to
	// wait (event), SchedulerQueueDuration is how long requests waited that got a
	// place, 0 for those that did not have to.
	SchedulerQueueWaiting  = "kvscout.scheduler.queue.waiting"
	SchedulerQueueBytes    = "kvscout.scheduler.queue.bytes"
	SchedulerQueueEvents   = "kvscout.scheduler.queue.events"
	SchedulerQueueDuration = "kvscout.scheduler.queue.duration"

	// SchedulerProfiles are in use; SchedulerProfileEvents counts loads, refusals
	// and candidates of whose requests a profile says nothing (event).
	SchedulerProfiles      = "kvscout.scheduler.profiles"
	SchedulerProfileEvents = "kvscout.scheduler.profile.events"

	// SchedulerRefused counts calls and connections that were refused because
	// there were too many (event).
	SchedulerRefused = "kvscout.scheduler.refused"
	// SchedulerPanics counts calls that ended in a panic.
	SchedulerPanics = "kvscout.scheduler.panics"
	// SchedulerWatchers are open Watch streams.
	SchedulerWatchers = "kvscout.scheduler.watchers"
)
