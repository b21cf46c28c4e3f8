package learn

import (
	"fmt"
	"testing"
	"time"
)

var noon = time.Unix(1_700_000_000, 0)

func TestOutputIsDrawnAsItWas(t *testing.T) {
	var o Outputs
	if got := o.Predict("m", "a", 1000, 0); got != 0 {
		t.Errorf("nothing seen: %d", got)
	}
	for i := range 100 {
		output := 60 // rounds to 64
		if i%4 == 0 {
			output = 250 // to 256
		}
		o.Observe("m", "a", 1000+i, output, noon)
		o.Observe("m", "a", 8, 500, noon) // another length of prompt
	}
	if got := o.Predict("m", "a", 1024, 0); got != 0 {
		t.Errorf("before it was published: %d", got)
	}
	o.Publish(noon)
	counts := make(map[int]int)
	for i := range 1000 {
		counts[o.Predict("m", "a", 1024, uint64(i))]++
	}
	if counts[64] != 750 || counts[256] != 250 {
		t.Errorf("%v, want 750 x 64 and 250 x 256", counts)
	}
	if got := o.Predict("m", "a", 10, 3); got != 512 {
		t.Errorf("short prompts: %d, want 512", got)
	}
	if got := o.Predict("m", "a", 100_000, 3); got != 0 {
		t.Errorf("a length never seen: %d", got)
	}
}

func TestTenantsAndModelsHaveTheirOwnLengths(t *testing.T) {
	var o Outputs
	for range 10 {
		o.Observe("m", "long", 100, 2048, noon)
		o.Observe("m", "short", 100, 16, noon)
		o.Observe("other", "", 100, 4, noon)
	}
	o.Publish(noon)
	for _, c := range []struct {
		model, tenant string
		want          []int
	}{
		{"m", "long", []int{2048}}, {"m", "short", []int{16}}, {"other", "long", []int{4}},
		{"m", "new", []int{16, 2048}}, {"m", "", []int{16, 2048}}, {"none", "long", []int{0}},
	} {
		seen := make(map[int]bool)
		for i := range 100 {
			seen[o.Predict(c.model, c.tenant, 100, uint64(i))] = true
		}
		for _, w := range c.want {
			if !seen[w] || len(seen) != len(c.want) {
				t.Errorf("%s of %s: %v, want %v", c.tenant, c.model, seen, c.want)
			}
		}
	}
}

func TestLengthsLeaveAfterFourMinutes(t *testing.T) {
	var o Outputs
	see := func(output int, at time.Duration) {
		for range 10 {
			o.Observe("m", "", 100, output, noon.Add(at))
		}
	}
	predict := func(at time.Duration) map[int]bool {
		seen := make(map[int]bool)
		o.Publish(noon.Add(at))
		for i := range 100 {
			seen[o.Predict("m", "", 100, uint64(i))] = true
		}
		return seen
	}
	see(16, 0)
	see(64, 200*time.Second)
	if got := predict(220 * time.Second); !got[16] || !got[64] {
		t.Errorf("after 220 s: %v", got)
	}
	if got := predict(250 * time.Second); got[16] || !got[64] {
		t.Errorf("after 250 s: %v", got)
	}
	see(4, 260*time.Second)
	if got := predict(260 * time.Second); got[16] || !got[64] || !got[4] {
		t.Errorf("after 260 s: %v", got)
	}
	if got := predict(time.Hour); !got[0] || len(got) != 1 {
		t.Errorf("after an hour: %v", got)
	}
	see(32, time.Hour)
	if got := predict(time.Hour); !got[32] || len(got) != 1 {
		t.Errorf("after an hour's silence: %v", got)
	}
	if o.Publish(noon.Add(2 * time.Hour)); len(o.groups) != 0 || len(*o.published.Load()) != 0 {
		t.Errorf("%d groups are remembered of which nothing is known", len(o.groups))
	}
}

func TestOutputsAreBounded(t *testing.T) {
	var o Outputs
	for i := range 3 * maxGroups {
		o.Observe("m", fmt.Sprint(i), 100, 100, noon.Add(time.Duration(i)*time.Second))
	}
	if len(o.groups) > maxGroups {
		t.Errorf("%d groups", len(o.groups))
	}
	for _, bad := range []int{-1, 0, 1 << 30} {
		o.Observe("bad", "", 100, bad, noon)
	}
	o.Observe("bad", "", -1, 100, noon)
	if _, ok := o.groups[group{"bad", ""}]; ok {
		t.Error("lengths that cannot be were learned")
	}
}

// Predictions are made beside what teaches them: each sees one state or
// another, and takes no lock and no memory.
func TestPredictionsRunBesideObservations(t *testing.T) {
	var o Outputs
	stop := make(chan struct{})
	done := make(chan int)
	for range 2 {
		go func() {
			seen := 0
			for {
				select {
				case <-stop:
					done <- seen
					return
				default:
				}
				if n := o.Predict("m", "a", 100, 7); n != 0 && n != 64 {
					t.Errorf("%d, want 0 or 64", n)
				} else if n == 64 {
					seen++
				}
			}
		}()
	}
	for i := range 2000 {
		o.Observe("m", "a", 100, 64, noon.Add(time.Duration(i)*time.Second))
		o.Publish(noon.Add(time.Duration(i) * time.Second))
	}
	close(stop)
	<-done
	<-done
	if n := testing.AllocsPerRun(100, func() { o.Predict("m", "a", 100, 7) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
