package pick

import (
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

var update = flag.Bool("update", false, "write golden files")

// Peers' bug 17: one prediction a request: the answer, the reservation and the
// engine's priority stand on the same numbers.
func TestOnePredictionPerRequest(t *testing.T) {
	b := newBed(t)
	id := b.join("m")
	le := prompt(1, 0, 2000)
	b.gpu(id, le, 50)
	d := b.pick(Request{Prompt: tokens(le), Reserve: true})
	c := d.Candidates[0]
	r := b.fleet.View().Member(id).Reserved()
	if r.Tokens != uint64(c.Uncached) || r.PrefillMS != c.Cost.Load+c.Cost.Prefill {
		t.Errorf("reserved %+v, answered %+v", r, c)
	}
	if want := t0.UnixMilli() + int64(math.Round(10*(c.Cost.Load+c.Cost.Prefill))); d.EnginePriority != want {
		t.Errorf("priority %d, want %d", d.EnginePriority, want)
	}
	cached := uint64(c.Cached.Known())
	n := uint64(2000)
	if !b.Report(Report{Decision: d.ID, Outcome: fleet.FirstToken, PromptTokens: &n, CachedTokens: &cached}, t0) {
		t.Error("the decision is not known")
	}
	if got := b.fleet.View().Member(id).Reported(); got.PredictedTokens != cached || got.CachedTokens != cached || got.PromptTokens != n {
		t.Errorf("%+v", got)
	}
	for _, id := range []string{"", "zz", "ffffffffffffffffffff", "-1", "2"} {
		if b.Report(Report{Decision: id, Outcome: fleet.Finished}, t0) {
			t.Errorf("decision %q is known", id)
		}
	}
}

// The decisions themselves, to be read: go test -run Golden -update.
func TestGoldenDecisions(t *testing.T) {
	var out strings.Builder
	show := func(what string, d *Decision) {
		fmt.Fprintf(&out, "%s\n  %s\n", what, d.Reason)
		if d.Fallback() != "" {
			fmt.Fprintf(&out, "  fallback: %s\n", d.Fallback())
		}
		for _, c := range d.Candidates {
			fmt.Fprintf(&out, "  %-4s %-11s gpu %5d host %5d disk %5d under way %5d uncached %5d  total %8.2f = wait %7.2f load %6.2f prefill %7.2f miss %7.2f evict %6.2f decode %6.2f  running %d waiting %d\n",
				c.Member.Info.Name, c.Member.CacheState.Trust, c.Cached.GPU, c.Cached.Host, c.Cached.Disk, c.Cached.Predicted, c.Uncached,
				c.Cost.Total, c.Cost.Wait, c.Cost.Load, c.Cost.Prefill, c.Cost.Miss, c.Cost.Evict, c.Cost.Decode, c.Running, c.Waiting)
		}
	}
	b := newBed(t)
	le := prompt(1, 0, 8192)
	gpu, host, disk, sync := b.join("gpu"), b.join("host"), b.join("disk"), b.join("sync")
	b.join("cold")
	b.gpu(gpu, le, 256)
	b.gpu(host, le, 64)
	b.hold(host, index.LaneHost, le, 512)
	b.hold(host, index.LaneDisk, le, 512)
	b.hold(disk, index.LaneDisk, le, 500)
	b.gpu(sync, le, 512)
	b.trust(sync, fleet.Syncing)
	r := Request{Prompt: tokens(le)}
	show("tiers, idle", b.pick(r))
	r.Reserve = true
	show("picked once", b.pick(r))
	show("picked twice", b.pick(r))
	r.Reserve = false
	for i, m := range []fleet.ID{gpu, host, disk, sync, b.fleet.View().Named("cold").ID} {
		b.load(m, 3*i, i, t0.Add(time.Second))
	}
	r.Exclude = []Ref{{Member: "host"}}
	show("with samples of load, without host", b.pickAt(r, t0.Add(time.Second)))
	r.Prompt = Prompt{}
	show("without tokens", b.pickAt(r, t0.Add(time.Second)))
	r.Prompt, r.Policy = tokens(le), "least-requests"
	show("least requests", b.pickAt(r, t0.Add(time.Second)))

	const file = "testdata/decisions.golden"
	if *update {
		if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(out.String(), "\n")); diff != "" {
		t.Error(diff)
	}
}
