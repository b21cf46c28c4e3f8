package ingest

import (
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

const (
	// refusedFor is how long a refusal stands after its last occasion: a member
	// whose messages are good and bad by turns is refused, not both by turns.
	refusedFor = 3 * time.Second
	// verdictCalm is the least time between two verdicts on one member.
	verdictCalm = 200 * time.Millisecond
	// maxStrangers bounds the refused that are no members and are remembered.
	maxStrangers = 1024
)

// verdict is what the agent of a member, or of a stranger who is not taken up,
// is told, and was told last. It is pure.
type verdict struct {
	refused     string    // why what it says does not count; empty: it does
	refusedAt   time.Time // the last time
	published   opinion
	publishedAt time.Time // zero: never
}

// opinion is the part of a verdict whose change is told at once.
type opinion struct {
	epoch   uint64
	trust   fleet.Trust
	refused bool
	warned  bool
}

// refuse takes why what was said does not count, and tells whether anything
// counted before.
func (v *verdict) refuse(why string, now time.Time) (first bool) {
	first = v.refused == ""
	v.refused, v.refusedAt = why, now
	return first
}

// accept takes a message that counts, and tells whether that ends a refusal.
func (v *verdict) accept(now time.Time) (again bool) {
	if v.refused == "" || now.Sub(v.refusedAt) < refusedFor {
		return false
	}
	v.refused = ""
	return true
}

// due tells whether the agent is to be told, which then counts as done.
func (v *verdict) due(o opinion, now time.Time) bool {
	since := now.Sub(v.publishedAt)
	if !v.publishedAt.IsZero() && (since < verdictCalm || o == v.published && since < protocol.VerdictEvery) {
		return false
	}
	v.published, v.publishedAt = o, now
	return true
}

// refuseMember has a member's agent told why nothing that it says counts here,
// or not all of it: at once, and again while there are occasions. Whoever
// refuses says so by this, on every occasion; what has to be forgotten with
// it, the caller forgets. It need not be a member.
func (w *worker) refuseMember(name, why string, now time.Time) {
	v := w.strangers[name]
	if m := w.members[name]; m != nil {
		v = &m.verdict
	}
	if v == nil {
		if len(w.strangers) >= maxStrangers {
			clear(w.strangers)
		}
		v = new(verdict)
		w.strangers[name] = v
	}
	if v.refuse(why, now) {
		w.in.cfg.Log.Warn("member refused", "member", name, "reason", why)
	}
}

// publish says to the agent what is made of its member, when that is due.
func (w *worker) publish(name string, now time.Time) {
	v := w.strangers[name]
	var p fleet.CacheState
	if m := w.members[name]; m != nil {
		v, p = &m.verdict, m.cacheState()
	}
	if v == nil {
		return
	}
	warning := ""
	if w.in.cfg.Warn != nil {
		warning = w.in.cfg.Warn(name)
	}
	if !v.due(opinion{p.Epoch, p.Trust, v.refused != "", warning != ""}, now) {
		return
	}
	if warning != "" && p.Reason != "" {
		warning += "; "
	}
	w.send(name, &pb.Verdict{
		Version: protocol.Version, Member: strings.ReplaceAll(name, ".", "_"),
		Sender: w.in.sender, Scheduler: w.in.cfg.Name,
		Trust: pb.Trust(p.Trust.Wire()), Reason: protocol.Shorten(protocol.MaxReason, warning+p.Reason), Refused: protocol.Shorten(protocol.MaxReason, v.refused),
		IntervalMs: uint32(protocol.VerdictEvery.Milliseconds()), Release: w.in.cfg.Release,
	})
}

// send sends a verdict to the member, or on the tokens of who cannot be one.
func (in *Ingest) send(name string, v *pb.Verdict) {
	data, err := proto.Marshal(v)
	if err == nil {
		err = in.cfg.Conn.Publish(in.subjects.Verdict(name), data)
	}
	if err != nil {
		in.cfg.Log.Debug("verdict not sent", "member", name, "error", err)
		return
	}
	in.count.verdicts.Add(1)
}
