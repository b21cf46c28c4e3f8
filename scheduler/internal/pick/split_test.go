package pick

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// roled joins a member with a role.
func (b *bed) roled(name, role string) fleet.ID {
	return b.joinAs(fleet.Info{
		Name: name, Pod: name, Models: []string{"model"}, BlockSize: 16, Labels: map[string]string{fleet.RoleLabel: role},
	})
}

func pairOf(d *Decision) [2]string {
	p := [2]string{first(d), ""}
	if d.Decode != nil {
		p[1] = d.Decode.Member.Info.Name
	}
	return p
}

func TestLongMissesArePrefilledElsewhere(t *testing.T) {
	b := newBed(t)
	pre, dec := b.roled("pre", "prefill"), b.roled("dec", "decode")
	if err := b.Use(Policies{Disaggregate: 512}); err != nil {
		t.Fatal(err)
	}
	long, short, held := prompt(1, 0, 2000), prompt(2, 0, 500), prompt(3, 0, 2000)
	b.gpu(dec, held, 110)
	for name, c := range map[string]struct {
		tokens []byte
		want   [2]string
	}{
		"a long miss": {long, [2]string{"pre", "dec"}},
		"a short one": {short, [2]string{"dec", ""}},
		"a hit":       {held, [2]string{"dec", ""}},
	} {
		d := b.pick(Request{Prompt: tokens(c.tokens), Reserve: true})
		if got := pairOf(d); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
		view := b.fleet.View()
		open := [2]int{view.Member(pre).Reserved().Open, view.Member(dec).Reserved().Open}
		want := [2]int{0, 1}
		if c.want[1] != "" {
			want = [2]int{1, 1}
		}
		if open != want {
			t.Errorf("%s: %v are reserved, want %v", name, open, want)
		}
		b.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, t0)
		view = b.fleet.View()
		if n := view.Member(pre).Reserved().Open + view.Member(dec).Reserved().Open; n != 0 {
			t.Errorf("%s: %d stay reserved", name, n)
		}
	}
	if err := b.Use(Policies{}); err != nil {
		t.Fatal(err)
	}
	if got := pairOf(b.pick(Request{Prompt: tokens(long)})); got != [2]string{"dec", ""} {
		t.Errorf("without a limit: %v", got)
	}
}

func TestRolesAreNoReasonToRefuse(t *testing.T) {
	for _, roles := range [][]string{{"prefill"}, {"decode"}, {"both"}, {"prefill", "both"}} {
		b := newBed(t)
		for i, role := range roles {
			b.roled(string(rune('a'+i)), role)
		}
		if err := b.Use(Policies{Disaggregate: 1}); err != nil {
			t.Fatal(err)
		}
		d := b.pick(Request{Prompt: tokens(prompt(1, 0, 2000)), Reserve: true})
		if d.Decode != nil && d.Decode.Member == d.Candidates[0].Member {
			t.Errorf("%v: a member is paired with itself", roles)
		}
	}
}

func TestPeerIsNamedWherePullingIsQuicker(t *testing.T) {
	b := newBed(t)
	holder := b.join("holder")
	b.join("empty")
	le := prompt(1, 0, 2000)
	b.gpu(holder, le, 100)
	for perToken, want := range map[float64]string{0: "", 0.01: "holder", 0.049: "holder", 10: ""} {
		if err := b.Use(Policies{PullMS: perToken}); err != nil {
			t.Fatal(err)
		}
		d := b.pick(Request{Prompt: tokens(le)})
		got := make(map[string]Pull)
		for _, c := range d.Candidates {
			got[c.Member.Info.Name] = c.Pull
		}
		if got["holder"].Member != nil {
			t.Errorf("%v: the holder is to pull from %+v", perToken, got["holder"])
		}
		pull, name := got["empty"], ""
		if pull.Member != nil {
			name = pull.Member.Info.Name
		}
		if name != want {
			t.Errorf("%v ms a token: from %q, want %q", perToken, name, want)
		}
		if name != "" && !cmp.Equal([3]float64{float64(pull.Tokens), pull.TransferMS}, [3]float64{1600, 1600 * perToken}) {
			t.Errorf("%+v", pull)
		}
	}
}
