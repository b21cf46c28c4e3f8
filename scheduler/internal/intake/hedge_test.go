package intake

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// played are engines of the names e0, e1 ... that answer after a time each; a
// negative one hangs for good.
func played(times ...time.Duration) (*Intake, *[]atomic.Int64) {
	var addresses []string
	asked := make([]atomic.Int64, len(times))
	for n := range times {
		addresses = append(addresses, fmt.Sprintf("e%d:80", n))
	}
	i := New(Config{CacheBytes: -1, Engines: func(string) ([]string, error) { return addresses, nil }})
	i.client.Transport = roundTrip(func(r *http.Request) (*http.Response, error) {
		var n int
		fmt.Sscanf(r.URL.Host, "e%d:80", &n)
		asked[n].Add(1)
		var answered <-chan time.Time
		if times[n] >= 0 {
			answered = time.After(times[n])
		}
		select {
		case <-answered:
			return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(generate))}, nil
		case <-r.Context().Done():
			return nil, context.Cause(r.Context())
		}
	})
	return i, &asked
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// prompted returns how long a prompt took.
func prompted(t *testing.T, i *Intake) time.Duration {
	t.Helper()
	start := time.Now()
	if p, err := i.Body(context.Background(), Request{}, textBody("x")); err != nil || p.Length != 3 {
		t.Fatalf("%v, %q", err, p.Fallback)
	}
	return time.Since(start)
}

// A process that hangs takes connections and never answers.
func TestFrozenEnginesCostHalfASecondAtMost(t *testing.T) {
	const frozen = -1
	synctest.Test(t, func(t *testing.T) {
		i, asked := played(frozen, frozen, frozen, 20*time.Millisecond)
		worst := time.Duration(0)
		for range 8 {
			worst = max(worst, prompted(t, i))
		}
		if worst > 500*time.Millisecond {
			t.Errorf("a prompt took %v", worst)
		}
		for n := range 3 {
			if times := (*asked)[n].Load(); times > 1 {
				t.Errorf("engine %d hangs and was asked %d times at once", n, times)
			}
		}
		// Again and again, it is found out less and less often.
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			prompted(t, i)
		}
		if times := (*asked)[0].Load(); times < 2 || times > 8 {
			t.Errorf("an engine that hangs was asked %d times in a minute", times)
		}
	})
}

// The first prompt that nobody answers is given up after half a second, long before
// the longest time that it may take, whether or not anybody has ever answered.
func TestAllFrozenEnginesCostHalfASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct{ engines, before int }{{1, 20}, {3, 20}, {8, 20}, {1, 0}, {3, 0}, {8, 0}} {
			times := slices.Repeat([]time.Duration{5 * time.Millisecond}, c.engines)
			i, _ := played(times...)
			for range c.before {
				prompted(t, i)
			}
			for n := range times {
				times[n] = -1
			}
			for n, most := range []time.Duration{501 * time.Millisecond, 700 * time.Millisecond, 700 * time.Millisecond} {
				start := time.Now()
				p, err := i.Body(context.Background(), Request{}, textBody("x"))
				if took := time.Since(start); err != nil || !strings.Contains(p.Fallback, "in time") || took > most {
					t.Errorf("%+v, prompt %d: %v, %q after %v", c, n, err, p.Fallback, took)
				}
			}
		}
	})
}

// Engines that all are slower than was ever seen are not taken for frozen for long.
func TestAllEnginesMayBeSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, before := range []int{0, 20} {
			times := slices.Repeat([]time.Duration{5 * time.Millisecond}, 3)
			i, _ := played(times...)
			for range before {
				prompted(t, i)
			}
			for n := range times {
				times[n] = 900 * time.Millisecond
			}
			untilAnswered(t, i)
			for range 20 {
				prompted(t, i)
			}
		}
	})
}

// untilAnswered asks until engines are given the time that they need.
func untilAnswered(t *testing.T, i *Intake) {
	t.Helper()
	start := time.Now()
	for {
		if p, err := i.Body(context.Background(), Request{}, textBody("x")); err == nil && p.Length == 3 {
			t.Logf("answered after %v", time.Since(start))
			return
		}
		if time.Since(start) > 30*time.Second {
			t.Fatal("nobody has been given the time to answer")
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// Slow is not frozen: where every engine needs long, as for long prompts, each
// prompt is sent to one of them.
func TestSlowEnginesAreNotAskedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slow, prompts = 700 * time.Millisecond, 20
		i, asked := played(slow, slow, slow, slow)
		untilAnswered(t, i)
		for n := range *asked {
			(*asked)[n].Store(0)
		}
		for range prompts {
			if took := prompted(t, i); took > slow {
				t.Errorf("a prompt took %v", took)
			}
		}
		sum := int64(0)
		for n := range *asked {
			sum += (*asked)[n].Load()
		}
		if sum > prompts+attempts-1 {
			t.Errorf("%d requests for %d prompts", sum, prompts)
		}
		for n := range 4 {
			if en := i.engines.known[fmt.Sprintf("e%d:80", n)]; en != nil && en.times > 0 {
				t.Errorf("engine %d is believed to hang", n)
			}
		}
	})
}
