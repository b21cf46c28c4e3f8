package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Limits are wide here, so that a busy machine is no failure: what is wrong
// stays wrong.
func TestFiftyFaults(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes half a minute")
	}
	var out strings.Builder
	good, err := run(t.Context(), options{faults: 50, seed: 11, engines: 4, heartbeat: time.Second / 4, slack: 20, children: true}, &out)
	t.Log("\n" + out.String())
	if err != nil || !good {
		t.Errorf("good %v: %v", good, err)
	}
}

// The same seed must mean the same faults, whatever the machine does.
func TestSeedsRepeat(t *testing.T) {
	list := func() string {
		f := &fleet{o: options{seed: 5, engines: 6, children: true}, members: make([]*member, 6)}
		for i := range f.members {
			f.members[i] = &member{f: f, name: string(rune('a' + i)), relays: i%2 == 1, child: i%3 == 2}
		}
		r := f.sequence()
		var b strings.Builder
		for range 200 {
			b.WriteString(f.draw(r, f.possible()).String() + "\n")
		}
		return b.String()
	}
	first := list()
	if first != list() {
		t.Error("two runs of one seed differ")
	}
	for i := range faults {
		if !strings.Contains(first, faults[i].name) {
			t.Errorf("200 faults without %q", faults[i].name)
		}
	}
}

func TestWrongOptionsAreRefused(t *testing.T) {
	for _, o := range []options{
		{}, {faults: 1, engines: 1, heartbeat: time.Second, slack: 1}, {faults: 1, engines: 2, slack: 1}, {faults: 1, engines: 2, heartbeat: time.Second},
	} {
		if _, err := run(context.Background(), o, &strings.Builder{}); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}
