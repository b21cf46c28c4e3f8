package profile

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const good = `
profiles:
- namespace: prod
  workload: Deployment/llama
  model: m
  gpu: L20
  created: 1756000000
  indexes: [[32, 128], [512, 2048, 8192]]
  tputs: [[8, 4, 1], [4, 2, 0]]
  e2e:   [[1, 2, 4], [2, 4, .nan]]
  ttft:  [[0.1, NaN, Infinity], [-1, null]]
  tpot:  [[0.02, 0.03, 0.04]]
  slos: {percentile: 99, tpot: 0.05, ttft: 2}
`

func parse(t *testing.T, text string) *Set {
	t.Helper()
	list, err := Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewSet(list)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestNearestCellInLog2Clamped(t *testing.T) {
	p := parse(t, good).Of(Key{"prod", "Deployment/llama", "m", "L20"})
	nan := math.NaN()
	for _, c := range []struct {
		output, input float64
		want          Cell
	}{
		{32, 512, Cell{8, 1, 0.1, 0.02}},
		{63, 512, Cell{8, 1, 0.1, 0.02}}, // 64 is the middle of 32 and 128
		{65, 1023, Cell{4, 2, nan, nan}},
		{65, 1025, Cell{2, 4, nan, nan}},
		{1, 1, Cell{8, 1, 0.1, 0.02}},
		{nan, 0, Cell{8, 1, 0.1, 0.02}},
		{1e6, 1e6, Cell{nan, nan, nan, nan}},
		{32, 1e6, Cell{1, 4, nan, 0.04}},
	} {
		if diff := cmp.Diff(c.want, p.At(c.output, c.input), cmpopts.EquateNaNs()); diff != "" {
			t.Errorf("%v, %v:\n%s", c.output, c.input, diff)
		}
	}
	if want := (Targets{TTFT: 2, TPOT: 0.05}); p.Targets != want || p.Created != 1756000000 {
		t.Errorf("%+v, created %d", p.Targets, p.Created)
	}
}

func TestOneModelInTwoNamespacesStaysApart(t *testing.T) {
	s := parse(t, `{"profiles": [
		{"namespace": "a", "model": "m", "indexes": [[1], [1]], "tputs": [[1]]},
		{"namespace": "b", "model": "m", "indexes": [[1], [1]], "tputs": [[2]]},
		{"namespace": "b", "workload": "Deployment/x", "model": "m", "indexes": [[1], [1]], "tputs": [[3]]},
		{"namespace": "b", "model": "m", "gpu": "A10", "indexes": [[1], [1]], "tputs": [[4]]},
		{"model": "m", "gpu": "A10", "indexes": [[1], [1]], "tputs": [[5]]}]}`)
	for _, c := range []struct {
		member Key
		want   float64 // 0: none
	}{
		{Key{"a", "", "m", ""}, 1},
		{Key{"b", "", "m", ""}, 2},
		{Key{"b", "Deployment/x", "m", "L20"}, 3},
		{Key{"b", "Deployment/x", "m", "A10"}, 3},
		{Key{"b", "Deployment/y", "m", "A10"}, 4},
		{Key{"c", "", "m", "A10"}, 5},
		{Key{"c", "", "m", "L20"}, 0},
		{Key{"a", "", "other", ""}, 0},
	} {
		got := 0.0
		if p := s.Of(c.member); p != nil {
			got = p.At(1, 1).RPS
		}
		if got != c.want {
			t.Errorf("%v: %v, want %v", c.member, got, c.want)
		}
	}
	if (*Set)(nil).Of(Key{Model: "m"}) != nil || (*Set)(nil).Len() != 0 || s.Len() != 5 {
		t.Errorf("%d profiles", s.Len())
	}
}

func TestWrongProfilesNameTheKey(t *testing.T) {
	const head = "profiles: [{model: m, indexes: [[1], [1, 2]]"
	for text, want := range map[string]string{
		"profiles: 3":                                    "test.yaml",
		head + ", tput: [[1]]}]":                         "tput",
		head + ", tputs: [[1], [2]]}]":                   "profiles[0].tputs",
		head + ", e2e: [[1, 2, 3]]}]":                    "profiles[0].e2e[0]",
		head + ", tpot: [[fast]]}]":                      "fast",
		head + ", tpot: [[[1]]]}]":                       "number",
		head + ", workload: llama}]":                     "profiles[0].workload",
		"profiles: [{indexes: [[1], [1]]}]":              "profiles[0].model",
		"profiles: [{model: m}]":                         "profiles[0].indexes",
		"profiles: [{model: m, indexes: [[], [1]]}]":     "indexes[0]",
		"profiles: [{model: m, indexes: [[1], [2, 2]]}]": "indexes[1][1]",
		"profiles: [{model: m, indexes: [[.nan], [2]]}]": "indexes[0][0]",
		"profiles: []\n---\nprofiles: []":                "more than one",
		"{":                                              "test.yaml",
	} {
		_, err := Parse("test.yaml", []byte(text))
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "test.yaml") {
			t.Errorf("%s: %v, want %q named", text, err, want)
		}
	}
	list, err := Parse("a", []byte("profiles: [{model: m, indexes: [[1], [1]]}, {model: m, indexes: [[1], [1]]}]"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewSet(list); !errors.Is(err, ErrInvalid) {
		t.Errorf("one key twice: %v", err)
	}
	if list, err := Parse("empty", nil); err != nil || list != nil {
		t.Errorf("empty file: %v, %v", list, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte(`{"profiles": [{"model": "m", "indexes": [[1], [1]], "tputs": [[NaN]]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		list, err := Parse("fuzz", text)
		if err != nil {
			return
		}
		for _, p := range list {
			c := p.At(100, 100)
			for _, v := range []float64{c.RPS, c.E2E, c.TTFT, c.TPOT} {
				if v <= 0 || math.IsInf(v, 0) {
					t.Fatalf("cell %+v", c)
				}
			}
		}
	})
}
