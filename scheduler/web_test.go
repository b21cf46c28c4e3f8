package scheduler

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// BenchmarkPickHTTP is BenchmarkPickRPC as HTTP/JSON: HTTP/1.1, connections kept
// alive, one caller and eight at a time.
func BenchmarkPickHTTP(b *testing.B) {
	s, _ := start(b, Config{})
	fill(b, s)
	for _, callers := range []struct {
		name string
		n    int
	}{{"one", 1}, {"eight", 8}} {
		b.Run(callers.name, func(b *testing.B) {
			requests(b, func(b *testing.B, r *api.Request) { callHTTP(b, s.Addrs().HTTP, r, callers.n) })
		})
	}
}

func callHTTP(b *testing.B, address string, r *api.Request, callers int) {
	body, err := protojson.Marshal(&api.PickRequest{Request: r})
	if err != nil {
		b.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: callers}}
	defer client.CloseIdleConnections()
	call := func() bool {
		answer, err := client.Post("http://"+address+"/v1/pick", "application/json", bytes.NewReader(body))
		if err != nil {
			b.Error(err)
			return false
		}
		defer answer.Body.Close()
		if text, err := io.ReadAll(answer.Body); err != nil || answer.StatusCode != http.StatusOK {
			b.Errorf("%d %v %.200s", answer.StatusCode, err, text)
			return false
		}
		return true
	}
	if !call() { // what is first is not measured
		return
	}
	took := make([][]time.Duration, callers)
	var group sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	used := cpuTime()
	for caller := range took {
		group.Go(func() {
			for range b.N/callers + 1 {
				start := time.Now()
				if !call() {
					return
				}
				took[caller] = append(took[caller], time.Since(start))
			}
		})
	}
	group.Wait()
	b.StopTimer()
	all := slices.Concat(took...)
	slices.Sort(all)
	b.ReportMetric(float64(len(all))/b.Elapsed().Seconds(), "calls/s")
	b.ReportMetric(float64(cpuTime()-used)/float64(len(all)), "cpu-ns/op")
	b.ReportMetric(float64(all[len(all)/2].Microseconds()), "p50-us")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds()), "p99-us")
}
