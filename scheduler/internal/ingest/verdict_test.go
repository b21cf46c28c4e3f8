package ingest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// verdicts collects what a member's agent hears, without waiting.
func verdicts(t *testing.T, st *stand, subject string) func() []*pb.Verdict {
	conn := connect(t, st.server)
	sub, err := conn.SubscribeSync(subject)
	if err == nil {
		err = conn.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	var all []*pb.Verdict
	return func() []*pb.Verdict {
		for {
			m, err := sub.NextMsg(0)
			if err != nil {
				return all
			}
			v := new(pb.Verdict)
			if err := proto.Unmarshal(m.Data, v); err != nil {
				t.Fatal(err)
			}
			all = append(all, v)
		}
	}
}

func newest(all []*pb.Verdict) *pb.Verdict {
	if len(all) == 0 {
		return nil
	}
	return all[len(all)-1]
}

func TestAgentGetsAVerdictOnItsTrust(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{})
	a := newWireAgent(t, s, "ns_uid_0", 10).listen()
	heard := verdicts(t, st, a.sub.Verdict(a.name))
	say := func(what string, want pb.Trust) *pb.Verdict {
		t.Helper()
		await.True(t, what, func() bool {
			a.say()
			v := newest(heard())
			return v.GetTrust() == want
		})
		return newest(heard())
	}
	v := say("EXACT", pb.Trust_TRUST_EXACT)
	if _, err := protocol.ReadVerdict(encoded(t, v), a.name); err != nil || v.GetRefused() != "" {
		t.Errorf("%v: %v", v, err)
	}
	a.lose()
	a.tell()
	await.True(t, "SYNCING with the reason", func() bool {
		for _, v := range heard() {
			if v.GetTrust() == pb.Trust_TRUST_SYNCING && v.GetReason() != "" {
				return true
			}
		}
		a.lose()
		a.tell()
		return false
	})
	say("EXACT again", pb.Trust_TRUST_EXACT)
}

func encoded(t *testing.T, m proto.Message) []byte {
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestRefusedMemberIsTold is every way not to be believed: whoever speaks on
// subjects that somebody can have is told why it does not count.
func TestRefusedMemberGetsAVerdict(t *testing.T) {
	s := broker.New(t, nil)
	st := newStand(t, s, fleet.Config{MaxMembers: 1})
	first := newWireAgent(t, s, "ns_first_0", 10)
	first.say()
	await.True(t, "a full fleet", func() bool { return st.in.Stats().Members == 1 })
	spoiled := func(spoil func(*pb.Heartbeat)) func(*wireAgent) proto.Message {
		return func(a *wireAgent) proto.Message {
			h := a.heartbeat()
			spoil(h)
			return h
		}
	}
	for i, c := range []struct {
		tokens, want string // tokens: none for those of the name
		message      func(*wireAgent) proto.Message
	}{
		{"", "full", spoiled(func(*pb.Heartbeat) {})},
		{"", "the agent (release v9.9.9) speaks version 9 of the protocol, this scheduler (release unknown) version 1", spoiled(func(h *pb.Heartbeat) { h.Header.Version, h.Release = 9, "v9.9.9" })},
		{"", "another member", spoiled(func(h *pb.Heartbeat) { h.Header.Member = "ns_other_0" })},
		{"", "not a letter", spoiled(func(h *pb.Heartbeat) { h.Info.PodUid = "ip-10-0-0-1.ec2.internal" })},
		{"", "lanes", spoiled(func(h *pb.Heartbeat) { h.Lanes = nil })},
		{"my_ns.uid.0", "'_' outside the pod uid", spoiled(func(*pb.Heartbeat) {})},
		{"ns.uid.00", "rank is not a number", spoiled(func(*pb.Heartbeat) {})},
		{"ns.u+id.0", "not a letter", spoiled(func(*pb.Heartbeat) {})},
	} {
		name := fmt.Sprintf("ns_refused-%d_0", i)
		a := newWireAgent(t, s, name, 10)
		subject := a.sub.Load(name)
		heard := verdicts(t, st, a.sub.Verdict(name))
		if c.tokens != "" {
			subject, heard = "kvscout.v1.test.load."+c.tokens, verdicts(t, st, "kvscout.v1.test.verdict."+c.tokens)
			name = strings.ReplaceAll(c.tokens, ".", "_")
		}
		a.send(subject, c.message(a))
		await.True(t, "told: "+c.want, func() bool { return len(heard()) > 0 })
		v := newest(heard())
		if !strings.Contains(v.GetRefused(), c.want) || v.GetMember() != name || v.GetSender() == 0 {
			t.Errorf("%s: told %v, want %q", subject, v, c.want)
		}
	}
	if got := st.in.Stats(); got.Members != 1 || got.Verdicts < 8 {
		t.Errorf("%+v", got)
	}
}

// TestVerdictsAreSeldom counts what a member is told that says the same, and
// what one that is refused and accepted by turns.
func TestVerdictsAreSeldom(t *testing.T) {
	var v verdict
	now := start
	told := func(o opinion) int {
		n := 0
		for range 200 { // a minute of heartbeats
			if v.due(o, now) {
				n++
			}
			now = now.Add(300 * time.Millisecond)
		}
		return n
	}
	if n := told(opinion{epoch: 1, trust: fleet.Exact}); n < 4 || n > 7 {
		t.Errorf("told %d times in a minute without change", n)
	}
	flaps := 0
	for i := range 1000 { // a second
		if v.due(opinion{epoch: 1, trust: fleet.Exact, refused: i%2 == 0}, now) {
			flaps++
		}
		now = now.Add(time.Millisecond)
	}
	if flaps < 1 || flaps > 6 {
		t.Errorf("told %d times in a second of change", flaps)
	}
	if !v.due(opinion{epoch: 2, trust: fleet.Exact}, now.Add(verdictCalm)) {
		t.Error("a new epoch waits: its agent may have begun anew and know nothing")
	}
}

func TestRefusalEndsWithItsOccasions(t *testing.T) {
	var v verdict
	if !v.refuse("bad", start) || v.refuse("worse", start.Add(time.Second)) {
		t.Error("the first is not told from the next")
	}
	if v.accept(start.Add(2*time.Second)) || v.refused != "worse" {
		t.Error("one good message ends it")
	}
	if !v.accept(start.Add(time.Second+refusedFor)) || v.refused != "" {
		t.Error("good messages do not end it")
	}
}

// TestTellingEverybodyIsCheap is a thousand members who say what they always
// say, for ten minutes.
func TestVerdictsForEverybodyAreCheap(t *testing.T) {
	w := newWorker(&Ingest{cfg: Config{Index: index.New(index.Config{}), Fleet: fleet.New(fleet.Config{})}})
	sent := 0
	w.send = func(_ string, v *pb.Verdict) { sent += proto.Size(v) }
	for i := range 1000 {
		name := fmt.Sprintf("ns_uid-%d_0", i)
		w.members[name] = newMember(name, fleet.ID(i), w.in.cfg.Index, rand.New(rand.NewPCG(1, 1)), &w.in.count, start)
	}
	for beat := range 2000 {
		now := start.Add(time.Duration(beat) * protocol.HeartbeatEvery)
		for name := range w.members {
			w.publish(name, now)
		}
	}
	if perSecond := sent / 600; perSecond > 10<<10 {
		t.Errorf("%d bytes a second", perSecond)
	}
}
