package recording_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/e2e/recording"
)

// The numbers of isolated requests come from a count of overlapping intervals,
// made another way than here.
func TestIsolatedRequestsAreFound(t *testing.T) {
	for name, want := range map[string]struct{ isolated, ranks int }{
		"0.32.0-default":          {271, 1},
		"0.32.0-lora":             {164, 1},
		"0.32.0-restart":          {88, 1},
		"0.32.0-offload-selfdesc": {105, 1},
		"0.32.0-gemma3":           {126, 1},
		"0.23.0-default":          {269, 1},
		"0.23.0-dp2":              {120, 2},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := recording.Open(filepath.Join("..", "testdata", "recordings", name+".jsonl.gz"))
			if err != nil {
				t.Fatal(err)
			}
			if got := len(r.Questions()); got != want.isolated {
				t.Errorf("%d isolated requests, want %d", got, want.isolated)
			}
			if got := r.Ranks(); got != want.ranks {
				t.Errorf("%d ranks, want %d", got, want.ranks)
			}
			for _, q := range r.Questions() {
				if q.Done.Number == 0 || q.Done.PromptTokens != len(r.Steps[q.Step].Send.Tokens) {
					t.Fatalf("question at step %d has the answer %+v", q.Step, q.Done)
				}
			}
		})
	}
}

func TestWhatIsNotARecordingIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"empty":            "",
		"no meta":          `{"t":1,"send":1,"tokens":[1]}`,
		"not JSON":         "topic seq payload",
		"two frames":       `{"t":1,"rank":0,"frames":["",""]}`,
		"frame not base64": `{"t":1,"rank":0,"frames":["?","?","?"]}`,
		"short sequence":   `{"t":1,"rank":0,"frames":["a3Y=","AAAA","kA=="]}`,
	} {
		if _, err := recording.Read(strings.NewReader(text)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestARequestBesideAnotherIsNotIsolated(t *testing.T) {
	r, err := recording.Read(strings.NewReader(`{"t":0,"meta":{"block_size":16}}
{"t":1,"send":1,"tokens":[1]}
{"t":1.1,"send":2,"tokens":[2]}
{"t":1.2,"done":1}
{"t":1.3,"send":3,"tokens":[3]}
{"t":1.4,"done":2}
{"t":1.5,"done":3}
{"t":2,"rank":0,"frames":["","AAAAAAAAAAA=","kA=="]}
{"t":2.1,"send":4,"tokens":[4]}
{"t":2.2,"done":4}
{"t":2.3,"action":"reset_prefix_cache"}
{"t":2.4,"send":5,"tokens":[5],"to_rank":1}
{"t":2.5,"done":5,"cached_tokens":16,"prompt_tokens":1}
{"t":3,"send":6,"tokens":[6]}`))
	if err != nil {
		t.Fatal(err)
	}
	got := r.Questions()
	if len(got) != 1 || got[0].Done.Number != 5 || !got[0].Blind || got[0].Rank != 1 || got[0].Done.CachedTokens != 16 {
		t.Errorf("questions %+v, want only the blind request 5 on rank 1", got)
	}
}
