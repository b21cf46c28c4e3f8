package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// TestMain lets the test's own program play the parts.
func TestMain(m *testing.M) {
	if name := os.Getenv(partVariable); name != "" {
		if err := runPart(name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// TestASmallFleetIsTrue plays all phases with 20 members: every answer is compared
// with what they hold, and each phase must have had something to compare.
func TestASmallFleetIsTrue(t *testing.T) {
	o := options{
		Members: 20, Blocks: 8000, Shared: .4, Holders: 8, Rate: 20, Picks: 50, Processes: 2, Schedulers: 2, For: 500 * time.Millisecond,
		Faults: true, outage: 1500 * time.Millisecond, index: "64MiB",
	}
	if err := o.validate(); err != nil {
		t.Fatal(err)
	}
	r, err := run(t.Context(), o, t.Output())
	if err != nil {
		t.Fatal(err, r.Said)
	}
	if r.Wrong > 0 || r.Checked < verified*o.Members || r.Both.Refused > 0 || r.Events.Batches == 0 || len(r.Faults) != 3 {
		t.Errorf("%+v", r)
	}
	var text strings.Builder
	r.print(&text)
	if err := r.printJSON(io.Discard); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"start until all are exact", "batches published, beside picks", "outage of 6", "0 of "} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, &text)
		}
	}
}

// TestAWrongAnswerIsSeen makes answers one block too deep and too shallow.
func TestAWrongAnswerIsSeen(t *testing.T) {
	f, err := newContent(20, 8000, 8, .4)
	if err != nil {
		t.Fatal(err)
	}
	c := &callers{content: f, number: map[string]int{memberID(3): 3}}
	n := f.first(3)
	for _, request := range []int{int(n)/every - 40, int(n) / every / 2} {
		held := f.held(3, 3, request, n)
		candidate := func(blocks int, trust api.Trust) []*api.Candidate {
			return []*api.Candidate{{
				Member: &api.Member{Id: memberID(3)}, CachedTokens: &api.CachedTokens{Gpu: uint32(blocks * blockSize)},
				CacheState: &api.CacheState{Trust: trust, EngineBatches: n},
			}}
		}
		exact, syncing := api.Trust_TRUST_EXACT, api.Trust_TRUST_SYNCING
		for _, test := range []struct {
			blocks int
			trust  api.Trust
			wrong  bool
		}{
			{held, exact, false}, {held + 1, exact, true}, {held - 1, exact, true},
			{held, syncing, false}, {held - 1, syncing, false}, {0, syncing, false}, {held + 1, syncing, true},
		} {
			if wrong := c.check(3, request, candidate(test.blocks, test.trust), 0, false); len(wrong) > 0 != test.wrong {
				t.Errorf("request %d, %d held, %d said, %v: %q", request, held, test.blocks, test.trust, wrong)
			}
		}
	}
	lost := []*api.Candidate{{Member: &api.Member{Id: memberID(3)}, CacheState: &api.CacheState{Trust: api.Trust_TRUST_EXACT, EngineBatches: n}}}
	if request := int(n)/every/2 + 10; len(c.check(3, request, lost, 0, false)) == 0 || len(c.check(3, request, lost, 0, true)) > 0 {
		t.Error("too little is wrong unless members are disturbed")
	}
	stranger := []*api.Candidate{{Member: &api.Member{Id: "default_stranger_0"}}}
	if len(c.check(3, 0, stranger, 0, false)) == 0 {
		t.Error("a stranger passes")
	}
}

func TestFlagsAreChecked(t *testing.T) {
	good := options{Members: 20, Blocks: 8000, Shared: .4, Holders: 8, Rate: 20, Picks: 100, Processes: 1, Schedulers: 1, For: time.Second, outage: time.Second}
	for name, spoil := range map[string]func(*options){
		"-members": func(o *options) { o.Members = 0 },
		"-holders": func(o *options) { o.Holders = 21 },
		"-shared":  func(o *options) { o.Shared = 1 },
		"room":     func(o *options) { o.Blocks = 3000 },
		"chain":    func(o *options) { o.Shared = .01 },
		"-for":     func(o *options) { o.For = 0 },
	} {
		o := good
		spoil(&o)
		if err := o.validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := good.validate(); err != nil {
		t.Error(err)
	}
}
