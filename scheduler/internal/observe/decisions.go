package observe

import (
	"context"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvscout/kvscout/protocol/telemetry"
	"github.com/kvscout/kvscout/scheduler/internal/pick"
	"github.com/kvscout/kvscout/scheduler/internal/rpc"
)

// decisions counts what was decided. The attributes of an answer are made once
// for each combination, and counting allocates nothing then.
type decisions struct {
	count    metric.Int64Counter
	duration metric.Float64Histogram
	intake   metric.Float64Histogram
	shadows  metric.Int64Counter
	time     metric.Float64Counter
	tokens   metric.Int64Counter

	mu      sync.RWMutex // guards what follows
	made    map[answer]answerOptions
	shadowy map[shadow]shadowOptions
}

// answer is what decisions are told apart by: methods, policies, reasons, and
// two.
type answer struct {
	method, policy string
	reason         pick.Why
	fallback       bool
}

type answerOptions struct {
	count  []metric.AddOption
	record []metric.RecordOption
}

// shadow is what counterfactuals are told apart by.
type shadow struct {
	policy, shadow string
	same           bool
}

type shadowOptions struct{ count, more, less []metric.AddOption }

func newDecisions(b *builder) *decisions {
	return &decisions{
		made:     make(map[answer]answerOptions),
		shadowy:  make(map[shadow]shadowOptions),
		count:    b.counter("kvscout.scheduler.decisions", "{decision}", "Answers to Pick and Score."),
		duration: b.seconds("kvscout.scheduler.decision.duration", "Time from a prompt of tokens to the answer, but for waiting.", durations),
		intake:   b.seconds("kvscout.scheduler.intake.duration", "Time from decoded request to a prompt of tokens.", durations),
		shadows:  b.counter("kvscout.scheduler.shadow.decisions", "{decision}", "Decisions shown to the policy that does not decide."),
		time:     b.floatCounter("kvscout.scheduler.shadow.first_token", "s", "Predicted time to the first token, more or less by the policy that does not decide."),
		tokens:   b.counter("kvscout.scheduler.shadow.cached_tokens", "{token}", "Cached tokens, more or less by the policy that does not decide."),
	}
}

// decided counts an answer.
func (m *decisions) decided(ctx context.Context, d *rpc.Decided) {
	o := m.options(answer{method: d.Method, policy: d.Decision.Policy, reason: d.Decision.Why, fallback: len(d.Decision.Fallbacks) > 0})
	m.count.Add(ctx, 1, o.count...)
	m.duration.Record(ctx, (d.Took - d.Intake).Seconds(), o.record...)
	m.intake.Record(ctx, d.Intake.Seconds(), o.record...)
	s := &d.Decision.Shadow
	if s.Policy == "" {
		return
	}
	x := m.shadowOptions(shadow{policy: d.Decision.Policy, shadow: s.Policy, same: s.Same})
	m.shadows.Add(ctx, 1, x.count...)
	switch {
	case s.FirstTokenMS > 0:
		m.time.Add(ctx, s.FirstTokenMS/1000, x.more...)
	case s.FirstTokenMS < 0:
		m.time.Add(ctx, -s.FirstTokenMS/1000, x.less...)
	}
	switch {
	case s.CachedTokens > 0:
		m.tokens.Add(ctx, int64(s.CachedTokens), x.more...)
	case s.CachedTokens < 0:
		m.tokens.Add(ctx, int64(-s.CachedTokens), x.less...)
	}
}

func (m *decisions) options(a answer) answerOptions {
	m.mu.RLock()
	o, ok := m.made[a]
	m.mu.RUnlock()
	if ok {
		return o
	}
	method := attribute.String(telemetry.LabelMethod, a.method)
	o = answerOptions{
		count: adding(method, attribute.String(telemetry.LabelPolicy, a.policy),
			attribute.String(telemetry.LabelReason, a.reason.String()), attribute.Bool(telemetry.LabelFallback, a.fallback)),
		record: []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(method))},
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.made[a] = o
	return o
}

func (m *decisions) shadowOptions(s shadow) shadowOptions {
	m.mu.RLock()
	o, ok := m.shadowy[s]
	m.mu.RUnlock()
	if ok {
		return o
	}
	both := []attribute.KeyValue{attribute.String(telemetry.LabelPolicy, s.policy), attribute.String(telemetry.LabelShadow, s.shadow)}
	with := func(kv attribute.KeyValue) []metric.AddOption { return adding(both[0], both[1], kv) }
	o = shadowOptions{
		count: with(attribute.Bool(telemetry.LabelSame, s.same)),
		more:  with(attribute.String(telemetry.LabelDirection, "more")),
		less:  with(attribute.String(telemetry.LabelDirection, "less")),
	}
	for _, none := range [][]metric.AddOption{o.more, o.less} { // who reads a rate needs the start
		m.time.Add(context.Background(), 0, none...)
		m.tokens.Add(context.Background(), 0, none...)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shadowy[s] = o
	return o
}

func adding(attributes ...attribute.KeyValue) []metric.AddOption {
	return []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(attributes...))}
}
