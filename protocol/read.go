package protocol

import (
	"cmp"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

var (
	// ErrMember marks a message that speaks for another member than its subject.
	ErrMember = errors.New("message names another member than its subject")
	// ErrGarbage marks bytes that are no message, or too many of them.
	ErrGarbage = errors.New("not a message")
)

// OtherVersion is the version of a message that is not of ours.
type OtherVersion uint32

func (v OtherVersion) Error() string {
	return fmt.Sprintf("version %d of the protocol, where %d is spoken here", uint32(v), Version)
}

// Explain says who speaks which version, and of which release either is.
func (v OtherVersion) Explain(they, theirRelease, we, ourRelease string) string {
	return fmt.Sprintf("%s (release %s) speaks version %d of the protocol, %s (release %s) version %d: upgrade the older of the two",
		they, cmp.Or(Shorten(MaxRelease, theirRelease), "unknown"), uint32(v), we, cmp.Or(ourRelease, "unknown"), Version)
}

// checkVersion refuses all versions but ours.
func checkVersion(v uint32) error {
	if v != Version {
		return OtherVersion(v)
	}
	return nil
}

// ReadDelta decodes and checks a delta that arrived on member's subject.
func ReadDelta(data []byte, member string) (*pb.Delta, error) {
	d := new(pb.Delta)
	if err := unmarshal(data, d); err != nil {
		return nil, fmt.Errorf("decode delta: %w", err)
	}
	if err := checkDelta(d, member); err != nil {
		return nil, fmt.Errorf("delta %d: %w", d.GetHeader().GetSequence(), err)
	}
	return d, nil
}

// ReadHeartbeat decodes and checks a heartbeat that arrived on member's subject.
// Of a heartbeat of another version it gives header and release, which every
// version has, and an OtherVersion.
func ReadHeartbeat(data []byte, member string) (*pb.Heartbeat, error) {
	h := new(pb.Heartbeat)
	if err := unmarshal(data, h); err != nil {
		return nil, fmt.Errorf("decode heartbeat: %w", err)
	}
	if err := checkHeartbeat(h, member); err != nil {
		if errors.As(err, new(OtherVersion)) {
			return &pb.Heartbeat{Header: h.GetHeader(), Release: h.GetRelease()}, fmt.Errorf("heartbeat: %w", err)
		}
		return nil, fmt.Errorf("heartbeat: %w", err)
	}
	return h, nil
}

// ReadChunk decodes and checks one part of the snapshot that member was asked for.
func ReadChunk(data []byte, member string) (*pb.SnapshotChunk, error) {
	c := new(pb.SnapshotChunk)
	if err := unmarshal(data, c); err != nil {
		return nil, fmt.Errorf("decode snapshot chunk: %w", err)
	}
	if err := checkChunk(c, member); err != nil {
		return nil, fmt.Errorf("snapshot chunk %d: %w", c.GetIndex(), err)
	}
	return c, nil
}

// ReadRequest decodes and checks a request for member's snapshot.
func ReadRequest(data []byte, member string) (*pb.SnapshotRequest, error) {
	r := new(pb.SnapshotRequest)
	if err := unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("decode snapshot request: %w", err)
	}
	if err := checkVersion(r.GetVersion()); err != nil {
		return nil, fmt.Errorf("snapshot request: %w", err)
	}
	if r.GetMember() != member {
		return nil, fmt.Errorf("snapshot request: %w: %.80q", ErrMember, r.GetMember())
	}
	return r, nil
}

// ReadVerdict decodes and checks what a scheduler makes of member. Of a verdict
// of another version, which is a refusal, it gives what every version has
// and an OtherVersion.
func ReadVerdict(data []byte, member string) (*pb.Verdict, error) {
	v := new(pb.Verdict)
	if err := unmarshal(data, v); err != nil {
		return nil, fmt.Errorf("decode verdict: %w", err)
	}
	if err := checkVerdict(v, member); err != nil {
		return nil, fmt.Errorf("verdict: %w", err)
	}
	if err := checkVersion(v.GetVersion()); err != nil {
		return &pb.Verdict{
			Version: v.GetVersion(), Member: v.GetMember(), Sender: v.GetSender(), Scheduler: v.GetScheduler(),
			Refused: v.GetRefused(), IntervalMs: v.GetIntervalMs(), Release: v.GetRelease(),
		}, fmt.Errorf("verdict: %w", err)
	}
	if err := checkTrust(v.GetTrust()); err != nil {
		return nil, fmt.Errorf("verdict: %w", err)
	}
	return v, nil
}

// ReadHeld reads the lanes of a message: each lane once, in order, and no lane
// smaller than the one that it contains. Ends may be left out where there are
// none.
func ReadHeld(lanes []*pb.LaneState) (Held, error) {
	var h Held
	if len(lanes) != Lanes && len(lanes) != Lanes+1 {
		return h, fmt.Errorf("%d lanes, want %d", len(lanes), Lanes)
	}
	for i, l := range lanes {
		if l.GetLane() != pb.Lane(i+1) {
			return h, fmt.Errorf("lane %d is named %v", i, l.GetLane())
		}
		if i == Ends && l.GetCount() > h[0].Count {
			return h, fmt.Errorf("%d ends among %d keys", l.GetCount(), h[0].Count)
		}
		if i > 0 && i < Lanes && l.GetCount() < h[i-1].Count {
			return h, fmt.Errorf("%v holds %d keys, the lane in it %d", l.GetLane(), l.GetCount(), h[i-1].Count)
		}
		if l.GetCount() == 0 && l.GetDigest() != 0 {
			return h, fmt.Errorf("%v is empty and has digest %#x", l.GetLane(), l.GetDigest())
		}
		h[i].Count, h[i].Digest = l.GetCount(), l.GetDigest()
	}
	return h, nil
}

// LanesOf is the span of lanes, counted from 0, that a change names.
func LanesOf(lane, through pb.Lane) (first, last int) {
	return int(lane) - 1, int(max(lane, through)) - 1
}

func unmarshal(data []byte, m proto.Message) error {
	if len(data) > MaxMessage {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrGarbage, len(data), MaxMessage)
	}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, m); err != nil {
		return fmt.Errorf("%w: %w", ErrGarbage, err)
	}
	return nil
}

func checkHeader(h *pb.Header, member string) error {
	if err := checkVersion(h.GetVersion()); err != nil {
		return err
	}
	if h.GetMember() != member {
		return fmt.Errorf("%w: %.80q", ErrMember, h.GetMember())
	}
	if h.GetEpoch() == 0 {
		return errors.New("no epoch")
	}
	if n := h.GetRule().GetDroppedBlocks(); n > MaxDropped {
		return fmt.Errorf("%d blocks are dropped of a hit, at most %d can be", n, MaxDropped)
	}
	return nil
}

func checkDelta(d *pb.Delta, member string) error {
	if err := checkHeader(d.GetHeader(), member); err != nil {
		return err
	}
	if d.GetHeader().GetSequence() == 0 {
		return errors.New("sequence 0 is the empty cache state")
	}
	for i, c := range d.GetChanges() {
		var err error
		switch c := c.GetChange().(type) {
		case *pb.Change_Stored:
			err = checkStored(c.Stored)
		case *pb.Change_Removed:
			err = checkRun(c.Removed.GetLane(), c.Removed.GetThrough(), c.Removed.GetPosition(), c.Removed.GetBefore(), c.Removed.GetKeys())
		default:
			err = errors.New("neither stored nor removed")
		}
		if err != nil {
			return fmt.Errorf("change %d: %w", i, err)
		}
	}
	if len(d.GetLanes()) == 0 {
		return nil
	}
	_, err := ReadHeld(d.GetLanes())
	return err
}

func checkHeartbeat(h *pb.Heartbeat, member string) error {
	if err := checkHeader(h.GetHeader(), member); err != nil {
		return err
	}
	if h.GetLeaving() {
		return nil
	}
	if err := checkTrust(h.GetTrust()); err != nil {
		return err
	}
	held, err := ReadHeld(h.GetLanes())
	if err != nil {
		return err
	}
	if h.GetHeader().GetSequence() == 0 && held != (Held{}) {
		return errors.New("sequence 0 is the empty cache state, lanes are not")
	}
	i := h.GetInfo()
	if i == nil {
		return errors.New("no member info")
	}
	if i.GetAddress() != "" {
		if _, err := ParseAddress(i.GetAddress()); err != nil {
			return fmt.Errorf("member info: %w", err)
		}
	}
	if n := proto.Size(i); n > MaxInfo {
		return fmt.Errorf("member info of %d bytes, at most %d", n, MaxInfo)
	}
	if n := len(i.GetModels()) + len(i.GetAdapters()); n > MaxNames {
		return fmt.Errorf("member info names %d models and adapters, at most %d", n, MaxNames)
	}
	if n := len(i.GetLabels()); n > MaxNames {
		return fmt.Errorf("member info has %d labels, at most %d", n, MaxNames)
	}
	if n := len(h.GetLoad().GetRunningAdapters()); n > MaxNames {
		return fmt.Errorf("load names %d adapters, at most %d", n, MaxNames)
	}
	name, err := Member{Namespace: i.GetNamespace(), PodUID: i.GetPodUid(), Rank: i.GetRank()}.Name()
	if err != nil {
		return fmt.Errorf("member info: %w", err)
	}
	if name != member {
		return fmt.Errorf("member info: %w: %q", ErrMember, name)
	}
	return nil
}

func checkChunk(c *pb.SnapshotChunk, member string) error {
	if err := checkHeader(c.GetHeader(), member); err != nil {
		return err
	}
	if c.GetIndex() >= MaxChunks {
		return fmt.Errorf("at most %d chunks", MaxChunks)
	}
	for i, s := range c.GetStored() {
		if err := checkStored(s); err != nil {
			return fmt.Errorf("stored %d: %w", i, err)
		}
	}
	if !c.GetLast() {
		return nil
	}
	if err := checkTrust(c.GetTrust()); err != nil {
		return err
	}
	_, err := ReadHeld(c.GetLanes())
	return err
}

func checkVerdict(v *pb.Verdict, member string) error {
	if v.GetMember() != member {
		return fmt.Errorf("%w: %.80q", ErrMember, v.GetMember())
	}
	if v.GetSender() == 0 {
		return errors.New("no sender")
	}
	for _, text := range []string{v.GetScheduler(), v.GetReason(), v.GetRefused(), v.GetRelease()} {
		if len(text) > MaxReason {
			return fmt.Errorf("text of %d bytes, at most %d", len(text), MaxReason)
		}
	}
	return nil
}

func checkTrust(t pb.Trust) error {
	if t < pb.Trust_TRUST_UNKNOWN || t > pb.Trust_TRUST_EXACT {
		return fmt.Errorf("unknown trust %d", t)
	}
	return nil
}

func checkStored(s *pb.Stored) error {
	return checkRun(s.GetLane(), s.GetThrough(), s.GetPosition(), s.GetBefore(), s.GetKeys())
}

func checkRun(lane, through pb.Lane, position uint32, before, keys []uint64) error {
	if lane < pb.Lane_LANE_GPU || lane > pb.Lane_LANE_ENDS {
		return fmt.Errorf("unknown lane %d", lane)
	}
	if through != pb.Lane_LANE_UNSPECIFIED && (lane == pb.Lane_LANE_ENDS || through < lane || through > pb.Lane_LANE_DISK) {
		return fmt.Errorf("lanes %d through %d", lane, through)
	}
	if len(keys) == 0 {
		return errors.New("no keys")
	}
	if uint64(position)+uint64(len(keys)) > MaxDepth {
		return fmt.Errorf("position %d and %d keys: at most %d blocks", position, len(keys), MaxDepth)
	}
	if want := min(int(position), blockkey.Lead); len(before) != want {
		return fmt.Errorf("%d keys before position %d, want %d", len(before), position, want)
	}
	for i, k := range keys {
		if k == 0 {
			return fmt.Errorf("key %d is 0", i)
		}
	}
	return nil
}
