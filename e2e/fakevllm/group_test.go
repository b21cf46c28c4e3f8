package fakevllm

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestGroupsAreRead(t *testing.T) {
	got, err := ParseGroups("sliding:128,chunked:64,states,full")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]Group{{Sliding, 128}, {Chunked, 64}, {StateSpace, 0}, {Full, 0}}, got); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"sliding", "full:3", "mamba", "sliding:x"} {
		if _, err := ParseGroups(bad); err == nil {
			t.Errorf("%q is read", bad)
		}
	}
}

// Worked out by hand from vLLM's lookups, with blocks of 4.
func TestWhatAHitNeedsAndWhatIsKept(t *testing.T) {
	const size = 4
	for _, c := range []struct {
		group       Group
		end         int
		drops       bool
		first, last int
	}{
		{Group{Kind: Full}, 5, false, 0, 5},
		{Group{Kind: Full}, 5, true, 0, 6},
		{Group{Sliding, 8}, 5, false, 3, 5},
		{Group{Sliding, 9}, 5, false, 3, 5},
		{Group{Sliding, 10}, 5, false, 2, 5},
		{Group{Sliding, 8}, 1, false, 0, 1},
		{Group{Sliding, 8}, 5, true, 3, 6},
		{Group{Chunked, 8}, 5, false, 4, 5},
		{Group{Chunked, 8}, 4, false, 4, 4},
		{Group{Kind: StateSpace}, 5, false, 4, 5},
		{Group{Kind: StateSpace}, 5, true, 4, 5},
	} {
		if first, last := c.group.needs(c.end, size, c.drops); first != c.first || last != c.last {
			t.Errorf("%+v needs %d to %d", c, first, last)
		}
	}
	kept := func(g Group, drops bool, boundaries ...int) (list []int) {
		for i := range 10 {
			if g.keeps(i, size, boundaries, drops) {
				list = append(list, i)
			}
		}
		return list
	}
	for _, c := range []struct {
		what      string
		got, want []int
	}{
		{"a window's tail", kept(Group{Sliding, 8}, false, 6), []int{4, 5}},
		{"and a junction's", kept(Group{Sliding, 8}, false, 6, 3), []int{1, 2, 4, 5}},
		{"one more that is dropped", kept(Group{Sliding, 8}, true, 6), []int{4, 5, 6}},
		{"one state", kept(Group{Kind: StateSpace}, false, 6), []int{5}},
		{"a state where the others drop", kept(Group{Kind: StateSpace}, true, 6), []int{5}},
		{"all of a chunk", kept(Group{Chunked, 8}, false, 6), []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
	} {
		if d := cmp.Diff(c.want, c.got); d != "" {
			t.Errorf("%s: %s", c.what, d)
		}
	}
}

// A step ends where states must be kept: at whole blocks, and at the last of the prompt.
func TestStepsEndWhereStatesAreKept(t *testing.T) {
	c := Config{Groups: []Group{{Kind: StateSpace}, {Kind: Full}}, BlockSize: 4, MaxBatchedTokens: 10}
	s := &sequence{prompt: 22, tokens: make([]uint32, 22)}
	for _, step := range []struct{ from, to, want int }{
		{0, 10, 8}, {8, 18, 16}, {16, 22, 20}, {20, 22, 22}, {6, 16, 8}, {0, 3, 0}, {22, 23, 23},
	} {
		if got := c.stop(s, step.from, step.to); got != step.want {
			t.Errorf("from %d to %d: %d, want %d", step.from, step.to, got, step.want)
		}
	}
	if s.junction = 3; c.stop(s, 8, 18) != 12 {
		t.Error("the junction is run over")
	}
	c.Groups = []Group{{Kind: Full}}
	if got := c.stop(s, 0, 10); got != 10 {
		t.Errorf("without states a step goes to %d, want 10", got)
	}
}
