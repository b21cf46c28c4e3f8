package pick

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// Who made a mistake must see which one, without asking somebody else.
func TestErrorsSayWhatThereIs(t *testing.T) {
	b := newBed(t)
	var all []Ref
	for i, longest := range []int{100, 200, 200} {
		name := fmt.Sprintf("m%d", i)
		b.joinAs(fleet.Info{Name: name, Models: []string{"base", "alias"}, BlockSize: 16, MaxModelLen: longest, Adapters: []fleet.Adapter{{Name: "lora"}}})
		all = append(all, Ref{Member: name})
	}
	tokens := func(n int) Prompt { return Prompt{Tokens: make([]byte, 4*n)} }
	for name, c := range map[string]struct {
		r    Request
		is   error
		want []string
	}{
		"model":     {Request{Model: "nope"}, ErrModel, []string{`model "nope": unknown model; served are "alias", "base", "lora"`}},
		"excluded":  {Request{Model: "base", Exclude: all}, ErrExcluded, []string{"3 members, of which 3 excluded by the request, 0 not among its candidates, 0 asleep"}},
		"both":      {Request{Model: "base", Exclude: all[:1], Candidates: all[:1]}, ErrExcluded, []string{"1 excluded", "2 not among its candidates"}},
		"too long":  {Request{Model: "base", Prompt: tokens(201)}, ErrPrompt, []string{"201 tokens", `model "base" takes 200 at most`}},
		"all short": {Request{Model: "base", Prompt: tokens(150), Exclude: all[1:]}, ErrPrompt, []string{"150 tokens", "takes 100 at most"}},
	} {
		_, err := b.Pick(&c.r, t0)
		for _, w := range c.want {
			if !errors.Is(err, c.is) || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want %q", name, err, w)
			}
		}
	}
	// Who takes the prompt gets it.
	d, err := b.Pick(&Request{Model: "base", Prompt: tokens(150)}, t0)
	if err != nil || d.Number != 2 {
		t.Errorf("%v, %+v", err, d)
	}
}

// However many models there are, an error stays an error's length.
func TestErrorsListFewModels(t *testing.T) {
	b := newBed(t)
	info := fleet.Info{Name: "m", BlockSize: 16}
	for i := range 1000 {
		info.Models = append(info.Models, fmt.Sprintf("%03d-%s", i, strings.Repeat("x", 60)))
	}
	b.joinAs(info)
	_, err := b.Pick(&Request{Model: "nope"}, t0)
	if !errors.Is(err, ErrModel) || len(err.Error()) > 600 || !strings.Contains(err.Error(), "more") {
		t.Error(err)
	}
}
