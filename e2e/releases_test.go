package e2e

import (
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
)

// Agents and schedulers of two releases beside each other: what is said is
// exact, or refused on both sides by a sentence with both versions. Of the
// release before there is a recording of the bus; where the programs
// themselves can be built, make mixed runs them.

var record = flag.String("record", "", "write the recording of this release's bus to this file of e2e/testdata/bus")

// release is what the programs of one release said to each other.
type release struct {
	Protocol uint32
	Schema   []byte // the bus messages, as a FileDescriptorSet
	Member   string
	Said     []spoken
	Prompts  []cachedPrompt
}

type spoken struct {
	Subject string
	Data    []byte
}

// cachedPrompt is what the engine held of a prompt at the end.
type cachedPrompt struct {
	Tokens []uint32
	Cached int
}

// mixedEngine evicts, so that deltas remove, too.
var mixedEngine = fakevllm.Config{Blocks: 120}

func mixedPrompts() []prompt {
	list := several(1, 30)
	return append(list, list[0].branch(40, 2, 100), list[1].branch(3*size, 3, 70))
}

// kind is the token of a subject that says what it carries.
func (s spoken) kind() string { return strings.Split(s.Subject, ".")[3] }

// recordRelease lets the programs of this tree work: one scheduler follows an
// agent from the beginning, another comes later and asks for a snapshot.
func recordRelease(t *testing.T, file string) {
	bin := programs(t, "./agent/cmd/kvscout-agent")
	bus := broker.New(t, nil)
	first := open(t, stage.Options{NATS: bus.URL()})
	r := release{Protocol: protocol.Version, Member: "default_mixed_0"}
	heard := make(chan *nats.Msg, 1<<16)
	if _, err := first.bus().ChanSubscribe("kvscout.>", heard); err != nil {
		t.Fatal(err)
	}
	e := first.engine(mixedEngine)
	// Heartbeats come seldom, so that a replay need not be as fast.
	e.run(filepath.Join(bin, "kvscout-agent"), "mixed", "-heartbeat", "5s")
	list := mixedPrompts()
	e.complete(list...)
	e.truth(patience, list...)
	second := open(t, stage.Options{NATS: bus.URL()})
	second.untilMember(r.Member, "be exact", stage.Exact)
	list = append(list, random(4, 200), list[2].branch(size, 5, 90))
	e.complete(list[len(list)-2:]...)
	e.truth(patience, list...)
	for _, q := range list {
		r.Prompts = append(r.Prompts, cachedPrompt{Tokens: q.tokens, Cached: e.held(q)})
	}
	time.Sleep(6 * time.Second) // the last heartbeat is about the last delta
	for len(heard) > 0 {
		m := <-heard
		if s := (spoken{Subject: m.Subject, Data: m.Data}); s.kind() != "picks" {
			r.Said = append(r.Said, s)
		}
	}
	schema, err := proto.Marshal(&descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{protodesc.ToFileDescriptorProto(new(pb.Delta).ProtoReflect().Descriptor().ParentFile())}})
	if err != nil {
		t.Fatal(err)
	}
	r.Schema = schema
	f, err := os.Create(filepath.Join("testdata/bus", file))
	if err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(f)
	if err := json.NewEncoder(z).Encode(r); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// releases are the recordings, by file.
func releases(t *testing.T) map[string]*release {
	t.Helper()
	files, err := filepath.Glob("testdata/bus/*.json.gz")
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	all := make(map[string]*release)
	for _, file := range files {
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		z, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		r := new(release)
		if err := json.NewDecoder(z).Decode(r); err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(file), ".json.gz")] = r
	}
	return all
}

func (r *release) of(kinds ...string) (list []spoken) {
	for _, s := range r.Said {
		for _, k := range kinds {
			if s.kind() == k {
				list = append(list, s)
			}
		}
	}
	return list
}

// truth publishes the recorded agent's last heartbeat, which keeps its member
// alive, until this tree's scheduler promises of every prompt what the recorded
// engine held. A scheduler of another version of the protocol must refuse it.
func (r *release) truth(p *play, conn *nats.Conn) {
	p.t.Helper()
	beats := r.of("load")
	last := beats[len(beats)-1]
	say := func(s spoken) {
		if err := conn.Publish(s.Subject, s.Data); err != nil {
			p.t.Fatal(err)
		}
	}
	if r.Protocol != protocol.Version {
		p.refuses(conn, r.Member, func() { say(last) }, fmt.Sprintf("version %d ", r.Protocol))
		return
	}
	wrong := "nothing was asked"
	for end := time.Now().Add(3 * patience); wrong != ""; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatal(wrong)
		}
		say(last)
		wrong = ""
		if m := p.member(r.Member); !stage.Exact(m) {
			wrong = fmt.Sprintf("not exact: %v", m)
			continue
		}
		for i, q := range r.Prompts {
			if got := p.gpu(prompt{tokens: q.Tokens})[r.Member]; got != q.Cached {
				wrong = fmt.Sprintf("prompt %d: %d tokens are promised, the engine held %d", i, got, q.Cached)
				break
			}
		}
	}
}

// refuses says something in a member's name until a verdict on it refuses it
// with this version and all of the texts.
func (p *play) refuses(conn *nats.Conn, member string, say func(), texts ...string) {
	p.t.Helper()
	verdicts, err := conn.SubscribeSync(subjects(p.t).Verdict(member))
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = verdicts.Unsubscribe() }()
	texts = append(texts, fmt.Sprintf("version %d:", protocol.Version))
	p.until(fmt.Sprintf("it is refused with %q", texts), func() bool {
		say()
		m, err := verdicts.NextMsg(100 * time.Millisecond)
		if err != nil {
			return false
		}
		v := new(pb.Verdict)
		if err := proto.Unmarshal(m.Data, v); err != nil {
			p.t.Fatal(err)
		}
		for _, text := range texts {
			if !strings.Contains(v.GetRefused(), text) {
				return false
			}
		}
		return true
	})
	if m := p.member(member); m != nil {
		p.t.Errorf("a refused member is there: %v", m)
	}
}

// snapshots answers whoever asks for the recorded agent's snapshot, with what came
// after its cut, and counts them.
func (r *release) snapshots(t *testing.T, conn *nats.Conn) (asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	sub, err := conn.Subscribe(subjects(t).Snapshot(r.Member), func(m *nats.Msg) {
		asked.Add(1)
		for _, c := range r.of("inbox") {
			_ = m.Respond(c.Data)
		}
		for _, s := range r.of("blocks") { // those before the cut are ignored
			_ = conn.Publish(s.Subject, s.Data)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Unsubscribe() })
	return asked
}

// TestAgentsOfTheReleaseBefore has this tree's scheduler follow recorded agents:
// from the beginning, and from a snapshot on.
func TestAgentsOfTheReleaseBefore(t *testing.T) {
	if *record != "" {
		recordRelease(t, *record)
	}
	for name, r := range releases(t) {
		t.Run(name+"/beginning", func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			conn := p.bus()
			asked := r.snapshots(t, conn)
			for _, s := range r.of("blocks", "load") {
				if err := conn.Publish(s.Subject, s.Data); err != nil {
					t.Fatal(err)
				}
			}
			r.truth(p, conn)
			if n := asked.Load(); n > 0 {
				t.Logf("a heartbeat came so long before its changes that the scheduler asked for %d snapshots", n)
			}
		})
		t.Run(name+"/snapshot", func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			conn := p.bus()
			asked := r.snapshots(t, conn)
			r.truth(p, conn)
			if asked.Load() == 0 && r.Protocol == protocol.Version {
				t.Error("nobody asked for the snapshot")
			}
		})
	}
}

// TestAgentOfAnotherVersionIsRefused by a sentence that names both.
func TestAgentOfAnotherVersionIsRefused(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	conn := p.bus()
	const id = "default_later_0"
	data, err := proto.Marshal(&pb.Heartbeat{Header: &pb.Header{Version: 1000, Member: id, Epoch: 1}, Release: "v9.9.9"})
	if err != nil {
		t.Fatal(err)
	}
	p.refuses(conn, id, func() {
		if err := conn.Publish(subjects(t).Load(id), data); err != nil {
			t.Fatal(err)
		}
	}, "version 1000 ", "v9.9.9")
}

// oldEyes reads a message as the recorded release would: by its schema.
type oldEyes struct{ file protoreflect.FileDescriptor }

func (r *release) eyes(t *testing.T) oldEyes {
	t.Helper()
	set := new(descriptorpb.FileDescriptorSet)
	if err := proto.Unmarshal(r.Schema, set); err != nil {
		t.Fatal(err)
	}
	files, err := protodesc.NewFiles(set)
	if err != nil {
		t.Fatal(err)
	}
	file, err := files.FindFileByPath(set.GetFile()[0].GetName())
	if err != nil {
		t.Fatal(err)
	}
	return oldEyes{file}
}

func (e oldEyes) see(t *testing.T, message string, data []byte) []byte {
	t.Helper()
	old := dynamicpb.NewMessage(e.file.Messages().ByName(protoreflect.Name(message)))
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, old); err != nil {
		t.Fatalf("%s: %v", message, err)
	}
	data, err := proto.Marshal(old)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// follower holds what an agent says that it holds, as docs/PROTOCOL.md has it.
type follower map[pb.Lane]map[uint64]bool

func (f follower) apply(lane, through pb.Lane, keys []uint64, held bool) {
	for l := lane; l <= max(lane, through); l++ {
		if f[l] == nil {
			f[l] = make(map[uint64]bool)
		}
		for _, k := range keys {
			if held {
				f[l][k] = true
			} else {
				delete(f[l], k)
			}
		}
	}
}

// verifies compares with what an agent says that each lane must look like.
func (f follower) proves(lanes []*pb.LaneState) error {
	for _, l := range lanes {
		digest := uint64(0)
		for k := range f[l.GetLane()] {
			digest ^= blockkey.Digest(blockkey.Key(k))
		}
		if uint64(len(f[l.GetLane()])) != l.GetCount() || digest != l.GetDigest() {
			return fmt.Errorf("%v: %d keys with digest %#x, the agent says %d and %#x", l.GetLane(), len(f[l.GetLane()]), digest, l.GetCount(), l.GetDigest())
		}
	}
	return nil
}

// TestSchedulersOfTheReleaseBefore has this tree's agent answer what recorded
// schedulers say, and reads what it says by their schema.
func TestSchedulersOfTheReleaseBefore(t *testing.T) {
	for name, r := range releases(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			conn := p.bus()
			e := p.engine(mixedEngine).watched("mixed")
			list := mixedPrompts()
			e.complete(list...)
			e.truth(patience, list...)
			verdicts := r.of("verdict")
			believed := func() string {
				_, page := p.get(e.agent.Admin(), "/believed")
				return page
			}
			if r.Protocol != protocol.Version {
				p.until("the old scheduler is shown", func() bool {
					_ = conn.Publish(verdicts[len(verdicts)-1].Subject, verdicts[len(verdicts)-1].Data)
					return strings.Contains(believed(), fmt.Sprintf("version %d ", r.Protocol)) && strings.Contains(believed(), fmt.Sprintf("version %d:", protocol.Version))
				})
				return
			}
			deltas, err := conn.SubscribeSync(subjects(t).Blocks(r.Member))
			if err != nil {
				t.Fatal(err)
			}
			inbox := subjects(t).Inbox() + ".before.1"
			answers, err := conn.SubscribeSync(inbox)
			if err != nil {
				t.Fatal(err)
			}
			if err := conn.PublishRequest(subjects(t).Snapshot(r.Member), inbox, r.of("snapshot")[0].Data); err != nil {
				t.Fatal(err)
			}
			eyes, mirror := r.eyes(t), make(follower)
			var sequence uint64
			for {
				m, err := answers.NextMsg(patience)
				if err != nil {
					t.Fatal(err)
				}
				c, err := protocol.ReadChunk(eyes.see(t, "SnapshotChunk", m.Data), r.Member)
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range c.GetStored() {
					mirror.apply(s.GetLane(), s.GetThrough(), s.GetKeys(), true)
				}
				if sequence = c.GetHeader().GetSequence(); !c.GetLast() {
					continue
				}
				if err := mirror.proves(c.GetLanes()); err != nil || len(mirror[pb.Lane_LANE_GPU]) < 50 {
					t.Fatalf("snapshot of %d keys: %v", len(mirror[pb.Lane_LANE_GPU]), err)
				}
				break
			}
			e.complete(several(50, 12)...)
			last, removed := sequence, false
			for verified := false; !verified || last < sequence+3 || !removed; {
				m, err := deltas.NextMsg(patience)
				if err != nil {
					t.Fatal(err)
				}
				d, err := protocol.ReadDelta(eyes.see(t, "Delta", m.Data), r.Member)
				if err != nil {
					t.Fatal(err)
				}
				if d.GetHeader().GetSequence() <= last {
					continue
				}
				if d.GetHeader().GetSequence() != last+1 {
					t.Fatalf("delta %d after %d", d.GetHeader().GetSequence(), last)
				}
				last++
				for _, c := range d.GetChanges() {
					s, gone := c.GetStored(), c.GetRemoved()
					mirror.apply(s.GetLane(), s.GetThrough(), s.GetKeys(), true)
					mirror.apply(gone.GetLane(), gone.GetThrough(), gone.GetKeys(), false)
					removed = removed || gone != nil
				}
				verified = len(d.GetLanes()) > 0
				if err := mirror.proves(d.GetLanes()); err != nil {
					t.Fatalf("delta %d: %v", last, err)
				}
			}
			beats, err := conn.SubscribeSync(subjects(t).Load(r.Member))
			if err != nil {
				t.Fatal(err)
			}
			m, err := beats.NextMsg(patience)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := protocol.ReadHeartbeat(eyes.see(t, "Heartbeat", m.Data), r.Member); err != nil {
				t.Error(err)
			}
			// Two schedulers now have said what they make of it: ours and the recorded one.
			p.until("the old scheduler is shown", func() bool {
				_ = conn.Publish(verdicts[len(verdicts)-1].Subject, verdicts[len(verdicts)-1].Data)
				return strings.Count(believed(), `"scheduler":`) >= 2
			})
		})
	}
}

// TestProgramsOfTheReleaseBefore runs programs that make mixed has built of an
// earlier commit beside those of this tree.
func TestProgramsOfTheReleaseBefore(t *testing.T) {
	folder := os.Getenv("KVSCOUT_PREVIOUS")
	if folder == "" {
		t.Skip("no earlier programs: make mixed builds them")
	}
	t.Run("agent", func(t *testing.T) {
		p := open(t, stage.Options{})
		e := p.engine(mixedEngine)
		a := e.run(filepath.Join(folder, "kvscout-agent"), "mixed")
		list := mixedPrompts()
		e.complete(list...)
		p.until("there is a verdict", func() bool { return p.member(e.id()) != nil || strings.Contains(a.log.String(), "refuses this member") })
		if p.member(e.id()) == nil {
			if text := a.log.String(); !strings.Contains(text, fmt.Sprintf("version %d:", protocol.Version)) {
				t.Errorf("refused without a reason: %s", text)
			}
			t.Log("REFUSED, and the agent says so")
			return
		}
		e.truth(patience, list...)
		t.Log("EXACT")
	})
	t.Run("scheduler", func(t *testing.T) {
		bin := programs(t, "./agent/cmd/kvscout-agent")
		bus := broker.New(t, nil)
		p := open(t, stage.Options{NATS: bus.URL()})
		conn := p.bus()
		e := p.engine(mixedEngine)
		a := e.run(filepath.Join(bin, "kvscout-agent"), "mixed")
		list := mixedPrompts()
		e.complete(list...)
		e.truth(patience, list...)
		// Its first verdict that is not SYNCING follows a whole snapshot, whose digest agrees.
		verdicts, err := conn.SubscribeSync(subjects(t).Verdict(e.id()))
		if err != nil {
			t.Fatal(err)
		}
		known := make(map[uint64]bool)
		for seen := time.Now(); time.Since(seen) < protocol.VerdictEvery+2*time.Second; {
			if m, err := verdicts.NextMsg(time.Second); err == nil {
				v := new(pb.Verdict)
				_ = proto.Unmarshal(m.Data, v)
				known[v.GetSender()] = true // ours
			}
		}
		old := launch(t, filepath.Join(folder, "kvscout-scheduler"), "-nats-url", bus.URL(), "-grpc-address", "127.0.0.1:0", "-admin-address", "127.0.0.1:0")
		next := func(want pb.Trust) *pb.Verdict {
			t.Helper()
			for end := time.Now().Add(3 * patience); time.Now().Before(end); {
				m, err := verdicts.NextMsg(time.Second)
				if err != nil {
					continue
				}
				v := new(pb.Verdict)
				if err := proto.Unmarshal(m.Data, v); err != nil {
					t.Fatal(err)
				}
				if !known[v.GetSender()] && (v.GetTrust() == want || v.GetRefused() != "") {
					return v
				}
			}
			t.Fatalf("no verdict %v", want)
			return nil
		}
		if v := next(pb.Trust_TRUST_EXACT); v.GetRefused() != "" {
			if !strings.Contains(v.GetRefused(), fmt.Sprint(protocol.Version)) || !strings.Contains(a.log.String(), "refuses this member") {
				t.Errorf("refused without a reason: %v\n%s", v, a.log.String())
			}
			t.Log("REFUSED, and the agent says so")
			return
		}
		mark := old.mark()
		e.complete(several(50, 12)...)
		// Nothing has changed its mind when it speaks the next time.
		if v := next(pb.Trust_TRUST_EXACT); v.GetRefused() != "" || len(old.log.Since(mark, "SYNCING")) > 0 {
			t.Errorf("deltas were not followed: %v", v)
		}
		t.Log("EXACT")
	})
}

// get reads a page of a program's probes.
func (p *play) get(address, path string) (int, string) {
	p.t.Helper()
	answer, err := p.http.Get("http://" + address + path)
	if err != nil {
		p.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return answer.StatusCode, string(text)
}
