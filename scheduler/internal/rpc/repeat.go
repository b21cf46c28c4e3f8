package rpc

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	// maxRepeats and repeatFor bound the named requests whose decisions are
	// remembered.
	maxRepeats = 16384
	repeatFor  = 10 * time.Minute
)

// repeats remembers the decisions of requests that have a name.
type repeats struct {
	seed maphash.Seed

	mu     sync.Mutex // guards what follows
	byName map[string]*decided
	order  []*decided // a ring of maxRepeats, the oldest at next
	next   int
}

// decided is what became of one request. What is not done is decided on a
// caller's goroutine.
type decided struct {
	name string
	sum  uint64 // of the request
	at   time.Time
	done chan struct{}
	resp *api.PickResponse // nil: it failed; written before done is closed
}

func newRepeats() *repeats {
	return &repeats{seed: maphash.MakeSeed(), byName: make(map[string]*decided)}
}

// once answers a request by what was decided for it before, and decides if it
// is the first of its name. Of several at a time one decides; if that fails the
// next one does, and failures are not remembered.
func (r *repeats) once(ctx context.Context, req *api.PickRequest, decide func(context.Context, *api.PickRequest) (*api.PickResponse, error)) (*api.PickResponse, error) {
	whole, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("read the request again: %w", err)
	}
	sum := maphash.Bytes(r.seed, whole)
	name := nameOf(req.GetRequest())
	for {
		d, mine := r.join(name, sum, time.Now())
		if mine {
			defer r.land(d) // even where deciding panics
			resp, err := decide(ctx, req)
			if err == nil {
				d.resp = resp
			}
			return resp, err
		}
		if d.sum != sum {
			return nil, fmt.Errorf("request_id %.128q: %w", req.GetRequest().GetRequestId(), errReused)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-d.done:
		}
		if d.resp != nil {
			return &api.PickResponse{
				DecisionId:  d.resp.GetDecisionId(),
				Ranking:     d.resp.GetRanking(),
				ExpiresInMs: max(0, d.resp.GetExpiresInMs()-milliseconds(time.Since(d.at))),
			}, nil
		}
	}
}

// last remembers the answer to a request as the last one of its name.
func (r *repeats) last(req *api.PickRequest, resp *api.PickResponse) {
	d := &decided{name: nameOf(req.GetRequest()), at: time.Now(), done: make(chan struct{}), resp: resp}
	close(d.done)
	r.mu.Lock()
	r.put(d)
	r.mu.Unlock()
}

// join returns what is known of a name; mine: nothing, and the caller decides.
func (r *repeats) join(name string, sum uint64, now time.Time) (d *decided, mine bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d, ok := r.byName[name]; ok && now.Sub(d.at) < repeatFor {
		return d, false
	}
	d = &decided{name: name, sum: sum, at: now, done: make(chan struct{})}
	r.put(d)
	return d, true
}

// put lets one take the place of another of its name, or of the oldest. Callers
// hold mu.
func (r *repeats) put(d *decided) {
	r.byName[d.name] = d
	if len(r.order) < maxRepeats {
		r.order = append(r.order, d)
		return
	}
	oldest := r.order[r.next]
	if r.byName[oldest.name] == oldest {
		delete(r.byName, oldest.name)
	}
	r.order[r.next] = d
	r.next = (r.next + 1) % maxRepeats
}

func nameOf(r *api.Request) string { return r.GetTenant() + "\x00" + r.GetRequestId() }

// find gives the answer to a request by its name, and its age; nil: none is
// remembered.
func (r *repeats) find(name string, now time.Time) (*api.PickResponse, time.Duration) {
	r.mu.Lock()
	d := r.byName[name]
	r.mu.Unlock()
	if d == nil {
		return nil, 0
	}
	select {
	case <-d.done:
	default: // it waits for room
		return nil, 0
	}
	age := now.Sub(d.at)
	if d.resp == nil || age >= repeatFor {
		return nil, 0
	}
	return d.resp, age
}

// land tells those who wait that the request is decided.
func (r *repeats) land(d *decided) {
	r.mu.Lock()
	if d.resp == nil && r.byName[d.name] == d {
		delete(r.byName, d.name)
	}
	r.mu.Unlock()
	close(d.done)
}
