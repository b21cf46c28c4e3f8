package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// result of a run with these means.
func result(name string, seed uint64, ttft, hit float64) sim.Result {
	return sim.Result{Policy: name, Seed: seed, Requests: 100, TTFTMean: ttft, TTFTP50: ttft / 2, TTFTP90: 2 * ttft, TTFTP99: 4 * ttft,
		TokenHit: hit, TokenHitCeiling: .5, LoadCV: .1, Settings: sim.Settings{Capacity: 4}}
}

func TestRowsAreMeansInTheOrderOfTheField(t *testing.T) {
	rows := Rows([]sim.Result{result(sim.Oracle, 1, 1, .5), result(policy.Default, 1, 2, .3), result("random", 1, 9, .1), result(policy.Default, 2, 4, .4), result(policy.Default, 3, 6, .2)})
	var names []string
	for _, r := range rows {
		names = append(names, r.Policy)
	}
	if d := cmp.Diff([]string{"random", policy.Default, sim.Oracle}, names); d != "" {
		t.Error(d)
	}
	if d := rows[1]; d.Seeds != 3 || d.TTFTMean != 4 || d.Low != 2 || d.High != 6 || d.TokenHit < .299 || d.TokenHit > .301 {
		t.Errorf("mean of 2, 4 and 6: %+v", d)
	}
}

// A policy that is not listed stands beside the default, under its own name.
func TestEveryPolicyHasAPlaceInTheField(t *testing.T) {
	if place("mine:a=1") != place(policy.Default) || Label("mine:a=1") != "mine a=1" || Label(policy.Default) != "default" {
		t.Errorf("place %d, label %q", place("mine:a=1"), Label("mine:a=1"))
	}
	for _, f := range field {
		if _, err := policy.Named(f.name); err != nil && !sim.Bound(f.name) {
			t.Error(err)
		}
	}
	if got := Label("weighted:prefix=1"); got != "weighted (llm-d 3/2/2) prefix=1" {
		t.Errorf("label %q", got)
	}
}

func TestVerdictsFollowFromTheRows(t *testing.T) {
	for name, c := range map[string]struct {
		sticky, ours, limit float64
		outcome             outcome
		bound               bool
	}{
		"wins":    {1.0, .9, .5, wins, false},
		"noise":   {1.0, .99, .5, even, false},
		"loses":   {1.0, 1.2, .5, loses, false},
		"no room": {1.9, 1.9, 1.85, even, true},
	} {
		v, ok := Judge(Rows([]sim.Result{result(sim.LeastTokens, 1, 2, .1), result("sticky", 1, c.sticky, .4), result(policy.Default, 1, c.ours, .3), result(sim.CapacityOracle, 1, c.limit, .5)}))
		if !ok || v.Outcome != c.outcome || v.Bound != c.bound || v.Best.Policy != "sticky" || (v.Why != "") != (c.outcome == loses) {
			t.Errorf("%s: %+v", name, v)
		}
	}
	// Seeds that disagree leave nothing to say.
	v, _ := Judge(Rows([]sim.Result{result("sticky", 1, 1, .4), result("sticky", 2, 2, .4), result(policy.Default, 1, 1.2, .4), result(policy.Default, 2, 2, .4)}))
	if v.Outcome != even {
		t.Errorf("means of 1.5 and 1.6 whose seeds differ by 1: %v", v.Outcome)
	}
	if _, ok := Judge(Rows([]sim.Result{result("sticky", 1, 1, .4)})); ok {
		t.Error("a verdict without the default")
	}
}

func TestLossesAreExplainedByWhatIsMeasured(t *testing.T) {
	d := Row{Result: result(policy.Default, 1, 1.2, .3)}
	for want, hit := range map[string]float64{"finds more": .4, "is waiting": .2, "equal hits": .3} {
		if got := why(d, Row{Result: result("sticky", 1, 1, hit)}); !strings.Contains(got, want) {
			t.Errorf("hit %v: %s; want %q", hit, got, want)
		}
	}
}

func TestBrokenPromisesAreNamed(t *testing.T) {
	rows := func(ours, hit float64) []Row {
		return Rows([]sim.Result{result(sim.LeastTokens, 1, 1, .1), result(policy.Default, 1, ours, hit)})
	}
	if got := Broken("x", rows(.8, .4)); len(got) != 0 {
		t.Errorf("kept: %q", got)
	}
	for want, r := range map[string][]Row{
		"needs 1.030 s on average to the first token, least tokens 1.000 s": rows(1.03, .4),
		"not 5 % below":  rows(.97, .4),
		"less than half": rows(.8, .2),
		"did not run":    rows(.8, .2)[:1],
	} {
		if got := Broken("x", r); !strings.Contains(strings.Join(got, "\n"), want) {
			t.Errorf("%q; want %q", got, want)
		}
	}
	refused := rows(.8, .4)
	refused[1].Rejects = 1
	if got := Broken("x", refused); len(got) != 1 || !strings.Contains(got[0], "refused 1") {
		t.Errorf("a refused request: %q", got)
	}
}

func TestRunsAreReadAsTheyWereWritten(t *testing.T) {
	r := result(policy.Default, 2, 1, .3)
	r.Stages = []sim.Stage{{QPS: 3, Requests: 5}}
	list := []Run{{Cell: "a", Command: "b", Code: "c", Result: result("random", 1, 9, .1)}, {Cell: "a", Command: "b", Code: "c", Result: r}}
	var b bytes.Buffer
	if err := WriteRuns(&b, []Run{list[1], list[0]}); err != nil {
		t.Fatal(err)
	}
	got, err := ReadRuns(&b)
	if d := cmp.Diff(list, got); d != "" || err != nil {
		t.Error(err, d)
	}
	if _, err := ReadRuns(strings.NewReader("{}\nx")); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("a torn line: %v", err)
	}
}

// Files and links are named by cells, so their names are unique; a cell's
// command tells all of its settings.
func TestThePlanNamesEveryCellOnce(t *testing.T) {
	names, commands := make(map[string]bool), make(map[string]string)
	for _, s := range Plan() {
		for _, c := range s.Cells {
			if names[c.Name] || (c.Trace == "") == (c.Arrivals == "") {
				t.Errorf("cell %+v", c)
			}
			names[c.Name] = true
			if other, ok := commands[c.Command()]; ok {
				t.Errorf("%s and %s have one command: %s", c.Name, other, c.Command())
			}
			commands[c.Command()] = c.Name
		}
	}
	for _, target := range Targets() {
		if !names[target.Cell] {
			t.Errorf("target of an unknown cell %s", target.Cell)
		}
	}
}

// wholePage has results for every cell.
func wholePage() Page {
	p := Page{Sections: Plan(), Runs: make(map[string][]Run)}
	for _, s := range p.Sections {
		for _, c := range s.Cells {
			for i, name := range c.Policies {
				r := result(name, 1, 2-float64(i)/20, float64(i)/40)
				if strings.HasPrefix(c.Arrivals, "r") {
					r.Stages = []sim.Stage{{QPS: 15, Requests: 9, TTFTP90: .1, Throughput: 50}, {QPS: 3, Requests: 9, TTFTP90: .2, Throughput: 100},
						{QPS: 15, Requests: 9, TTFTP90: .4, Throughput: 400}, {QPS: 60, Requests: 9, TTFTP90: 7, Throughput: 900}}
				}
				p.Runs[c.Name] = append(p.Runs[c.Name], Run{Cell: c.Name, Command: c.Command(), Code: "abc", Result: r})
			}
		}
	}
	return p
}

func TestThePageLinksOnlyWhatThereIs(t *testing.T) {
	p := wholePage()
	var b bytes.Buffer
	if err := p.Write(&b); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	pictures := 0
	err := p.Pictures(func(name string, svg []byte) error {
		pictures++
		if !strings.Contains(text, "(routing/"+name+".svg)") {
			t.Errorf("picture %s stands nowhere", name)
		}
		return wellFormed(svg)
	})
	if err != nil || pictures != strings.Count(text, ".svg)") {
		t.Errorf("%d pictures of %d: %v", pictures, strings.Count(text, ".svg)"), err)
	}
	for _, s := range p.Sections {
		for _, c := range s.Cells {
			if !strings.Contains(text, "### "+c.Name+"\n") || !strings.Contains(text, "](#"+c.Name+")") {
				t.Errorf("%s is not on the page", c.Name)
			}
		}
	}
	for _, bad := range []string{"NaN", "%!", "Did not run", "did not run"} {
		if strings.Contains(text, bad) {
			t.Errorf("the page says %q", bad)
		}
	}
	if !strings.Contains(text, " 15 | 900 |") {
		t.Error("the load's knee is not 15 a second or its peak not 900 tokens/s")
	}
}

func TestAPageOfNothingSaysSo(t *testing.T) {
	p := Page{Sections: Plan()}
	var b bytes.Buffer
	if err := p.Write(&b); err != nil || !strings.Contains(b.String(), "Did not run.") {
		t.Errorf("%v\n%.300s", err, b.String())
	}
	if err := p.Pictures(func(name string, _ []byte) error { return fmt.Errorf("picture %s of nothing", name) }); err != nil {
		t.Error(err)
	}
}

func TestPicturesTakeAnyResult(t *testing.T) {
	if err := Picture(io.Discard, "none", nil); err == nil {
		t.Error("a picture of nothing")
	}
	for name, results := range map[string][]sim.Result{
		"zeros": {{Policy: "random"}},
		"one":   {result(policy.Default, 1, 1, .2)},
		"long":  {result("default:a=1", 1, 4e4, 1), result("no such policy", 1, 1e-9, 0)},
	} {
		var b bytes.Buffer
		if err := errors.Join(Picture(&b, name+` <&">`, results), wellFormed(b.Bytes())); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") {
			t.Errorf("%s: a coordinate is no number", name)
		}
	}
}

func wellFormed(svg []byte) error {
	d := xml.NewDecoder(bytes.NewReader(svg))
	for n := 0; ; n++ {
		if _, err := d.Token(); errors.Is(err, io.EOF) && n > 10 {
			return nil
		} else if err != nil {
			return fmt.Errorf("after %d tokens: %w", n, err)
		}
	}
}
