package rank

import (
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/reconcile"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/e2e/recording"
	"github.com/kvscout/kvscout/protocol/pb"
)

// recorded is one rank of a recorded engine: what its stream announced in all,
// and what the engine had counted at the end.
type recorded struct {
	name     string
	flow     reconcile.Totals
	counters reconcile.Counters
}

func recordings(t *testing.T) (list []recorded) {
	t.Helper()
	names, err := filepath.Glob("../../../e2e/testdata/recordings/*.jsonl.gz")
	if err != nil || len(names) == 0 {
		t.Fatalf("%v, %v", names, err)
	}
	for _, name := range names {
		rec, err := recording.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		var page vllm.Page
		answered := make(map[int]float64)
		ranks := make([]*Rank, rec.Ranks())
		for n := range ranks {
			ranks[n] = testRank(t, Identity{Model: "m", Reported: rec.Meta.BlockSize, Blocks: rec.Meta.Blocks})
			ranks[n].State(vllm.Exact, "")
		}
		var dec vllm.Decoder
		pages := 0
		for _, step := range rec.Steps {
			switch {
			case step.Batch != nil:
				b, err := dec.Decode(step.Batch.Payload)
				if err != nil {
					t.Fatal(err)
				}
				ranks[step.Batch.Rank].Apply(vllm.Mark{Sequence: step.Batch.Sequence, Whole: true}, b)
			case step.Done != nil:
				answered[0]++
			case step.Metrics != "":
				if page, err = vllm.ParseMetrics([]byte(step.Metrics + "\n")); err != nil {
					t.Fatal(err)
				}
				pages++
			}
		}
		if pages < 2 || strings.Contains(name, "restart") {
			continue // nothing was counted at the end, or not all
		}
		for n, r := range ranks {
			l := page.Load(n)
			if l.FirstTokens == nil {
				l.FirstTokens = ptr(answered[0] / float64(len(ranks))) // the recorded pages are cut
			}
			counters, ok := r.countersLocked(l, 0)
			if !ok {
				t.Fatalf("%s: %+v", name, l)
			}
			list = append(list, recorded{name: filepath.Base(name), flow: r.flowLocked(), counters: counters})
		}
	}
	return list
}

// TestRecordedEnginesAreHeldAgainstEachOther holds the stream of each recorded
// engine against what each had counted at its end: it is its own, and few
// totals alone could be another's.
func TestRecordedEnginesAreHeldAgainstEachOther(t *testing.T) {
	list := recordings(t)
	if len(list) < 6 {
		t.Fatalf("only %d", len(list))
	}
	pairs, apart := 0, 0
	for i, engine := range list {
		for k, stream := range list {
			var check reconcile.Check
			now := time.Unix(1, 0)
			found := reconcile.Finding{}
			for range 150 {
				check.Announce(now, stream.flow)
				now = now.Add(100 * time.Millisecond)
				check.Observe(now, now, engine.counters, stream.flow, true)
				if f := check.Settle(now, stream.flow); f.Kind != reconcile.None {
					found = f
				}
			}
			switch {
			case i != k:
				pairs++
				if found.Kind != reconcile.None {
					apart++
				}
			case found.Kind != reconcile.None:
				t.Errorf("%s: %+v; %+v %+v", engine.name, found, engine.counters, stream.flow)
			}
		}
	}
	t.Logf("%d of %d pairs told apart", apart, pairs)
	if apart*3 < pairs*2 {
		t.Errorf("only %d of %d pairs are told apart", apart, pairs)
	}
}

// load is a look at an engine that computed so many tokens of so many requests.
func computed(tokens, requests float64) *vllm.Load {
	return &vllm.Load{
		Running: ptr(0.0), Waiting: ptr(0.0), ComputedPromptTokens: &tokens, GenerationTokens: ptr(0.0), FirstTokens: &requests,
		QueriedTokens: &tokens, HitTokens: ptr(0.0),
	}
}

// polls lets an engine be looked at until its stream was judged.
func (r *Rank) polls(l *vllm.Load, seconds float64) {
	for end := time.Now().Add(time.Duration(seconds * float64(time.Second))); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		r.weigh(l, Emptied{Known: true}, r.Position(), time.Now())
		r.Compare()
	}
}

func prompts(from, n int) vllm.Batch {
	s := mirror.Store{BlockSize: 16, Physical: true}
	for i := from; i < from+n; i++ {
		s.Hashes = append(s.Hashes, uint64(i+1))
		for k := range 16 {
			s.Tokens = append(s.Tokens, uint32(16*i+k))
		}
	}
	return vllm.Batch{Events: []vllm.Event{{Kind: vllm.Stored, Store: s}}}
}

// TestForeignStreamIsForgotten is a rank that hears what its engine did not
// compute, until the stream is another one.
func TestForeignStreamIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := testRank(t, Identity{Model: "m", Reported: 16})
		r.engine, r.source = "http://ours:8000", vllm.Source{Endpoint: "tcp://other:5557"}
		r.State(vllm.Exact, "")
		r.Apply(vllm.Mark{Sequence: 0, Whole: true}, prompts(0, 100))
		if n, st := held(t, r); n != 100 || st.Trust != pb.Trust_TRUST_EXACT {
			t.Fatalf("%d blocks, %+v", n, st)
		}
		epoch := r.epoch
		r.polls(computed(0, 0), 3)
		n, st := held(t, r)
		if n != 0 || st.Trust != pb.Trust_TRUST_UNKNOWN || st.Epoch <= epoch || !strings.Contains(st.Reason, "http://ours:8000") || !strings.Contains(st.Reason, "tcp://other:5557") {
			t.Fatalf("%d blocks, %+v", n, st)
		}
		r.Apply(vllm.Mark{Sequence: 1, Whole: true}, prompts(100, 10))
		if n, st := held(t, r); n != 0 || st.Trust != pb.Trust_TRUST_UNKNOWN || st.EngineBatches != 2 {
			t.Errorf("%d blocks, %+v", n, st)
		}
		if r.stream.found != 1 {
			t.Errorf("found %d times", r.stream.found)
		}
		if file, _, err := r.capture(nil, 0); file != nil || err != nil {
			t.Errorf("it is saved: %d bytes, %v", len(file), err)
		}
		// Another life at the other end: it is compared before it is believed.
		r.NewIncarnation("nobody listens")
		r.State(vllm.Exact, "")
		r.Apply(vllm.Mark{Sequence: 0, Whole: true}, prompts(0, 50))
		if _, st := held(t, r); st.Trust != pb.Trust_TRUST_SYNCING {
			t.Errorf("on trial: %+v", st)
		}
		r.polls(computed(800, 1), 3)
		if n, st := held(t, r); n != 50 || st.Trust != pb.Trust_TRUST_EXACT {
			t.Errorf("%d blocks, %+v", n, st)
		}
	})
}

// TestStreamWithoutItsBeginningIsMeasuredFromNowOn is an agent that comes late,
// without replay: what the engine computed before says nothing.
func TestStreamWithoutItsBeginningIsMeasuredFromNowOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := testRank(t, Identity{Model: "m", Reported: 16})
		r.State(vllm.Approximate, "no replay")
		r.polls(computed(50_000, 50), 2)
		b := prompts(0, 100)
		b.Events = append([]vllm.Event{{Kind: vllm.Cleared}}, b.Events...)
		r.Apply(vllm.Mark{Sequence: 47, Whole: true}, b) // whole from here on
		r.State(vllm.Exact, "")
		r.polls(computed(51_600, 51), 5)
		if n, st := held(t, r); n != 100 || st.Trust != pb.Trust_TRUST_EXACT {
			t.Errorf("%d blocks, %+v", n, st)
		}
		r.polls(computed(61_600, 61), 3)
		if _, st := held(t, r); st.Trust != pb.Trust_TRUST_UNKNOWN {
			t.Errorf("10,000 tokens are missing: %+v", st)
		}
	})
}

// TestWhatIsComputedDuringAnOutageIsNotMissing is a stream that is away for a
// while and comes back whole.
func TestWhatIsComputedDuringAnOutageIsNotMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := testRank(t, Identity{Model: "m", Reported: 16})
		r.State(vllm.Exact, "")
		r.polls(computed(0, 0), 2)
		r.State(vllm.Syncing, "lost")
		r.polls(computed(16_000, 10), 5)
		r.State(vllm.Exact, "")
		r.Apply(vllm.Mark{Sequence: 0, Whole: true}, prompts(0, 1000))
		r.polls(computed(16_000, 10), 5)
		if n, st := held(t, r); n != 1000 || st.Trust != pb.Trust_TRUST_EXACT {
			t.Errorf("%d blocks, %+v", n, st)
		}
	})
}

// TestEngineWithoutCountersIsNotHeldAgainstThem is a page that lacks what the
// check needs.
func TestEngineWithoutCountersIsNotHeldAgainstThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for n, drop := range []func(*vllm.Load){
			func(l *vllm.Load) { l.ComputedPromptTokens = nil }, func(l *vllm.Load) { l.GenerationTokens = nil },
			func(l *vllm.Load) { l.FirstTokens = nil }, func(l *vllm.Load) { l.Running = nil },
		} {
			r := testRank(t, Identity{Model: "m", Reported: 16})
			r.State(vllm.Exact, "")
			l := computed(90_000, 9)
			drop(l)
			r.polls(l, 3)
			if _, st := held(t, r); st.Trust != pb.Trust_TRUST_EXACT {
				t.Errorf("%d: %+v", n, st)
			}
		}
	})
}
