package arrival

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

func generated(t *testing.T, spec string, size int) Workload {
	t.Helper()
	w, err := Generate(spec, Options{BlockSize: size})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// The ceilings of the staged loads follow from their published numbers: 750 prompts
// of 6,000 + 1,200 tokens and 249 of 8,000 + 1,000. Those of the closed loops
// follow from published means and bounds, which leave the rest of the
// distributions open.
func TestCeilingsAreWhatIsKnown(t *testing.T) {
	for spec, want := range map[string]float64{"r1": .9833, "r2": .9843, "code": .818, "chat": .795} {
		tolerance, size := .001, 16
		if spec == "code" || spec == "chat" {
			tolerance, size = .03, 64
		}
		if got := ceiling(generated(t, spec, size).Play(1)); math.Abs(got-want) > tolerance {
			t.Errorf("%s: ceiling %.4f, want %.4f", spec, got, want)
		}
	}
}

func TestStagesKeepTheirRates(t *testing.T) {
	for _, spec := range []string{"r1", "r2", "unshared"} {
		w := generated(t, spec, 512)
		list := all(w.Play(1))
		n := 0
		for i, s := range w.Stages {
			if i > 0 && s.Start-w.Stages[i-1].End < time.Minute {
				t.Errorf("%s: stage %d begins %v after the one before", spec, i, s.Start-w.Stages[i-1].End)
			}
			here := 0
			for ; n < len(list) && list[n].At < s.End; n++ {
				if list[n].At < s.Start {
					t.Fatalf("%s: request %d at %v is between stages", spec, n, list[n].At)
				}
				here++
			}
			want := s.QPS * (s.End - s.Start).Seconds()
			if off := math.Abs(float64(here) - want); off > 4*math.Sqrt(want) || spec == "r2" && off > .5 {
				t.Errorf("%s: %d requests at %v a second, want %.0f", spec, here, s.QPS, want)
			}
		}
		if n != len(list) {
			t.Errorf("%s: %d requests after the last stage", spec, len(list)-n)
		}
	}
}

func TestPromptsAreShuffledOnceAndCycled(t *testing.T) {
	list := all(generated(t, "r1:stages=15x150", 16).Play(1))
	last := func(r Request) blockkey.Key { return r.Keys[7200/16-1] }
	distinct := make(map[blockkey.Key]bool)
	heads := make(map[blockkey.Key]int)
	for i, r := range list[:750] {
		if distinct[last(r)] {
			t.Fatalf("request %d repeats before the cycle ends", i)
		}
		distinct[last(r)] = true
		heads[r.Keys[6000/16-1]]++
		if last(list[i+750]) != last(r) {
			t.Fatalf("request %d is not request %d again", i+750, i)
		}
	}
	if len(heads) != 150 {
		t.Errorf("%d groups", len(heads))
	}
	for _, n := range heads {
		if n != 5 {
			t.Fatalf("a group with %d prompts", n)
		}
	}
}

func TestUnsharedSharesNothingAndHotSharesItsHead(t *testing.T) {
	if got := ceiling(generated(t, "unshared", 64).Play(1)); got != 0 {
		t.Errorf("unshared: ceiling %v", got)
	}
	list := all(generated(t, "hot:seconds=30", 16).Play(1))
	for _, r := range list[1:] {
		if common(list[0], r) != 2548/16 {
			t.Fatalf("requests share %d blocks", common(list[0], r))
		}
	}
}

// A turn's prompt begins with all that was said before it, the answer too, and
// comes a pause after it.
func TestTurnsGoOnFromTheAnswer(t *testing.T) {
	s := generated(t, "chat:sessions=3,concurrency=2,ramp=10,pause=45,turns=3", 16).Play(1)
	type state struct {
		last Request
		done time.Duration
		n    int
	}
	sessions := make(map[string]*state)
	first := 0
	for range s.Len() {
		r, ok := s.Next()
		if !ok {
			t.Fatal("nobody asks though nobody waits")
		}
		at := r.At + 7*time.Second
		if before := sessions[r.Session]; before == nil {
			sessions[r.Session] = &state{r, at, 1}
			if first++; first <= 2 && r.At > 10*time.Second {
				t.Errorf("session %s begins at %v", r.Session, r.At)
			}
		} else {
			if whole := (before.last.Length + before.last.Output) / 16; len(before.last.Keys) != whole || common(before.last, r) != whole {
				t.Errorf("%s: %d keys of %d blocks, the next turn shares %d", r.Session, len(before.last.Keys), whole, common(before.last, r))
			}
			if r.At != before.done+45*time.Second {
				t.Errorf("%s: asks at %v after an answer at %v", r.Session, r.At, before.done)
			}
			*before = state{r, at, before.n + 1}
		}
		s.Done(r.ID, at)
	}
	if _, ok := s.Next(); ok || len(sessions) != 3 {
		t.Errorf("%d sessions, more: %v", len(sessions), ok)
	}
	for name, one := range sessions {
		if one.n != 3 {
			t.Errorf("%s has %d turns", name, one.n)
		}
	}
}

// What sessions ask does not depend on how fast they are answered.
func TestAnswersMoveTurnsButDoNotChangeThem(t *testing.T) {
	play := func(wait time.Duration) map[string][]blockkey.Key {
		s := generated(t, "agent:sessions=9,concurrency=4,turns=5", 128).Play(3)
		said := make(map[string][]blockkey.Key)
		for r, ok := s.Next(); ok; r, ok = s.Next() {
			said[r.Session] = append(said[r.Session], r.Keys...)
			s.Done(r.ID, r.At+wait)
		}
		return said
	}
	if d := cmp.Diff(play(0), play(90*time.Second)); d != "" {
		t.Error(d)
	}
}

func TestDrawsKeepMeanAndBounds(t *testing.T) {
	w := generated(t, "unshared:input=1500~600:1-100000,output=n300~50:10-1000,stages=100x100", 16)
	input, output, n := 0.0, 0.0, 0.0
	for _, r := range all(w.Play(1)) {
		input, output, n = input+float64(r.Length), output+float64(r.Output), n+1
	}
	if m := input / n; math.Abs(m-1500) > 30 {
		t.Errorf("mean input %.0f", m)
	}
	if m := output / n; math.Abs(m-300) > 3 {
		t.Errorf("mean output %.1f", m)
	}
	for _, r := range all(generated(t, "unshared:input=1500~3000:1000-2000,qps=10,seconds=50", 16).Play(1)) {
		if r.Length < 1000 || r.Length > 2000 {
			t.Fatalf("%d tokens", r.Length)
		}
	}
}

func TestEveryGeneratorIsDescribedAndPlays(t *testing.T) {
	for _, line := range Generators() {
		name, _, _ := strings.Cut(line, ":")
		s := generated(t, name, 512).Play(1)
		if n := len(all(s)); n != s.Len() || n < 100 {
			t.Errorf("%s: %d requests of %d", name, n, s.Len())
		}
	}
}

func TestBadSpecsSayWhatIsWanted(t *testing.T) {
	for spec, want := range map[string]string{
		"":                            `no generator "": want one of r1, r2`,
		"r3":                          "want one of r1, r2",
		"r1:group=3":                  `no setting "group": want constant`,
		"r1:":                         "",
		"r1:groups=x":                 `groups: "x": want a number`,
		"r1:groups=0":                 "0 groups",
		"r1:head=5~":                  `head: "5~": want a number, mean~sd:min-max`,
		"r1:head=5~1:9-3":             "head",
		"r1:head=-1":                  "head",
		"r1:head=1e99":                "head",
		"r1:head=NaN":                 "head",
		"r1:stages=5":                 "QPSxSECONDS",
		"r1:stages=0x5":               "requests a second",
		"r1:stages=5x5,qps=3":         "both",
		"r1:qps=3":                    "for 0 s",
		"r1:times=even":               "poisson or constant",
		"shared:head=0,input=0":       "empty",
		"shared:qps=1e5,seconds=1e6":  "at most 10000000",
		"chat:qps=3":                  `no setting "qps": want apps, concurrency`,
		"chat:sessions=0":             "0 sessions",
		"chat:turns=1e6,sessions=1e6": "sessions",
	} {
		_, err := Generate(spec, Options{BlockSize: 16})
		if want == "" {
			if err != nil {
				t.Errorf("%s: %v", spec, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), strings.Replace(want, "want constant", "want gap", 1)) {
			t.Errorf("%s: %v; want %q", spec, err, want)
		}
	}
	if _, err := Generate("r1", Options{BlockSize: 16, Speed: 2}); err == nil || !strings.Contains(err.Error(), "speed") {
		t.Errorf("speed of staged load: %v", err)
	}
}

// Equal keys mean equal prefixes: the key before is equal too, and stands at
// the same place.
func TestKeysAreChained(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{1, 16, 48, 128, 512, 1000}).Draw(t, "block size")
		idTokens := rapid.SampledFrom([]int{16, 512}).Draw(t, "tokens an id")
		var content strings.Builder
		for i := range rapid.IntRange(1, 8).Draw(t, "requests") {
			ids := rapid.SliceOfN(rapid.IntRange(0, 2), 1, 6).Draw(t, "ids")
			input := (len(ids)-1)*idTokens + rapid.IntRange(1, idTokens).Draw(t, "rest")
			fmt.Fprintf(&content, `{"chat_id":%d,"timestamp":%d,"input_length":%d,"output_length":1,"hash_ids":[%s]}`+"\n",
				i, rapid.IntRange(0, 3).Draw(t, "time"), input, strings.Trim(strings.Join(strings.Fields(fmt.Sprint(ids)), ","), "[]"))
		}
		w, err := Trace(strings.NewReader(content.String()), "rapid", Options{BlockSize: size})
		if err != nil {
			t.Skip(err) // lengths that fit no size
		}
		checkKeys(t, all(w.Play(rapid.Uint64().Draw(t, "seed"))), size)
	})
}

func TestGeneratedKeysAreChained(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spec := rapid.SampledFrom([]string{
			"shared:groups=3,prompts=2,head=100~80:0-300,input=50~50:1-200,output=5,qps=5,seconds=4",
			"hot:head=100,input=30,qps=5,seconds=4",
			"agent:sessions=6,concurrency=2,apps=2,shared=40,head=50~30:0-100,turns=4~2:1-6,input=20~30:0-90,output=10~9:0-50",
		}).Draw(t, "spec")
		size := rapid.SampledFrom([]int{1, 7, 16, 512}).Draw(t, "block size")
		w, err := Generate(spec, Options{BlockSize: size})
		if err != nil {
			t.Fatal(err)
		}
		s := w.Play(rapid.Uint64().Draw(t, "seed"))
		var list []Request
		var open []Request
		for len(list) < s.Len() {
			r, ok := s.Next()
			if ok {
				list, open = append(list, r), append(open, r)
			}
			if !ok || rapid.Bool().Draw(t, "answer one") {
				i := rapid.IntRange(0, len(open)-1).Draw(t, "which")
				s.Done(open[i].ID, max(open[i].At, list[len(list)-1].At))
				open = append(open[:i], open[i+1:]...)
				if len(open) == 0 {
					open = nil
				}
			}
			if at, ok := s.Peek(); ok && at < list[len(list)-1].At {
				t.Fatalf("next at %v, before %v", at, list[len(list)-1].At)
			}
			if len(open) == 0 && len(list) < s.Len() {
				if _, ok := s.Peek(); !ok {
					t.Fatal("nobody asks though nobody waits")
				}
			}
		}
		checkKeys(t, list, size)
	})
}

func checkKeys(t *rapid.T, list []Request, size int) {
	type place struct {
		before blockkey.Key
		depth  int
	}
	known := make(map[blockkey.Key]place)
	last := time.Duration(0)
	for i, r := range list {
		if r.ID != i || r.At < last {
			t.Fatalf("request %d has id %d and comes at %v after %v", i, r.ID, r.At, last)
		}
		last = r.At
		if n := len(r.Keys); n != r.Length/size && n != (r.Length+r.Output)/size {
			t.Fatalf("request %d: %d keys for %d + %d tokens", i, n, r.Length, r.Output)
		}
		before := blockkey.Key(0)
		for depth, k := range r.Keys {
			here := place{before, depth}
			if there, ok := known[k]; ok && there != here {
				t.Fatalf("request %d: one key at two places: %v and %v", i, there, here)
			}
			known[k] = here
			before = k
		}
	}
}
