package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/protocol"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/pb"
)

// heap is what is in use after a collection. Tests that ask are not parallel.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// never checks that nothing is promised that the engine does not hold.
func (e *engine) never(prompts ...prompt) {
	e.t.Helper()
	for i, q := range prompts {
		if got, state := e.promised(q); got > e.held(q) {
			e.t.Errorf("prompt %d: promised %d, held %d; %v", i, got, e.held(q), state)
		}
	}
}

// follows waits until newly computed prompts are known as they are held.
func (e *engine) follows(seed uint64) []prompt {
	e.t.Helper()
	list := several(seed, 2)
	e.complete(list...)
	e.wait(patience, "follow", list, func(got, want int, _ *api.CacheState) bool { return got == want && got > 0 })
	return list
}

func TestHostileEvents(t *testing.T) {
	lie := random(99, 4*size+1)
	block := func(i int) []uint32 { return lie.tokens[i*size : (i+1)*size] }
	with := func(key string, value any) []byte {
		event := stored{hashes: hashes(1000, 2), tokens: lie.tokens[:2*size]}.event()
		event[key] = value
		return batch(t, event)
	}
	whole := batch(t, stored{hashes: hashes(1000, 4), tokens: lie.tokens[:4*size]}.event())
	noise := make([]byte, 4096)
	for i, r := 0, rand.New(rand.NewPCG(5, 5)); i < len(noise); i++ {
		noise[i] = byte(r.Uint32())
	}
	payloads := []struct {
		name    string
		payload []byte
	}{
		{"nothing", nil},
		{"noise", noise},
		{"half a batch", whole[:len(whole)/2]},
		{"a batch without its end", whole[:len(whole)-1]},
		{"array of four thousand million", []byte{0xdd, 0xff, 0xff, 0xff, 0xff}},
		{"batch of as many events", append([]byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0}, 0xdd, 0xff, 0xff, 0xff, 0xff)},
		{"text of four thousand million", []byte{0x93, 0xdb, 0xff, 0xff, 0xff, 0xff}},
		{"arrays in arrays", bytes.Repeat([]byte{0x91}, 1<<20)},
		{"maps in maps", bytes.Repeat([]byte{0x81, 0xa1, 'k'}, 1<<19)},
		{"no events", batch(t)},
		{"events that are numbers", batch(t, 1, 2, 3)},
		{"event without a type", batch(t, map[string]any{"block_hashes": []int{1}})},
		{"event of tomorrow", batch(t, map[string]any{"type": "BlockMoved", "block_hashes": []int{1}, "to": "moon"})},
		{"hashes that are text", with("block_hashes", "abc")},
		{"no hashes", with("block_hashes", []int{})},
		{"tokens that are text", with("token_ids", "abc")},
		{"negative tokens", with("token_ids", []int{-1, -2})},
		{"too few tokens", with("token_ids", lie.tokens[:2*size-1])},
		{"too many tokens", with("token_ids", lie.tokens[:3*size])},
		{"block size 0", with("block_size", 0)},
		{"block size -1", with("block_size", -1)},
		{"block size without end", with("block_size", uint64(math.MaxUint64))},
		{"parent that is a list", with("parent_block_hash", []int{1})},
		{"group without end", with("group_idx", uint64(1)<<40)},
		{"medium of a megabyte", with("medium", strings.Repeat("m", 1<<20))},
		{"adapter of a megabyte", with("lora_name", strings.Repeat("a", 1<<20))},
		{"own parent", batch(t, stored{hashes: []uint64{2000}, parent: 2000, tokens: block(0)}.event())},
		{"circle", batch(t,
			stored{hashes: []uint64{2001}, parent: 2002, tokens: block(0)}.event(),
			stored{hashes: []uint64{2002}, parent: 2001, tokens: block(1)}.event())},
		{"child as its own ancestor", batch(t,
			stored{hashes: hashes(2010, 3), tokens: lie.tokens[:3*size]}.event(),
			stored{hashes: []uint64{2010}, parent: 2012, tokens: block(0)}.event(), removed(2010))},
		{"one hash twice in an event", batch(t, stored{hashes: []uint64{2020, 2020}, tokens: lie.tokens[:2*size]}.event(), removed(2020))},
		{"one hash with two contents", batch(t,
			stored{hashes: []uint64{2030}, tokens: block(0)}.event(), stored{hashes: []uint64{2030}, tokens: block(1)}.event())},
		{"removal of the unknown", batch(t, removed(hashes(1<<60, 10_000)...))},
		{"orphans without number", batch(t, orphans(20_000)...)},
	}
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{Blocks: 4096}).watched("pod")
	known := several(1, 5)
	e.complete(known...)
	e.truth(soon, known...)
	before := heap()
	unreadable := 0
	for i, tc := range payloads {
		sequence := e.Events(0).Publish(tc.payload)
		e.complete(random(uint64(1000+i), 2*size))
		e.untilMember(e.id(), "take what comes behind "+tc.name, func(m *api.MemberState) bool { return m.GetCacheState().GetEngineBatches() > sequence })
		e.never(known...)
		e.never(lie)
		if state := p.member(e.id()).GetCacheState(); state.GetTrust() == api.Trust_TRUST_UNKNOWN {
			// No release sends this, so nothing that such an engine sends counts.
			unreadable++
			if !strings.Contains(state.GetExplanation(), "vLLM 0.32.0: no known release sends this") {
				t.Errorf("%s: %q", tc.name, state.GetExplanation())
			}
			e.restart()
		}
		known = append(known[:5], e.follows(uint64(10+i))...)
		e.never(known...)
		e.never(lie)
	}
	if unreadable < 10 {
		t.Errorf("%d of %d payloads took the trust away", unreadable, len(payloads))
	}
	if grown := heap() - before; grown > 64<<20 {
		t.Errorf("%d MiB stay", grown>>20)
	} else {
		t.Logf("%d KiB stay", grown>>10)
	}
	for _, name := range []string{"unknown_event", "unknown_medium"} {
		if p.counted(e.agent.Admin(), "kvscout_agent_events_skipped_total", name) == 0 {
			t.Errorf("%s was not counted", name)
		}
	}
	if p.counted(e.agent.Admin(), "kvscout_agent_event_batches_unreadable_total", "undecodable") == 0 {
		t.Error("what cannot be read was not counted")
	}
	// A new life owes nothing to the old one.
	e.restart()
	e.complete(known...)
	e.truth(soon, append(known, lie)...)
}

// orphans are blocks whose parents never come.
func orphans(n int) []any {
	list := make([]any, n)
	for i := range list {
		list[i] = stored{hashes: []uint64{1<<50 + uint64(i)}, parent: 1<<51 + uint64(i), tokens: random(uint64(i), size).tokens}.event()
	}
	return list
}

func TestHostileFrames(t *testing.T) {
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	events, _ := e.behind(t, "pod")
	sequence := binary.BigEndian.AppendUint64(nil, 3)
	lie := random(99, 4*size+1)
	payload := batch(t, stored{hashes: hashes(1, 4), tokens: lie.tokens[:4*size]}.event())
	long := func(flags byte, length uint64) []byte { return binary.BigEndian.AppendUint64([]byte{flags}, length) }
	many := make([][]byte, 10_000)
	list := several(1, 5)
	e.complete(list...)
	e.truth(soon, list...)
	before := heap()
	for i, tc := range []struct {
		name string
		raw  []byte
	}{
		{"one frame", message(payload)},
		{"two frames", message(nil, payload)},
		{"sequence of 4 bytes", message(nil, sequence[4:], payload)},
		{"sequence of a megabyte", message(nil, make([]byte, 1<<20), payload)},
		{"sequence that ends a replay", message(nil, bytes.Repeat([]byte{0xff}, 8), payload)},
		{"three empty frames", message(nil, nil, nil)},
		{"ten thousand frames", message(many...)},
		{"a stranger's batch", message(nil, sequence, payload)},
		{"a stranger's batch of four frames", message(nil, sequence, payload, payload)},
		{"reserved flags", []byte{0xf0, 1, 0}},
		{"unknown command", []byte{frameCommand, 6, 4, 'E', 'V', 'I', 'L', 0}},
		{"command without a name", []byte{frameCommand, 0}},
		{"frame of an exabyte", long(frameLong, 1<<60)},
		{"frame of a negative length", long(frameLong, math.MaxUint64)},
		{"frame of a gigabyte", append(long(frameLong|frameMore, 1<<30), make([]byte, 1<<16)...)},
		{"command of a gigabyte", long(frameLong|frameCommand, 1<<30)},
	} {
		events.inject(tc.raw)
		more := several(uint64(2+i), 2)
		e.complete(more...)
		list = append(list[:5], more...)
		t.Logf("%s: true after %v", tc.name, e.truth(soon, list...))
		e.never(lie)
	}
	if grown := heap() - before; grown > 32<<20 {
		t.Errorf("%d MiB stay", grown>>20)
	}
	p.until("malformed messages are counted", func() bool {
		return p.counted(e.agent.Admin(), "kvscout_agent_event_batches_unreadable_total", "malformed") >= 6
	})
}

func TestHostileMetrics(t *testing.T) {
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	f := newFront(t, e, "/metrics")
	e.watchedBy(stage.AgentOptions{Pod: "pod", Engine: f.URL})
	list := several(1, 5)
	e.complete(list...)
	e.truth(soon, list...)
	instead := func(page string) func([]byte) []byte { return func([]byte) []byte { return []byte(page) } }
	before := heap()
	for i, tc := range []struct {
		name    string
		page    func([]byte) []byte
		unknown bool // the load is not to be known
	}{
		{"nothing", instead(""), true},
		{"a web page", instead("<html><body>It works!</body></html>"), true},
		{"noise", instead("\x00\xff{{{}}}\n\n\"\\"), true},
		{"metrics of somebody else", instead("node_load1 0.5\n"), true},
		{"half a page", func(page []byte) []byte { return page[:len(page)/2] }, false},
		{"numbers that are none", func(page []byte) []byte {
			return bytes.ReplaceAll(page, []byte("} 0\n"), []byte("} NaN\n"))
		}, false},
		{"numbers that are words", func(page []byte) []byte {
			return bytes.ReplaceAll(page, []byte("} 0\n"), []byte("} zero\n"))
		}, false},
		{"a page without end", instead(strings.Repeat("vllm:num_requests_running{engine=\"0\"} 1\n", 1<<14)), false},
		{"ranks without number", func([]byte) []byte {
			var page []byte
			for i := range 500 {
				page = fmt.Appendf(page, "vllm:num_requests_running{engine=\"%d\"} 1\n", i)
			}
			return page
		}, false},
	} {
		f.say(tc.page)
		if tc.unknown {
			e.untilMember(e.id(), "have no load: "+tc.name, func(m *api.MemberState) bool {
				return m != nil && (m.RunningRequests == nil || m.GetLoadAgeMs() > 500)
			})
		} else {
			polls := func() float64 { return p.counted(e.agent.Admin(), "kvscout_agent_engine_polls_total", "") }
			seen := polls()
			p.until("the agent has polled: "+tc.name, func() bool { return polls() >= seen+2 })
		}
		more := several(uint64(2+i), 2)
		e.complete(more...)
		list = append(list[:5], more...)
		e.wait(patience, "follow: "+tc.name, list, func(got, want int, _ *api.CacheState) bool { return got == want })
		f.say(nil)
		e.untilMember(e.id(), "have a load again: "+tc.name, func(m *api.MemberState) bool {
			return m != nil && m.RunningRequests != nil && m.GetLoadAgeMs() < 500
		})
	}
	e.truth(soon, list...)
	if grown := heap() - before; grown > 64<<20 {
		t.Errorf("%d MiB stay", grown>>20)
	}
	p.until("invented ranks are gone", func() bool {
		fleet, err := p.Operator.ListMembers(t.Context(), &api.ListMembersRequest{})
		return err == nil && len(fleet.GetMembers()) == 1
	})
}

func TestHostileMessages(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	other := p.engine(fakevllm.Config{}).watched("other")
	list := several(1, 5)
	for _, e := range []*engine{e, other} {
		e.complete(list...)
		e.truth(soon, list...)
	}
	conn, subject := p.bus(), subjects(t)
	id := e.id()
	now := p.member(id).GetCacheState()
	header := func(change func(*pb.Header)) *pb.Header {
		h := &pb.Header{Version: protocol.Version, Member: id, Epoch: now.GetEpoch(), Sequence: now.GetSequence()}
		change(h)
		return h
	}
	keys := []*pb.Change{{Change: &pb.Change_Stored{Stored: &pb.Stored{Lane: pb.Lane_LANE_GPU, Keys: []uint64{2, 3}}}}}
	delta := func(change func(*pb.Header)) []byte {
		data, err := proto.Marshal(&pb.Delta{Header: header(change), Changes: keys})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	beat := func(change func(*pb.Header), info *pb.MemberInfo) []byte {
		data, err := proto.Marshal(&pb.Heartbeat{Header: header(change), Info: info, Trust: pb.Trust_TRUST_EXACT, IntervalMs: 1})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	version := func(h *pb.Header) { h.Version = 2 }
	counted := func(event string) float64 {
		return p.counted(p.Admin, "kvscout_scheduler_ingest_messages_discarded_total", `"`+event+`"`)
	}
	for i, tc := range []struct {
		name, subject string
		data          []byte
		counts        string
	}{
		{"garbage as a delta", subject.Blocks(id), []byte("\xff\xfe\xfd no message"), "malformed"},
		{"garbage as a heartbeat", subject.Load(id), bytes.Repeat([]byte{7}, 1000), "malformed"},
		{"an empty delta", subject.Blocks(id), nil, ""},
		{"an empty heartbeat", subject.Load(id), nil, ""},
		{"a delta of half a megabyte", subject.Blocks(id), make([]byte, 512<<10), "malformed"},
		{"a delta of another version", subject.Blocks(id), delta(version), "wrong_version"},
		{"a heartbeat of another version", subject.Load(id), beat(version, nil), "wrong_version"},
		{"a delta that lies about its member", subject.Blocks(id), delta(func(h *pb.Header) { h.Member = other.id() }), "wrong_member"},
		{"a heartbeat that lies about its member", subject.Load(other.id()), beat(func(*pb.Header) {}, nil), "wrong_member"},
		{"a member that is no member", subject.Load("nobody"), beat(func(h *pb.Header) { h.Member = "nobody" }, nil), ""},
		{"a delta of an older life", subject.Blocks(id), delta(func(h *pb.Header) { h.Epoch-- }), ""},
		{"a delta of a coming life", subject.Blocks(id), delta(func(h *pb.Header) { h.Epoch, h.Sequence = h.Epoch+1, 1 }), ""},
		{"a delta from the future", subject.Blocks(id), delta(func(h *pb.Header) { h.Sequence += 1000 }), ""},
		{"the next delta, forged", subject.Blocks(id), delta(func(h *pb.Header) { h.Sequence++ }), ""},
		{"a repeated delta", subject.Blocks(id), delta(func(*pb.Header) {}), ""},
		{"a snapshot request of garbage", subject.Snapshot(id), []byte{1, 2, 3}, ""},
		{"a snapshot request without a reply subject", subject.Snapshot(id), nil, ""},
	} {
		now = p.member(id).GetCacheState()
		before := 0.0
		if tc.counts != "" {
			before = counted(tc.counts)
		}
		if err := conn.Publish(tc.subject, tc.data); err != nil {
			t.Fatal(err)
		}
		if err := conn.Flush(); err != nil {
			t.Fatal(err)
		}
		if tc.counts != "" {
			p.until(tc.name+" is counted", func() bool { return counted(tc.counts) > before })
		}
		more := several(uint64(2+i), 1)
		e.complete(more...)
		list = append(list[:5], more...)
		t.Logf("%s: true after %v", tc.name, e.truth(soon, list...))
		other.truth(soon, list[:5]...)
	}
	fleet, err := p.Operator.ListMembers(t.Context(), &api.ListMembersRequest{})
	if err != nil || len(fleet.GetMembers()) != 2 {
		t.Errorf("%v, %v", fleet, err)
	}
}

func TestHostileRequests(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{MaxModelLen: 2_000_000, Blocks: 130_000, Adapters: []fakevllm.Adapter{{Name: "lora", Path: "/lora"}}}).watched("pod")
	q := random(1, 100)
	e.complete(q)
	e.truth(soon, q)
	p.ready()
	long := make([]uint32, 2_000_000)
	for i := range long {
		long[i] = uint32(i % 150_000)
	}
	tokens := q.request().GetPrompt()
	keys := func(size uint32, n int) *api.Prompt {
		list := make([]uint64, n)
		for i := range list {
			list[i] = uint64(i + 1)
		}
		return api.Keys(list, size)
	}
	for _, tc := range []struct {
		name string
		r    *api.Request
		code codes.Code
		says string
	}{
		{"no tokens", &api.Request{Model: model, Prompt: api.TokenIDs(nil)}, codes.InvalidArgument, "0 tokens"},
		{"two million tokens", &api.Request{Model: model, Prompt: api.TokenIDs(long)}, codes.OK, ""},
		{"no model", &api.Request{Prompt: tokens}, codes.InvalidArgument, "model"},
		{"unknown model", &api.Request{Model: "nobody's", Prompt: tokens}, codes.NotFound, `"nobody's"`},
		{"unknown adapter", &api.Request{Model: model, Adapter: "nobody's", Prompt: tokens}, codes.NotFound, `"nobody's"`},
		{"unknown policy", &api.Request{Model: model, Policy: "luck", Prompt: tokens}, codes.InvalidArgument, `"luck"`},
		{"keys of another block size", &api.Request{Model: model, Prompt: keys(32, 3)}, codes.InvalidArgument, "32"},
		{"keys of no block size", &api.Request{Model: model, Prompt: keys(0, 3)}, codes.InvalidArgument, "block size"},
		{"a hundred thousand keys", &api.Request{Model: model, Prompt: keys(size, 100_000)}, codes.OK, ""},
		{"a million keys", &api.Request{Model: model, Prompt: keys(size, 1<<20)}, codes.InvalidArgument, "limit"},
		{"keys of nothing", &api.Request{Model: model, Prompt: api.Keys(make([]uint64, 3), size)}, codes.InvalidArgument, "key 0"},
		{"a body that is none", &api.Request{Model: model, Prompt: api.Body(`{"model":`)}, codes.InvalidArgument, "JSON"},
		{"messages that are none", &api.Request{Model: model, Prompt: api.Body(`{"messages":"hello"}`)}, codes.InvalidArgument, "list"},
		{"nobody to choose", &api.Request{Model: model, Prompt: tokens, Exclude: q.request(e.id()).GetCandidates()}, codes.FailedPrecondition, "excluded"},
		{"no prompt", &api.Request{Model: model}, codes.OK, ""},
	} {
		for method, call := range map[string]func() error{
			"pick": func() error {
				_, err := p.Client.Pick(t.Context(), &api.PickRequest{Request: tc.r})
				return err
			},
			"score": func() error {
				_, err := p.Client.Score(t.Context(), &api.ScoreRequest{Request: tc.r})
				return err
			},
		} {
			if st := status.Convert(call()); st.Code() != tc.code || !strings.Contains(st.Message(), tc.says) {
				t.Errorf("%s, %s: %v %.200q", tc.name, method, st.Code(), st.Message())
			}
		}
	}
	e.truth(soon, q)
}
