package publish

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/pb"
)

func verdictOf(sender uint64, trust pb.Trust, refused string) []byte {
	data, err := proto.Marshal(&pb.Verdict{
		Version: 1, Member: member, Sender: sender, Scheduler: "host-" + string(rune('a'+sender%26)),
		Trust: trust, Refused: refused, IntervalMs: 10_000,
	})
	if err != nil {
		panic(err)
	}
	return data
}

func TestRefusalIsLoggedOnceAndItsEndToo(t *testing.T) {
	var log bytes.Buffer
	now := time.Now()
	v := newVerdicts(slog.New(slog.NewTextHandler(&log, nil)), "v0.1.0", now)
	for _, refused := range []string{"", "no such model", "no such model", "still none", "", ""} {
		v.take(verdictOf(1, pb.Trust_TRUST_EXACT, refused), member, now)
	}
	text := log.String()
	if strings.Count(text, "level=ERROR") != 1 || !strings.Contains(text, "no such model") || strings.Count(text, "accepts") != 1 {
		t.Error(text)
	}
}

// TestSchedulerOfAnotherVersionRefuses whatever it says beside its version.
func TestSchedulerOfAnotherVersionRefuses(t *testing.T) {
	var log bytes.Buffer
	now := time.Now()
	v := newVerdicts(slog.New(slog.NewTextHandler(&log, nil)), "v0.1.0", now)
	data, err := proto.Marshal(&pb.Verdict{Version: 9, Member: member, Sender: 1, Scheduler: "host-b", Trust: 99, Release: "v9.9.9", IntervalMs: 10_000})
	if err != nil {
		t.Fatal(err)
	}
	v.take(data, member, now)
	want := "the scheduler (release v9.9.9) speaks version 9 of the protocol, this agent (release v0.1.0) version 1"
	if list := v.list(); len(list) != 1 || !strings.HasPrefix(list[0].Refused, want) || v.refused.Load() != 0 {
		t.Errorf("%+v", list)
	}
	if !strings.Contains(log.String(), want) {
		t.Error(log.String())
	}
	v.take(verdictOf(1, pb.Trust_TRUST_EXACT, ""), member, now)
	if list := v.list(); list[0].Refused != "" {
		t.Errorf("%+v", list)
	}
}

func TestSilentSchedulersAreForgotten(t *testing.T) {
	var log bytes.Buffer
	now := time.Now()
	v := newVerdicts(slog.New(slog.NewTextHandler(&log, nil)), "v0.1.0", now)
	v.take(verdictOf(1, pb.Trust_TRUST_EXACT, ""), member, now)
	v.take(verdictOf(2, pb.Trust_TRUST_SYNCING, ""), member, now.Add(20*time.Second))
	v.expire(now.Add(31 * time.Second))
	if list := v.list(); len(list) != 1 || list[0].Scheduler != "host-c" || list[0].Trust != pb.Trust_TRUST_SYNCING {
		t.Errorf("%+v", list)
	}
	v.expire(now.Add(51 * time.Second))
	if list := v.list(); len(list) != 0 {
		t.Errorf("%+v", list)
	}
	for i := range 100 {
		v.expire(now.Add(time.Duration(52+i) * time.Second))
	}
	if n := strings.Count(log.String(), "no scheduler answers"); n != 1 {
		t.Errorf("said %d times: %s", n, log.String())
	}
}

func TestSchedulersAreBounded(t *testing.T) {
	now := time.Now()
	v := newVerdicts(slog.New(slog.DiscardHandler), "v0.1.0", now)
	for i := range uint64(10 * maxSchedulers) {
		v.take(verdictOf(i+1, pb.Trust_TRUST_EXACT, ""), member, now)
	}
	v.take([]byte("no verdict"), member, now)
	if n := len(v.list()); n != maxSchedulers || v.refused.Load() != 9*maxSchedulers+1 {
		t.Errorf("%d remembered, %d refused", n, v.refused.Load())
	}
}

func TestVerdictsReachThePublisher(t *testing.T) {
	s := broker.New(t, nil)
	conn := connect(t, s.URL())
	pub, _ := start(t, connect(t, s.URL()), newRank(), 10*time.Millisecond)
	await.True(t, "the opinion", func() bool {
		if err := conn.Publish("kvscout.v1.test.verdict.ns.uid.0", verdictOf(1, pb.Trust_TRUST_APPROXIMATE, "full")); err != nil {
			t.Fatal(err)
		}
		list := pub.Opinions()
		return len(list) == 1 && list[0].Refused == "full" && list[0].Trust == pb.Trust_TRUST_APPROXIMATE
	})
	if protocol.VerdictEvery < 2*protocol.HeartbeatEvery {
		t.Error("verdicts come as often as heartbeats")
	}
}
