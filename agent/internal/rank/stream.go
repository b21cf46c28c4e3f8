package rank

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/reconcile"
	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// stream is what is known of whose events a rank gets. An endpoint alone verifies
// nothing: another engine may listen where this one is believed to.
type stream struct {
	flow     reconcile.Flow
	check    reconcile.Check
	whole    bool   // the flow began with the engine's process
	next     uint64 // sequence that the flow goes on with
	repeated uint64 // blocks that the mirror had counted as repeated when the flow began

	// foreign says why the events are not this engine's; empty: they may be.
	// Nothing of them is believed meanwhile.
	foreign     string
	connections uint64 // made when that was found
	// trial: the stream before was foreign, and this one is not believed before it
	// was compared.
	trial bool
	found uint64 // how often a stream was foreign
}

// begin starts a flow: an incarnation of the engine at the other end begins. A
// connection that outlives it still leads to whom it led before.
func (s *stream) begin(repeated uint64, tail vllm.TailStats) {
	if s.foreign != "" && (!tail.Connected || tail.Connections != s.connections) {
		s.elsewhere()
	}
	s.flow, s.whole, s.next, s.repeated = reconcile.Flow{}, true, 0, repeated
	s.check.Reset()
}

// resume goes on with a flow whose beginning another process has seen.
func (s *stream) resume(at vllm.Mark, repeated uint64) {
	s.whole, s.next, s.repeated = false, at.Sequence+1, repeated
}

// elsewhere says that the stream is about to be another one.
func (s *stream) elsewhere() {
	s.trial = s.trial || s.foreign != ""
	s.foreign = ""
}

// take counts a batch. What lost ones before it announced is not known, so that
// growth is measured anew; and what opens a prompt may repeat what is held.
func (s *stream) take(at vllm.Mark, b *vllm.Batch) {
	if at.Sequence != s.next {
		s.whole = false
		s.check.Reset()
	}
	s.next = at.Sequence + 1
	for i := range b.Events {
		if e := &b.Events[i]; e.Kind == vllm.Stored && e.Store.Tier == mirror.GPU {
			st := &e.Store
			s.flow.Store(st.Group, st.BlockSize, len(st.Tokens), at.Whole || st.HasParent || st.Physical)
		}
	}
}

func (r *Rank) flowLocked() reconcile.Totals {
	repeated := r.mirror.Stats().Repeated
	return r.stream.flow.Totals(repeated-min(repeated, r.stream.repeated), r.blockSizeLocked())
}

// reconcileLocked holds the stream against what the engine has counted, as it
// was asked at a time. steady: the stream's state has not changed since the poll
// began.
func (r *Rank) reconcileLocked(l *vllm.Load, resets float64, asked time.Time, steady bool) {
	s := &r.stream
	counters, ok := r.countersLocked(l, resets)
	if !ok {
		s.trial = false // there is nothing to hold it against
		return
	}
	if !steady || r.trust == vllm.Syncing {
		s.check.Interrupt()
		return
	}
	s.check.Observe(asked, time.Now(), counters, r.flowLocked(), s.whole && r.trust == vllm.Exact && s.foreign == "")
}

// Compare draws the conclusions of what was observed. It says when there is more
// to compare, zero when there is nothing, and whether the next poll should come
// soon.
func (r *Rank) Compare() (due time.Time, soon bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &r.stream
	if r.trust == vllm.Syncing {
		s.check.Interrupt()
		return time.Time{}, false
	}
	found := s.check.Settle(time.Now(), r.flowLocked())
	switch {
	case found.Kind != reconcile.None:
		r.disownLocked(found)
	case s.foreign != "" && s.check.Agrees():
		r.log.Info("the event stream agrees with the engine's counters again", "engine", r.engine, "events", r.source.Endpoint)
		s.elsewhere()
		r.tail.Restart("the event stream was thought to be another engine's")
	case s.trial && s.check.Clean():
		s.trial = false
		r.wake()
	}
	due, _ = s.check.Due()
	return due, s.check.Hurries() || s.trial
}

// Overslept says by how much this process woke up later than it wanted to.
func (r *Rank) Overslept(by time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stream.check.Overslept(by)
}

// disownLocked forgets what was believed of a stream that is not this engine's.
func (r *Rank) disownLocked(found reconcile.Finding) {
	s := &r.stream
	s.check.Reset()
	if s.foreign != "" {
		return
	}
	events := cmp.Or(r.source.Endpoint, "nowhere")
	var reason string
	switch {
	case found.Mute:
		reason = fmt.Sprintf("the engine at %s computes prompts but no events arrive from %s: are KV events enabled, and is this their endpoint?", r.engine, events)
	case found.Kind == reconcile.Missing:
		reason = fmt.Sprintf("the events at %s are not those of the engine at %s: it computed %.0f tokens that they lack", events, r.engine, found.Tokens)
	default:
		reason = fmt.Sprintf("the events at %s are not those of the engine at %s: they announce %.0f tokens that it did not compute", events, r.engine, found.Tokens)
	}
	s.foreign, s.trial, s.connections = reason, false, r.tail.Stats().Connections
	s.found++
	r.log.Error("the event stream is not this engine's, forgetting what it published; check -engine, -events and the engine's --kv-events-config", "engine", r.engine, "events", events, "reason", reason)
	r.beginLocked()
	r.wake()
}

// countersLocked is what the engine says of its work; false: not enough.
func (r *Rank) countersLocked(l *vllm.Load, resets float64) (reconcile.Counters, bool) {
	if l.ComputedPromptTokens == nil || l.GenerationTokens == nil || l.FirstTokens == nil || l.Running == nil {
		return reconcile.Counters{}, false
	}
	value := func(v *float64) float64 {
		if v == nil {
			return 0
		}
		return *v
	}
	capacity := float64(r.id.Blocks) * float64(r.blockSizeLocked())
	longest := float64(r.info.GetMaxModelLen())
	if capacity > 0 && (longest == 0 || capacity < longest) {
		longest = capacity
	}
	return reconcile.Counters{
		Prompt: *l.ComputedPromptTokens, Generated: *l.GenerationTokens, Requests: *l.FirstTokens,
		Admitted: value(l.QueriedTokens) - value(l.HitTokens), Looked: l.QueriedTokens != nil && l.HitTokens != nil,
		External: value(l.ExternalTokens), Preempted: value(l.Preemptions), Resets: resets,
		Running: *l.Running, Waiting: value(l.Waiting),
		InUse: value(l.KVUsage) * capacity, Usage: value(l.KVUsage), MaxRequest: longest,
	}, true
}
