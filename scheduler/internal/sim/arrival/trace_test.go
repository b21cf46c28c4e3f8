package arrival

import (
	"bytes"
	"compress/gzip"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func released(t *testing.T, name string, o Options) Workload {
	t.Helper()
	f, err := os.Open("../testdata/mooncake_" + name + "_trace.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := Trace(f, name, o)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func text(t *testing.T, content string, size int) Workload {
	t.Helper()
	w, err := Trace(strings.NewReader(content), "test", Options{BlockSize: size})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func all(s Source) []Request {
	var list []Request
	for {
		at, known := s.Peek()
		r, ok := s.Next()
		if ok != known || ok && r.At != at {
			panic("Peek and Next differ")
		}
		if !ok {
			return list
		}
		list = append(list, r)
		s.Done(r.ID, r.At)
	}
}

func quantile(sorted []int, q float64) int { return sorted[int(math.Round(q*float64(len(sorted)-1)))] }

// The figures were computed from the released files by other means.
func TestReleasedTracesAreWhatIsKnownOfThem(t *testing.T) {
	type figures struct {
		Requests, InputP50, InputP90, InputMax, OutputP50 int
		InputMean, OutputMean                             float64
		Span                                              float64
		Hit                                               float64
	}
	for name, want := range map[string]figures{
		"conversation": {12031, 6909, 27367, 126195, 350, 12035, 343, 3537, .3734},
		"synthetic":    {3993, 11587, 38615, 191378, 69, 15325, 149, 1022, .6504},
	} {
		w := released(t, name, Options{BlockSize: 512})
		list := all(w.Play(1))
		var inputs, outputs []int
		input, output := 0, 0
		for _, r := range list {
			inputs, outputs = append(inputs, r.Length), append(outputs, r.Output)
			input, output = input+r.Length, output+r.Output
		}
		slices.Sort(inputs)
		slices.Sort(outputs)
		got := figures{len(list), quantile(inputs, .5), quantile(inputs, .9), inputs[len(inputs)-1], quantile(outputs, .5),
			math.Round(float64(input) / float64(len(list))), math.Round(float64(output) / float64(len(list))),
			list[len(list)-1].At.Truncate(time.Second).Seconds(), math.Round(ceiling(w.Play(1))*1e4) / 1e4}
		close := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) <= max(1e-9, min(a, b)*.0011) })
		if d := cmp.Diff(want, got, close); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// Rounded times must not come as bursts, and no request may leave its tick.
func TestTicksAreSpread(t *testing.T) {
	w := released(t, "conversation", Options{BlockSize: 512})
	list := all(w.Play(1))
	busy := make(map[time.Duration]int)
	late := 0
	for _, r := range list {
		busy[r.At/(100*time.Millisecond)]++
		if r.At%(3*time.Second) > 1500*time.Millisecond {
			late++
		}
	}
	most := 0
	for _, n := range busy {
		most = max(most, n)
	}
	if share := float64(late) / float64(len(list)); math.Abs(share-.5) > .02 || most > 8 {
		t.Errorf("%.3f of the requests in the later half of their tick, up to %d in 0.1 s", share, most)
	}
	if d := cmp.Diff(all(w.Play(1))[:100], list[:100]); d != "" {
		t.Errorf("same seed, other requests: %s", d)
	}
	if other := all(w.Play(2)); other[50].At == list[50].At {
		t.Error("another seed spreads the same")
	}
	if one, two := all(text(t, bailian, 16).Play(1)), all(text(t, bailian, 16).Play(2)); one[1].At != two[1].At {
		t.Errorf("a time that is no tick was moved: %v, %v", one[1].At, two[1].At)
	}
}

func TestSpeedDividesTimes(t *testing.T) {
	w, err := Trace(strings.NewReader(bailian), "test", Options{BlockSize: 16, Speed: 2})
	if err != nil {
		t.Fatal(err)
	}
	if list := all(w.Play(1)); list[1].At != 568*time.Millisecond || list[2].At != 693*time.Millisecond {
		t.Errorf("1.136 s and 1.386 s at twice the speed are %v and %v", list[1].At, list[2].At)
	}
}

// The requests of the beginning come when they come in the whole run.
func TestFirstIsTheBeginningOfTheRun(t *testing.T) {
	o := Options{BlockSize: 512, Speed: 2}
	whole := all(released(t, "conversation", o).Play(1))
	o.First = 150 * time.Second
	first := all(released(t, "conversation", o).Play(1))
	n := slices.IndexFunc(whole, func(r Request) bool { return r.At >= o.First })
	if n < 500 || len(first) != n {
		t.Fatalf("%d requests of %d that come so early", len(first), n)
	}
	for i, r := range first {
		if r.At != whole[i].At || r.Length != whole[i].Length || !slices.Equal(r.Keys, whole[i].Keys) {
			t.Fatalf("request %d is %+v, in the whole run %+v", i, r, whole[i])
		}
	}
	o.First = -1
	if _, err := Trace(strings.NewReader(""), "test", o); err == nil {
		t.Error("a time below 0 is taken")
	}
}

func TestSmallerBlocksShareAsMuchAsTheIDs(t *testing.T) {
	w := text(t, `{"timestamp":0,"input_length":1100,"output_length":5,"hash_ids":[7,8,9]}
{"timestamp":1000,"input_length":1100,"output_length":5,"hash_ids":[7,8,9]}
{"timestamp":2000,"input_length":600,"output_length":5,"hash_ids":[7,10]}
`, 16)
	list := all(w.Play(1))
	for i, want := range []int{1100 / 16, 1100 / 16, 600 / 16} {
		if len(list[i].Keys) != want {
			t.Errorf("request %d has %d keys, want %d", i, len(list[i].Keys), want)
		}
	}
	if got := common(list[0], list[1]); got != 64 {
		t.Errorf("two prompts of the same ids share %d blocks: want the 64 of the whole ids", got)
	}
	if got := common(list[0], list[2]); got != 32 {
		t.Errorf("two prompts with one id in common share %d blocks, want 32", got)
	}
}

// common counts the leading keys that two requests share.
func common(a, b Request) int {
	n := 0
	for n < min(len(a.Keys), len(b.Keys)) && a.Keys[n] == b.Keys[n] {
		n++
	}
	return n
}

const bailian = `{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 41, "output_length": 10, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.25, "input_length": 70, "output_length": 0, "type": "text", "turn": 2, "hash_ids": [1, 2, 4, 5, 18446744073709551615]}
{"chat_id": 161, "parent_chat_id": -1, "timestamp": 62.5, "input_length": 40, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [9, 2, 3]}
`

func TestBailianIDsAreChained(t *testing.T) {
	list := all(text(t, bailian, 16).Play(1))
	if list[1].At != 1136*time.Millisecond || list[1].Output != 1 {
		t.Errorf("second request at %v with %d tokens to generate", list[1].At, list[1].Output)
	}
	if list[1].Session != list[0].Session || list[2].Session == list[0].Session || list[0].Session == "" {
		t.Errorf("sessions %q, %q, %q", list[0].Session, list[1].Session, list[2].Session)
	}
	if got := common(list[0], list[1]); got != 2 {
		t.Errorf("the second turn shares %d blocks with the first, want 2", got)
	}
	if list[2].Keys[1] == list[0].Keys[1] {
		t.Error("equal blocks behind different ones have equal keys")
	}
}

func TestAzureSharesNothing(t *testing.T) {
	for _, content := range []string{
		"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n",
		"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,374,44\n2024-05-10 00:00:04.324509+00:00,396,109\n",
	} {
		list := all(text(t, content, 16).Play(1))
		if len(list) != 2 || list[1].At != 4314579*time.Microsecond || list[1].Length != 396 || list[1].Output != 109 {
			t.Errorf("read %+v", list)
		}
		if len(list[0].Keys) != 23 || common(list[0], list[1]) != 0 {
			t.Errorf("%d keys, %d in common", len(list[0].Keys), common(list[0], list[1]))
		}
	}
}

func TestBadTracesAreNamed(t *testing.T) {
	good := `{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}` + "\n"
	for content, want := range map[string]string{
		"":                             "no request",
		" \n\n":                        "no request",
		"hello\n":                      "line 1: \"hello\": want JSON lines",
		"[1]\n":                        "line 1",
		good + `{"timestamp":0` + "\n": "line 2",
		good + `{"timestamp":0,"input_length":600,"output_length":5}`:                          "line 2: timestamp, input_length, output_length or hash_ids is missing",
		good + "\n" + `{"timestamp":0,"input_length":6000,"output_length":5,"hash_ids":[1,2]}`: "line 3: 2 ids for 6000 tokens",
		`{"timestamp":0,"input_length":0,"output_length":5,"hash_ids":[]}`:                     "line 1: 0 tokens of input",
		`{"timestamp":0,"input_length":6,"output_length":-5,"hash_ids":[1]}`:                   "-5 of output",
		`{"timestamp":0,"input_length":6,"output_length":5,"hash_ids":[1.5]}`:                  "line 1: hash_ids holds 1.5",
		`{"timestamp":0,"input_length":6,"output_length":5,"hash_ids":"a"}`:                    "want a list of integers",
		`{"timestamp":1e300,"input_length":6,"output_length":5,"hash_ids":[1]}`:                "out of range",
		azureHeader + "\n":                          "line 1: no request",
		azureHeader + "\nnoon,1,1\n":                "line 2: timestamp",
		azureHeader + "\n0001-01-01 00:00:00,1,1\n": "line 2: timestamp",
		azureHeader + "\n2023-11-16 18:15:46,x,1\n": "line 2: \"x\"",
		azureHeader + "\n2023-11-16 18:15:46,1\n":   "line 2: 2 fields",
		good + strings.Repeat("x", maxLine+1):       "line 2: longer than",
		"\x1f\x8bno gzip at all":                    "gzip",
	} {
		_, err := Trace(strings.NewReader(content), "FILE", Options{BlockSize: 16})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "FILE: ") {
			t.Errorf("%.80q: %v; want FILE and %q", content, err, want)
		}
	}
	for _, o := range []Options{{}, {BlockSize: 16, Speed: -1}, {BlockSize: 16, Speed: math.NaN()}, {BlockSize: 16, Speed: math.Inf(1)}} {
		if _, err := Trace(strings.NewReader(good), "FILE", o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}

func FuzzTrace(f *testing.F) {
	f.Add([]byte(bailian), 16)
	f.Add([]byte(`{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}`+"\n"), 512)
	f.Add([]byte(azureHeader+"\n2023-11-16 18:15:46.6805900,374,44\n"), 16)
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write([]byte(bailian))
	w.Close()
	f.Add(z.Bytes(), 48)
	f.Fuzz(func(t *testing.T, content []byte, size int) {
		w, err := Trace(bytes.NewReader(content), "fuzz", Options{BlockSize: size})
		if err != nil || size < 16 {
			return
		}
		s := w.Play(1)
		last := time.Duration(0)
		for i := 0; ; i++ {
			r, ok := s.Next()
			if !ok {
				if i != s.Len() {
					t.Fatalf("%d requests of %d", i, s.Len())
				}
				return
			}
			if r.ID != i || r.At < last || r.Length < 1 || r.Output < 1 || len(r.Keys) != r.Length/size {
				t.Fatalf("request %d: %d at %v, %d + %d tokens, %d keys", i, r.ID, r.At, r.Length, r.Output, len(r.Keys))
			}
			last = r.At
		}
	})
}
