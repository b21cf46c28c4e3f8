package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// ticking is an engine's HTTP side that sends an event every 5 ms, each with the
// time at which it leaves.
func ticking(t *testing.T, events int) string {
	t.Helper()
	return standIn(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for range events {
			fmt.Fprintf(w, "data: {\"choices\":[{\"text\":\"%d\"}]}\n\n", time.Now().UnixNano())
			if http.NewResponseController(w).Flush() != nil {
				return
			}
			<-tick.C
		}
	})
}

// percentiles of times, the half and 99 of 100.
func percentiles(list []time.Duration) string {
	slices.Sort(list)
	at := func(p float64) float64 { return float64(list[int(p*float64(len(list)-1))]) / float64(time.Millisecond) }
	return fmt.Sprintf("%.2f, %.2f", at(0.5), at(0.99))
}

// processorTime is what this process and a program with its children have used so
// far, each by itself; pid 0: there is no program.
func processorTime(t *testing.T, pid int) (own, program time.Duration) {
	t.Helper()
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		t.Fatal(err)
	}
	own = time.Duration(used.Utime.Nano() + used.Stime.Nano())
	if pid == 0 {
		return own, 0
	}
	for _, p := range family(pid) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p))
		if err != nil {
			continue // it has ended
		}
		// What follows the name, which may hold anything, in brackets.
		fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		for _, ticks := range fields[11:13] {
			n, err := strconv.ParseInt(ticks, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			program += time.Duration(n) * 10 * time.Millisecond
		}
	}
	return own, program
}

// family of a process: itself and its children, and theirs.
func family(pid int) []int {
	list := []int{pid}
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	for _, one := range strings.Fields(string(text)) {
		if child, err := strconv.Atoi(one); err == nil {
			list = append(list, family(child)...)
		}
	}
	return list
}

// tableHead begins the table, once for all proxies.
var tableHead = sync.OnceFunc(func() {
	fmt.Println("| | to the first event: alone | with kvscout | each event: alone | with kvscout | processor: alone | with kvscout | scheduler |")
	fmt.Println("|---|---|---|---|---|---|---|---|")
})

// measured is one way of a request: through the proxy alone, or with kvscout.
type measured struct {
	served
	first, each []time.Duration
	own, pure   time.Duration // processor time of this process, and of the proxy
}

// measureProxy says what kvscout adds to a request until its first event, to each
// event, and in processor time: with it and without it in turn, through the same
// program. It writes the table of docs/PROXIES.md, with a row for each size of body.
// Scheduler, client and engines are this process: what they use with kvscout less
// what they use without it is the scheduler's.
func measureProxy(t *testing.T, r reverseProxy) {
	if os.Getenv("KVSCOUT_MEASURE") == "" {
		t.Skip("skipped: make bench-proxies measures")
	}
	if r.need != nil {
		r.need(t)
	}
	const events, turns, batch = 20, 10, 10
	s := r.site(t)
	for i := range 2 {
		address := ticking(t, events)
		s.announce(fmt.Sprint("ticking-", i), address)
		s.engines = append(s.engines, address)
	}
	alone := *s
	alone.plain = true
	ways := []*measured{{served: r.start(t, &alone)}, {served: r.start(t, s)}}
	client := &http.Client{Transport: &http.Transport{}, Timeout: patience}
	t.Cleanup(client.CloseIdleConnections)
	for _, w := range ways {
		s.until("it serves", func() bool {
			answer, err := client.Get(w.url + "/v1/models")
			if err == nil {
				answer.Body.Close()
			}
			return err == nil && answer.StatusCode < 500
		})
	}
	tableHead()
	for _, kilobytes := range []int{1, 32, 256} {
		body := random(uint64(kilobytes), kilobytes*1024/8).completion(`,"stream":true`)
		for turn := range 2 * turns {
			w := ways[turn%2]
			own, pure := processorTime(t, w.pid)
			for range batch {
				w.request(t, client, body, events)
			}
			ownAfter, pureAfter := processorTime(t, w.pid)
			w.own, w.pure = w.own+ownAfter-own, w.pure+pureAfter-pure
		}
		perThousand := func(d time.Duration) float64 { return d.Seconds() * 1000 / (turns * batch) }
		a, k := ways[0], ways[1]
		fmt.Printf("| %s, %d KB | %s | %s | %s | %s | %.1f | %.1f | %.1f |\n", r.name, kilobytes, percentiles(a.first), percentiles(k.first),
			percentiles(a.each), percentiles(k.each), perThousand(a.pure), perThousand(k.pure), perThousand(k.own-a.own))
		for _, w := range ways {
			*w = measured{served: w.served}
		}
	}
	for _, w := range ways {
		if w.check != nil {
			w.check()
		}
	}
}

// request goes one way and notes when its events come.
func (m *measured) request(t *testing.T, client *http.Client, body []byte, events int) {
	t.Helper()
	start := time.Now()
	answer, err := client.Post(m.url+"/v1/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	n := 0
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		_, text, ok := strings.Cut(lines.Text(), `"text":"`)
		if !ok {
			continue
		}
		now := time.Now()
		text, _, _ = strings.Cut(text, `"`)
		left, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 1 {
			m.first = append(m.first, now.Sub(start))
		}
		m.each = append(m.each, now.Sub(time.Unix(0, left)))
	}
	if n != events {
		t.Fatalf("%d %d events, want %d", answer.StatusCode, n, events)
	}
}
