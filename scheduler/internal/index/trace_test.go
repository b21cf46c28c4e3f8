package index

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// W7 plays the conversation trace against members whose caches are LRU, as
// vLLM's, and tells the index what they evict and store.
const (
	traceMembers  = 8
	traceCapacity = 19_208
	traceBlocks   = 32 // of 16 tokens in one block of the trace
)

// step is one request of the trace: a query and the changes that follow.
type step struct {
	query  []blockkey.Key
	want   [traceMembers]uint32
	member Member
	// The blocks evicted one by one, in order; and the same gathered into
	// pieces of chains.
	victims []victim
	evicted []blockkey.Key
	batches []piece
	stores  []piece
}

type victim struct {
	position uint32
	before   []blockkey.Key
	key      blockkey.Key
}

type piece struct {
	before   []blockkey.Key
	position uint32
	keys     []blockkey.Key
}

type trace struct {
	steps            []step
	queried, changed int
}

var loadTrace = sync.OnceValues(func() (*trace, error) {
	f, err := os.Open("testdata/conversation.jsonl.gz")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	t := &trace{}
	var caches [traceMembers]lru
	for i := range caches {
		caches[i].nodes = make(map[blockkey.Key]int32)
		caches[i].list = make([]lruNode, 1, traceCapacity+1)
	}
	for d := json.NewDecoder(z); ; {
		var line struct {
			InputLength int      `json:"input_length"`
			HashIDs     []uint64 `json:"hash_ids"`
		}
		if err := d.Decode(&line); err == io.EOF {
			return t, nil
		} else if err != nil {
			return nil, fmt.Errorf("read request %d: %w", len(t.steps), err)
		}
		keys := make([]blockkey.Key, min(line.InputLength/16, traceBlocks*len(line.HashIDs)))
		for k := range keys {
			keys[k] = content(1<<32+line.HashIDs[k/traceBlocks], uint64(k%traceBlocks))
		}
		s := step{query: keys, member: Member(len(t.steps) % traceMembers)}
		for m := range caches {
			s.want[m] = uint32(caches[m].prefix(keys))
		}
		caches[s.member].serve(&s)
		t.steps = append(t.steps, s)
		t.queried += len(keys)
		t.changed += len(s.victims)
		for _, p := range s.stores {
			t.changed += len(p.keys)
		}
	}
})

// lru is the cache of one member. list[0] is the head of a ring of the blocks
// that no request uses, oldest first.
type lru struct {
	nodes map[blockkey.Key]int32
	list  []lruNode
	free  []int32
}

type lruNode struct {
	key        blockkey.Key
	before     []blockkey.Key
	position   uint32
	prev, next int32
}

func (c *lru) prefix(keys []blockkey.Key) int {
	for i, k := range keys {
		if _, ok := c.nodes[k]; !ok {
			return i
		}
	}
	return len(keys)
}

func (c *lru) unlink(n int32) {
	e := c.list[n]
	c.list[e.prev].next, c.list[e.next].prev = e.next, e.prev
}

func (c *lru) push(n int32) {
	last := c.list[0].prev
	c.list[n].prev, c.list[n].next = last, 0
	c.list[last].next, c.list[0].prev = n, n
}

// serve plays one request and notes what leaves the cache and what enters.
func (c *lru) serve(s *step) {
	missing := 0
	for _, k := range s.query {
		if n, ok := c.nodes[k]; ok {
			c.unlink(n)
		} else {
			missing++
		}
	}
	for len(c.nodes)+missing > traceCapacity {
		n := c.list[0].next
		c.unlink(n)
		v := c.list[n]
		delete(c.nodes, v.key)
		c.free = append(c.free, n)
		s.victims = append(s.victims, victim{v.position, v.before, v.key})
	}
	for _, v := range s.victims {
		s.evicted = append(s.evicted, v.key)
	}
	s.batches = gather(s.victims)
	open := false
	for i, k := range s.query {
		if _, ok := c.nodes[k]; ok {
			open = false
			continue
		}
		if last := len(s.stores) - 1; open && len(s.stores[last].keys) < 512 {
			s.stores[last].keys = s.query[int(s.stores[last].position) : i+1]
		} else {
			p := piece{blockkey.Before(s.query, i), uint32(i), s.query[i : i+1]}
			s.stores = append(s.stores, p)
			open = true
		}
		var n int32
		if f := len(c.free); f > 0 {
			n, c.free = c.free[f-1], c.free[:f-1]
		} else {
			n = int32(len(c.list))
			c.list = append(c.list, lruNode{})
		}
		c.list[n].key, c.list[n].position, c.list[n].before = k, uint32(i), blockkey.Before(s.query, i)
		c.nodes[k] = n
	}
	for i := len(s.query) - 1; i >= 0; i-- {
		c.push(c.nodes[s.query[i]])
	}
}

// gather makes pieces of chains of blocks that left last block first.
func gather(victims []victim) []piece {
	var out []piece
	for i := 0; i < len(victims); {
		j := i + 1
		for j < len(victims) && victims[j].position+1 == victims[j-1].position {
			j++
		}
		p := piece{before: victims[j-1].before, position: victims[j-1].position}
		for k := j - 1; k >= i; k-- {
			p.keys = append(p.keys, victims[k].key)
		}
		out = append(out, p)
		i = j
	}
	return out
}

func BenchmarkTrace(b *testing.B) {
	t, err := loadTrace()
	if err != nil {
		b.Fatal(err)
	}
	for _, batched := range []bool{false, true} {
		name := "W7"
		if batched {
			name = "W7b"
		}
		for _, s := range subjects {
			b.Run(name+s.suffix, func(b *testing.B) {
				var seconds, cpu, p50, p99 []float64
				for b.Loop() {
					times := make([]time.Duration, 0, len(t.steps))
					x := s.make()
					runtime.GC()
					start, before := time.Now(), cpuTime()
					wrong := play(x, t, batched, &times)
					seconds = append(seconds, time.Since(start).Seconds())
					cpu = append(cpu, (cpuTime() - before).Seconds())
					if wrong != 0 {
						b.Fatalf("%d of %d answers wrong", wrong, len(t.steps))
					}
					slices.Sort(times)
					p50 = append(p50, times[len(times)/2].Seconds()*1e6)
					p99 = append(p99, times[len(times)*99/100].Seconds()*1e6)
				}
				slices.Sort(seconds)
				slices.Sort(cpu)
				slices.Sort(p50)
				slices.Sort(p99)
				mid := seconds[len(seconds)/2]
				b.ReportMetric(mid, "s")
				b.ReportMetric(seconds[0], "best-s")
				b.ReportMetric(cpu[len(cpu)/2], "cpu-s")
				b.ReportMetric(cpu[0], "best-cpu-s")
				b.ReportMetric(float64(t.changed)/mid, "changes/s")
				b.ReportMetric(p50[len(p50)/2], "p50-us")
				b.ReportMetric(p99[len(p99)/2], "p99-us")
			})
		}
	}
}

// play runs the trace and counts wrong answers.
func play(x subject, t *trace, batched bool, times *[]time.Duration) (wrong int) {
	var a Answer
	for i := range t.steps {
		s := &t.steps[i]
		before := time.Now()
		x.Match(s.query, &a)
		*times = append(*times, time.Since(before))
		var got [traceMembers]uint32
		for h, depth := range a.All() {
			got[h.Member()] = depth
		}
		if got != s.want {
			wrong++
		}
		if batched {
			for _, p := range s.batches {
				x.Remove(s.member, LaneGPU, p.before, p.position, p.keys)
			}
		} else {
			for j := range s.victims {
				v := &s.victims[j]
				x.Remove(s.member, LaneGPU, v.before, v.position, s.evicted[j:j+1])
			}
		}
		for _, p := range s.stores {
			x.Store(s.member, LaneGPU, p.before, p.position, p.keys)
		}
	}
	return wrong
}

func TestTraceIsAnsweredExactly(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine, and a minute of it")
	}
	tr, err := loadTrace()
	if err != nil {
		t.Fatal(err)
	}
	if len(tr.steps) != 12_031 || tr.queried != 9_044_013 || tr.changed != 8_577_704+8_424_040 {
		t.Errorf("%d requests, %d blocks asked, %d changed", len(tr.steps), tr.queried, tr.changed)
	}
	if raceEnabled {
		tr.steps = tr.steps[:600] // the whole takes minutes then, on one goroutine
	}
	for _, batched := range []bool{false, true} {
		x := New(Config{})
		var times []time.Duration
		if wrong := play(x, tr, batched, &times); wrong != 0 {
			t.Errorf("batched %v: %d of %d answers wrong", batched, wrong, len(tr.steps))
		}
		if err := x.verify(); err != nil {
			t.Error(err)
		}
	}
}
