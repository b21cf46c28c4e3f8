package protocol

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol/pb"
)

const member = "default_uid-1_0"

func header(sequence uint64) *pb.Header {
	return &pb.Header{Version: Version, Member: member, Epoch: 5, Sequence: sequence}
}

func lanes(counts ...uint64) []*pb.LaneState {
	var out []*pb.LaneState
	for i, c := range counts {
		out = append(out, &pb.LaneState{Lane: pb.Lane(i + 1), Count: c, Digest: c})
	}
	return out
}

func stored(lane pb.Lane, keys ...uint64) *pb.Stored {
	return &pb.Stored{Lane: lane, Keys: keys}
}

func delta() *pb.Delta {
	return &pb.Delta{
		Header: header(1),
		Changes: []*pb.Change{
			{Change: &pb.Change_Removed{Removed: &pb.Removed{Lane: pb.Lane_LANE_GPU, Position: 3, Before: []uint64{4, 5, 6}, Keys: []uint64{9}}}},
			{Change: &pb.Change_Stored{Stored: stored(pb.Lane_LANE_GPU, 1, 2)}},
		},
		Lanes: lanes(2, 2, 2),
	}
}

func heartbeat() *pb.Heartbeat {
	return &pb.Heartbeat{
		Header: header(1),
		Info:   &pb.MemberInfo{Namespace: "default", PodUid: "uid-1"},
		Trust:  pb.Trust_TRUST_EXACT,
		Lanes:  lanes(1, 1, 2),
	}
}

func chunk() *pb.SnapshotChunk {
	return &pb.SnapshotChunk{
		Header: header(0),
		Last:   true,
		Stored: []*pb.Stored{stored(pb.Lane_LANE_DISK, 1, 2)},
		Lanes:  lanes(0, 0, 2),
		Trust:  pb.Trust_TRUST_EXACT,
	}
}

func verdict() *pb.Verdict {
	return &pb.Verdict{Version: Version, Member: member, Sender: 1, Scheduler: "host", Trust: pb.Trust_TRUST_EXACT, IntervalMs: 10_000}
}

func TestReadVerdictRefuses(t *testing.T) {
	if _, err := ReadVerdict(encode(t, verdict()), member); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*pb.Verdict){
		"version": func(v *pb.Verdict) { v.Version = 2 },
		"member":  func(v *pb.Verdict) { v.Member = "default_other_0" },
		"sender":  func(v *pb.Verdict) { v.Sender = 0 },
		"trust":   func(v *pb.Verdict) { v.Trust = 9 },
		"text":    func(v *pb.Verdict) { v.Refused = strings.Repeat("x", MaxReason+1) },
	} {
		v := verdict()
		spoil(v)
		if _, err := ReadVerdict(encode(t, v), member); err == nil {
			t.Errorf("%s passed", name)
		}
	}
}

func encode(t testing.TB, m proto.Message) []byte {
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestOtherVersionsAreNamed is what every version has of a heartbeat and of a
// verdict, whatever else another version makes of the rest.
func TestOtherVersionsAreNamed(t *testing.T) {
	v := verdict()
	v.Version, v.Release, v.Refused, v.Trust, v.Reason = 7, "v2.0.0", "no", 99, "else"
	got, err := ReadVerdict(encode(t, v), member)
	want := &pb.Verdict{Version: 7, Member: member, Sender: 1, Scheduler: "host", Refused: "no", IntervalMs: 10_000, Release: "v2.0.0"}
	if !errors.Is(err, OtherVersion(7)) || !proto.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	v.Member = "default_other_0"
	if got, err := ReadVerdict(encode(t, v), member); got != nil || !errors.Is(err, ErrMember) {
		t.Errorf("of another member: %v, %v", got, err)
	}
	h := heartbeat()
	h.Header.Version, h.Release, h.Lanes, h.Info = 7, "v2.0.0", nil, nil
	beat, err := ReadHeartbeat(encode(t, h), member)
	if !errors.Is(err, OtherVersion(7)) || beat.GetRelease() != "v2.0.0" || beat.GetHeader().GetMember() != member {
		t.Errorf("%v, %v", beat, err)
	}
	text := OtherVersion(7).Explain("the agent", strings.Repeat("9", 1000), "this scheduler", "")
	if len(text) > MaxReason || !strings.Contains(text, "version 7") || !strings.Contains(text, fmt.Sprintf("version %d", Version)) || !strings.Contains(text, "unknown") {
		t.Error(text)
	}
}

func TestReadDeltaRefuses(t *testing.T) {
	first := func(d *pb.Delta) *pb.Removed { return d.Changes[0].GetRemoved() }
	second := func(d *pb.Delta) *pb.Stored { return d.Changes[1].GetStored() }
	for name, c := range map[string]struct {
		spoil func(*pb.Delta)
		want  string
	}{
		"version":      {func(d *pb.Delta) { d.Header.Version = 2 }, "version 2 of the protocol, where 1 is spoken"},
		"no header":    {func(d *pb.Delta) { d.Header = nil }, "version 0 of the protocol"},
		"other member": {func(d *pb.Delta) { d.Header.Member = "default_uid-2_0" }, "names another member"},
		"no epoch":     {func(d *pb.Delta) { d.Header.Epoch = 0 }, "no epoch"},
		"sequence 0":   {func(d *pb.Delta) { d.Header.Sequence = 0 }, "sequence 0"},
		"empty change": {func(d *pb.Delta) { d.Changes[0].Change = nil }, "change 0: neither"},
		"no lane":      {func(d *pb.Delta) { first(d).Lane = 0 }, "change 0: unknown lane 0"},
		"lane 5":       {func(d *pb.Delta) { second(d).Lane = 5 }, "change 1: unknown lane 5"},
		"ends through": {func(d *pb.Delta) { first(d).Lane = 4; first(d).Through = 4 }, "lanes 4 through 4"},
		"two dropped":  {func(d *pb.Delta) { d.Header.Rule = &pb.HitRule{DroppedBlocks: 4097} }, "4097 blocks are dropped"},
		"too many ends": {func(d *pb.Delta) {
			d.Lanes = append(d.Lanes, &pb.LaneState{Lane: pb.Lane_LANE_ENDS, Count: d.Lanes[0].Count + 1})
		}, "ends among"},
		"through lane 4":  {func(d *pb.Delta) { first(d).Through = 4 }, "lanes 1 through 4"},
		"lanes back":      {func(d *pb.Delta) { second(d).Lane = 3; second(d).Through = 2 }, "lanes 3 through 2"},
		"no keys":         {func(d *pb.Delta) { first(d).Keys = nil }, "no keys"},
		"key 0":           {func(d *pb.Delta) { second(d).Keys[1] = 0 }, "key 1 is 0"},
		"nothing before":  {func(d *pb.Delta) { first(d).Before = nil }, "0 keys before position 3, want 3"},
		"too much before": {func(d *pb.Delta) { second(d).Before = []uint64{1} }, "1 keys before position 0"},
		"too deep":        {func(d *pb.Delta) { second(d).Position = MaxDepth - 1 }, "at most"},
		"position wraps":  {func(d *pb.Delta) { first(d).Position = 1<<32 - 1 }, "at most"},
		"two lanes":       {func(d *pb.Delta) { d.Lanes = d.Lanes[:2] }, "2 lanes"},
		"lanes swapped":   {func(d *pb.Delta) { d.Lanes[0], d.Lanes[1] = d.Lanes[1], d.Lanes[0] }, "lane 0 is named"},
		"lanes shrink":    {func(d *pb.Delta) { d.Lanes[2].Count = 1 }, "holds 1 keys"},
		"empty, digest":   {func(d *pb.Delta) { d.Lanes = lanes(0, 0, 0); d.Lanes[0].Digest = 1 }, "is empty and has digest"},
	} {
		t.Run(name, func(t *testing.T) {
			d := delta()
			c.spoil(d)
			_, err := ReadDelta(encode(t, d), member)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
	d := delta()
	d.Lanes = nil
	for _, ok := range []*pb.Delta{delta(), d, {Header: header(1)}} {
		if _, err := ReadDelta(encode(t, ok), member); err != nil {
			t.Error(err)
		}
	}
}

func TestReadHeartbeatRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(*pb.Heartbeat)
		want  string
	}{
		"trust 0":          {func(h *pb.Heartbeat) { h.Trust = 0 }, "unknown trust 0"},
		"trust 9":          {func(h *pb.Heartbeat) { h.Trust = 9 }, "unknown trust 9"},
		"no lanes":         {func(h *pb.Heartbeat) { h.Lanes = nil }, "0 lanes"},
		"no info":          {func(h *pb.Heartbeat) { h.Info = nil }, "no member info"},
		"info lies":        {func(h *pb.Heartbeat) { h.Info.Rank = 1 }, "names another member"},
		"info is no token": {func(h *pb.Heartbeat) { h.Info.PodUid = "a.b" }, "member info"},
		"full at 0":        {func(h *pb.Heartbeat) { h.Header.Sequence = 0 }, "sequence 0"},
	} {
		t.Run(name, func(t *testing.T) {
			h := heartbeat()
			c.spoil(h)
			_, err := ReadHeartbeat(encode(t, h), member)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
	leaving := &pb.Heartbeat{Header: header(3), Leaving: true}
	for _, ok := range []*pb.Heartbeat{heartbeat(), leaving} {
		if _, err := ReadHeartbeat(encode(t, ok), member); err != nil {
			t.Error(err)
		}
	}
}

func TestReadChunkRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(*pb.SnapshotChunk)
		want  string
	}{
		"index":    {func(c *pb.SnapshotChunk) { c.Index = MaxChunks }, "at most"},
		"stored":   {func(c *pb.SnapshotChunk) { c.Stored[0].Position = 1 }, "stored 0: 0 keys before"},
		"no lanes": {func(c *pb.SnapshotChunk) { c.Lanes = nil }, "0 lanes"},
		"no trust": {func(c *pb.SnapshotChunk) { c.Trust = 0 }, "unknown trust"},
	} {
		t.Run(name, func(t *testing.T) {
			m := chunk()
			c.spoil(m)
			_, err := ReadChunk(encode(t, m), member)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
	if _, err := ReadChunk(encode(t, chunk()), member); err != nil {
		t.Error(err)
	}
}

func TestReadRequest(t *testing.T) {
	if _, err := ReadRequest(encode(t, &pb.SnapshotRequest{Version: Version, Member: member}), member); err != nil {
		t.Error(err)
	}
	if _, err := ReadRequest(encode(t, &pb.SnapshotRequest{Version: 2, Member: member}), member); !errors.Is(err, OtherVersion(2)) {
		t.Error(err)
	}
	if _, err := ReadRequest(encode(t, &pb.SnapshotRequest{Version: 1, Member: "x_y_0"}), member); !errors.Is(err, ErrMember) {
		t.Error(err)
	}
}

func TestLargeMessageIsRefused(t *testing.T) {
	if _, err := ReadDelta(bytes.Repeat([]byte{0}, MaxMessage+1), member); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Error(err)
	}
}

// FuzzRead holds that what passes is what both ends may rely on.
func FuzzRead(f *testing.F) {
	f.Add(encode(f, delta()))
	f.Add(encode(f, heartbeat()))
	f.Add(encode(f, chunk()))
	f.Add(encode(f, &pb.SnapshotRequest{Version: Version, Member: member}))
	f.Add(encode(f, picks()))
	f.Add(encode(f, verdict()))
	f.Fuzz(func(t *testing.T, data []byte) {
		if v, err := ReadVerdict(data, member); err == nil {
			if v.Member != member || v.Sender == 0 || len(v.Refused) > MaxReason || checkTrust(v.Trust) != nil {
				t.Fatalf("passed: %v", v)
			}
		}
		if p, err := ReadPicks(data); err == nil {
			for _, c := range p.Reservations {
				if CheckMember(c.Member) != nil || !(c.PrefillMs >= 0) || len(c.Marks) > MaxMarks {
					t.Fatalf("passed: %v", c)
				}
			}
		}
		if d, err := ReadDelta(data, member); err == nil {
			if d.Header.Epoch == 0 || d.Header.Sequence == 0 || d.Header.Member != member {
				t.Fatalf("passed: %v", d.Header)
			}
			for _, c := range d.Changes {
				if len(c.GetStored().GetKeys())+len(c.GetRemoved().GetKeys()) == 0 {
					t.Fatalf("passed: %v", c)
				}
			}
		}
		if h, err := ReadHeartbeat(data, member); err == nil && !h.Leaving {
			if _, err := ReadHeld(h.Lanes); err != nil || h.Info == nil {
				t.Fatalf("passed: %v", h)
			}
		}
		if c, err := ReadChunk(data, member); err == nil && c.Last {
			if _, err := ReadHeld(c.Lanes); err != nil {
				t.Fatalf("passed: %v", c)
			}
		}
		_, _ = ReadRequest(data, member)
	})
}

func TestInfoIsBounded(t *testing.T) {
	for name, spoil := range map[string]func(*pb.Heartbeat){
		"bytes":  func(h *pb.Heartbeat) { h.Info.Root = strings.Repeat("x", MaxInfo) },
		"models": func(h *pb.Heartbeat) { h.Info.Models = make([]string, MaxNames+1) },
		"labels": func(h *pb.Heartbeat) {
			h.Info.Labels = make(map[string]string)
			for i := range MaxNames + 1 {
				h.Info.Labels[fmt.Sprint(i)] = ""
			}
		},
		"adapters": func(h *pb.Heartbeat) { h.Load = &pb.Load{RunningAdapters: make([]string, MaxNames+1)} },
	} {
		h := heartbeat()
		spoil(h)
		if _, err := ReadHeartbeat(encode(t, h), member); err == nil || !strings.Contains(err.Error(), "at most") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func picks() *pb.Picks {
	return &pb.Picks{
		Version: Version, Sender: 1, Sequence: 2,
		Reservations: []*pb.Reservation{{Decision: 3, Member: member, Epoch: 4, Marks: []uint64{5}, MarkStride: 8, PrefillMs: 1}},
		Ends:         []*pb.End{{Decision: 3, Kind: pb.End_KIND_FINISHED, Member: member}},
	}
}

func TestBadPicksAreRefused(t *testing.T) {
	if _, err := ReadPicks(encode(t, picks())); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*pb.Picks){
		"version":         func(p *pb.Picks) { p.Version++ },
		"no sender":       func(p *pb.Picks) { p.Sender = 0 },
		"no sequence":     func(p *pb.Picks) { p.Sequence = 0 },
		"no decision":     func(p *pb.Picks) { p.Reservations[0].Decision = 0 },
		"member":          func(p *pb.Picks) { p.Reservations[0].Member = "a b" },
		"decoding member": func(p *pb.Picks) { p.Reservations[0].Decode = "x" },
		"not a number":    func(p *pb.Picks) { p.Reservations[0].FirstTokenMs = math.NaN() },
		"infinite":        func(p *pb.Picks) { p.Reservations[0].EndMs = math.Inf(1) },
		"negative":        func(p *pb.Picks) { p.Reservations[0].Share = -1 },
		"key 0":           func(p *pb.Picks) { p.Reservations[0].Marks = []uint64{0} },
		"no stride":       func(p *pb.Picks) { p.Reservations[0].MarkStride = 0 },
		"too many marks":  func(p *pb.Picks) { p.Reservations[0].Marks = make([]uint64, MaxMarks+1) },
		"too many": func(p *pb.Picks) {
			for len(p.Reservations) <= MaxPicks {
				p.Reservations = append(p.Reservations, p.Reservations[0])
			}
		},
		"kind of end":   func(p *pb.Picks) { p.Ends[0].Kind = 9 },
		"no kind":       func(p *pb.Picks) { p.Ends[0].Kind = 0 },
		"end of none":   func(p *pb.Picks) { p.Ends[0].Decision = 0 },
		"member of end": func(p *pb.Picks) { p.Ends[0].Member = "?" },
	} {
		p := picks()
		spoil(p)
		if _, err := ReadPicks(encode(t, p)); err == nil {
			t.Errorf("%s: passed", name)
		}
	}
}
