package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvscout/kvscout/protocol/client"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

const (
	callers = 6
	// between is the mean time between two requests of a caller.
	between = 15 * time.Millisecond
	// requestTime bounds what a caller waits for.
	requestTime = 300 * time.Millisecond

	families    = 8
	perFamily   = 12
	longestHead = 24 // blocks that a family shares at most
	longestTail = 30
)

// prompt is one of those that callers send, again and again.
type prompt struct {
	tokens []uint32
	bytes  []byte // as little-endian uint32
	body   []byte // of the completion
	// prefixes number the prefixes of each depth over the whole population.
	prefixes []int
}

// population is what callers ask, in families that share their heads. It is
// several times larger than an engine's cache.
func population(seed uint64) []prompt {
	r := rand.New(rand.NewPCG(seed, 1))
	words := func(n int) []uint32 {
		out := make([]uint32, n)
		for i := range out {
			out[i] = 1000 + r.Uint32N(100_000)
		}
		return out
	}
	var list []prompt
	numbers := make(map[string]int)
	for range families {
		head := words((1 + r.IntN(longestHead)) * blockSize)
		for range perFamily {
			keep := r.IntN(len(head)/blockSize+1) * blockSize
			// Never whole blocks only: the last token is computed always.
			q := prompt{tokens: append(head[:keep:keep], words(r.IntN(longestTail)*blockSize+1+r.IntN(blockSize-1))...)}
			b := []byte(`{"model":"` + model + `","max_tokens":1,"prompt":[`)
			for i, t := range q.tokens {
				if i > 0 {
					b = append(b, ',')
				}
				b = strconv.AppendUint(b, uint64(t), 10)
				q.bytes = binary.LittleEndian.AppendUint32(q.bytes, t)
			}
			q.body = append(b, "]}"...)
			for n := blockSize; n <= len(q.tokens); n += blockSize {
				key := string(q.bytes[:4*n])
				if _, ok := numbers[key]; !ok {
					numbers[key] = len(numbers)
				}
				q.prefixes = append(q.prefixes, numbers[key])
			}
			list = append(list, q)
		}
	}
	return list
}

// load is the callers.
type load struct {
	f      *fleet
	cancel context.CancelFunc
	group  sync.WaitGroup
	gate   sync.RWMutex // held for reading by every request
	mu     sync.Mutex   // guards paused
	paused bool

	served, failed, blind atomic.Int64 // blind: sent without a pick
}

func newLoad(f *fleet) *load {
	l := &load{f: f}
	ctx, cancel := context.WithCancel(f.ctx)
	l.cancel = cancel
	for i := range callers {
		r := rand.New(rand.NewPCG(f.o.seed, 100+uint64(i)))
		l.group.Go(func() { l.call(ctx, r) })
	}
	return l
}

func (l *load) call(ctx context.Context, r *rand.Rand) {
	for ctx.Err() == nil {
		l.gate.RLock()
		l.one(ctx, r)
		l.gate.RUnlock()
		select {
		case <-ctx.Done():
		case <-time.After(between/2 + rand.N(between)):
		}
	}
}

// one request: ask for a member, send it there.
func (l *load) one(ctx context.Context, r *rand.Rand) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	// Some prompts are asked more often than others.
	q := &l.f.prompts[min(r.IntN(len(l.f.prompts)), r.IntN(len(l.f.prompts)))]
	anyone := func([]string) string { return l.f.members[r.IntN(len(l.f.members))].engine.Load().Addr() }
	request := &api.Request{Model: model, Prompt: api.TokenIDs(q.tokens), MaxCandidates: 1}
	err := l.f.proxy.Do(ctx, request, anyone, func(ctx context.Context, p *client.Placement) (*api.Report, error) {
		if p.Decision == nil {
			l.blind.Add(1)
		}
		if !l.f.serving(p.Address) {
			return nil, client.Another(errors.New("the engine is down"))
		}
		return nil, l.f.post(ctx, "http://"+p.Address+"/v1/completions", q.body)
	})
	if err == nil {
		l.served.Add(1)
	} else {
		l.failed.Add(1)
	}
}

// serving tells whether the engine at the address takes requests.
func (f *fleet) serving(address string) bool {
	for _, m := range f.members {
		if m.engine.Load().Addr() == address {
			return m.up.Load()
		}
	}
	return false
}

func (f *fleet) post(ctx context.Context, url string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	answer, err := f.http.Do(req)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

// pause lets the requests under way end and holds the others back.
func (l *load) pause() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.paused {
		l.paused = true
		l.gate.Lock()
	}
}

func (l *load) resume() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.paused {
		l.paused = false
		l.gate.Unlock()
	}
}

func (l *load) close() {
	l.cancel()
	l.resume()
	l.group.Wait()
}
