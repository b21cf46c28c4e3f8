package publish

import (
	"fmt"
	"iter"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

const (
	// maxHeader is room for what Config.Sent adds.
	maxHeader = 256
	// keepOps is how long a buffer of changes may be and still be kept for
	// the next tick.
	keepOps = 1 << 14
	// maxReason bounds the text that explains a trust state.
	maxReason = 200
	// opBytes is the most that one change takes on the wire beside its keys.
	opBytes = 48 + 8*blockkey.Lead
	// frameBytes is the most that a delta or chunk takes beside its changes,
	// member and reason.
	frameBytes = 256
)

// encoder makes messages and reuses what it made them of: a result is valid
// until the next call.
type encoder struct {
	member string
	header pb.Header
	lanes  [protocol.Lanes + 1]*pb.LaneState
	update pb.Delta
	answer pb.SnapshotChunk
	steps  []*step
	stored []*pb.Stored
	keys   []uint64
	part   []change
	buf    []byte
}

// step is one change with all that it may point to.
type step struct {
	change   pb.Change
	stored   pb.Stored
	removed  pb.Removed
	isStored pb.Change_Stored
	isGone   pb.Change_Removed
}

// change is an Op, or several that are alike but for neighbouring lanes.
type change struct {
	mirror.Op
	through mirror.Lane
}

// part is what goes into one message.
type part struct {
	index   int
	changes []change // valid until the next part
	keys    int
	last    bool
}

func newEncoder(member string) *encoder {
	e := &encoder{member: member}
	for i := range e.lanes {
		e.lanes[i] = &pb.LaneState{Lane: pb.Lane(i + 1)}
	}
	return e
}

// parts cuts changes into what fits limit bytes, in order; no changes are one
// empty part. A run of stores is cut from its head, a run of removes from its
// tail, so that every part leaves a prefix-closed cache state.
func (e *encoder) parts(ops []mirror.Op, st State, limit int) iter.Seq[part] {
	room := max(limit-frameBytes-len(e.member)-min(len(st.Reason), maxReason), opBytes+8)
	return func(yield func(part) bool) {
		p := part{}
		used := 0
		e.part = e.part[:0]
		flush := func() bool {
			p.changes = e.part
			ok := yield(p)
			p = part{index: p.index + 1}
			used = 0
			e.part = e.part[:0]
			return ok
		}
		for len(ops) > 0 {
			var op change
			op, ops = merge(ops)
			for len(op.Keys) > 0 {
				n := (room - used - opBytes) / 8
				if n < 1 {
					if !flush() {
						return
					}
					continue
				}
				head := op
				switch {
				case n >= len(op.Keys):
					n = len(op.Keys)
					op.Keys = nil
				case op.Remove:
					cut := len(op.Keys) - n
					head.Position += uint32(cut)
					head.Before, head.Keys = blockkey.BeforeNext(op.Before, op.Keys[:cut]), op.Keys[cut:]
					op.Keys = op.Keys[:cut]
				default:
					head.Keys = op.Keys[:n]
					op.Position += uint32(n)
					op.Before, op.Keys = blockkey.BeforeNext(op.Before, op.Keys[:n]), op.Keys[n:]
				}
				e.part = append(e.part, head)
				p.keys += n
				used += opBytes + 8*n
			}
		}
		p.last = true
		flush()
	}
}

// merge takes the first of ops and those behind it that say the same of
// neighbouring lanes. A mirror lists them side by side with one slice of keys.
func merge(ops []mirror.Op) (change, []mirror.Op) {
	c := change{Op: ops[0], through: ops[0].Lane}
	for ops = ops[1:]; len(ops) > 0 && len(c.Keys) > 0; ops = ops[1:] {
		o := &ops[0]
		same := o.Remove == c.Remove && o.Position == c.Position &&
			len(o.Keys) == len(c.Keys) && &o.Keys[0] == &c.Keys[0]
		switch {
		case o.Lane == mirror.Ends || c.Lane == mirror.Ends: // no neighbour of a lane
			return c, ops
		case same && o.Lane == c.through+1:
			c.through++
		case same && o.Lane+1 == c.Lane:
			c.Lane--
		default:
			return c, ops
		}
	}
	return c, ops
}

// delta encodes one part of a change.
func (e *encoder) delta(p part, st State, sequence uint64) ([]byte, error) {
	d := &e.update
	d.Header = e.head(st, sequence)
	d.EngineBatches = st.EngineBatches
	d.Lanes, d.EventTimeUs = nil, 0
	if p.last {
		if !st.EventTime.IsZero() {
			d.EventTimeUs = uint64(max(st.EventTime.UnixMicro(), 0))
		}
		d.Lanes = e.held(st)
	}
	d.Changes = d.Changes[:0]
	e.keys = e.keys[:0]
	for i, op := range p.changes {
		if i == len(e.steps) {
			s := new(step)
			s.isStored.Stored, s.isGone.Removed = &s.stored, &s.removed
			e.steps = append(e.steps, s)
		}
		s := e.steps[i]
		if op.Remove {
			s.removed.Lane, s.removed.Through = op.lanes()
			s.removed.Position, s.removed.Before, s.removed.Keys = op.Position, e.copyKeys(op.Before), e.copyKeys(op.Keys)
			s.change.Change = &s.isGone
		} else {
			e.fill(&s.stored, op)
			s.change.Change = &s.isStored
		}
		d.Changes = append(d.Changes, &s.change)
	}
	return e.marshal(d)
}

// chunk encodes one part of a snapshot.
func (e *encoder) chunk(p part, st State, sequence uint64) ([]byte, error) {
	c := &e.answer
	c.Header = e.head(st, sequence)
	c.Index, c.Last = uint32(p.index), p.last
	c.Lanes, c.Trust, c.Reason, c.EngineBatches = nil, 0, "", 0
	if p.last {
		c.Lanes, c.Trust, c.Reason = e.held(st), st.Trust, protocol.Shorten(maxReason, st.Reason)
		c.EngineBatches = st.EngineBatches
	}
	e.keys = e.keys[:0]
	for i, op := range p.changes {
		if i == len(e.stored) {
			e.stored = append(e.stored, new(pb.Stored))
		}
		e.fill(e.stored[i], op)
	}
	c.Stored = e.stored[:len(p.changes)]
	return e.marshal(c)
}

// heartbeat completes h with header and lanes and encodes it.
func (e *encoder) heartbeat(h *pb.Heartbeat, st State, sequence uint64) ([]byte, error) {
	h.Header = e.head(st, sequence)
	h.Lanes = e.held(st)
	h.Reason = protocol.Shorten(maxReason, h.Reason)
	return e.marshal(h)
}

func (e *encoder) head(st State, sequence uint64) *pb.Header {
	e.header.Version, e.header.Member = protocol.Version, e.member
	e.header.Epoch, e.header.Sequence, e.header.Rule = st.Epoch, sequence, st.Rule
	return &e.header
}

func (e *encoder) held(st State) []*pb.LaneState {
	for i, l := range e.lanes {
		l.Count, l.Digest = st.Lanes[i].Count, st.Lanes[i].Digest
	}
	if !st.Rule.GetEnds() {
		return e.lanes[:protocol.Lanes]
	}
	return e.lanes[:]
}

func (e *encoder) fill(s *pb.Stored, op change) {
	s.Lane, s.Through = op.lanes()
	s.Position, s.Before, s.Keys = op.Position, e.copyKeys(op.Before), e.copyKeys(op.Keys)
}

// lanes as the wire names them: a single lane has no through.
func (c *change) lanes() (lane, through pb.Lane) {
	if c.through == c.Lane {
		return pb.Lane(c.Lane + 1), pb.Lane_LANE_UNSPECIFIED
	}
	return pb.Lane(c.Lane + 1), pb.Lane(c.through + 1)
}

func (e *encoder) copyKeys(keys []blockkey.Key) []uint64 {
	from := len(e.keys)
	for _, k := range keys {
		e.keys = append(e.keys, uint64(k))
	}
	return e.keys[from:len(e.keys):len(e.keys)]
}

func (e *encoder) marshal(m proto.Message) ([]byte, error) {
	data, err := proto.MarshalOptions{}.MarshalAppend(e.buf[:0], m)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	e.buf = data
	if len(data) > protocol.MaxMessage {
		return nil, fmt.Errorf("message of %d bytes, at most %d", len(data), protocol.MaxMessage)
	}
	return data, nil
}
