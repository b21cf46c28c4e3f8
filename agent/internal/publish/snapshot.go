package publish

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/protocol"
)

// maxQueries bounds the snapshot requests that wait. One is answered at a
// time: a cache state is copied for each.
const maxQueries = 16

// queries holds the snapshot requests that wait for their answer.
type queries struct {
	inbox   string // what every scheduler's reply subject begins with
	waiting chan query

	mu   sync.Mutex          // guards busy
	busy map[string]struct{} // requesters with a request waiting or in answer

	answered, chunks, refused, errors atomic.Uint64
}

type query struct {
	reply     string
	requester string
}

func newQueries(inbox string) *queries {
	return &queries{inbox: inbox, waiting: make(chan query, maxQueries), busy: make(map[string]struct{})}
}

// ask queues requests as they come. A request is refused, without an answer,
// when it is malformed or wants it elsewhere than in a scheduler's inbox, when
// its requester has one open, or when too many wait: who gets no answer asks
// again, later and later.
func (q *queries) ask(member string) nats.MsgHandler {
	return func(m *nats.Msg) {
		if !strings.HasPrefix(m.Reply, q.inbox) {
			q.refused.Add(1)
			return
		}
		if _, err := protocol.ReadRequest(m.Data, member); err != nil {
			q.refused.Add(1)
			return
		}
		requester := requesterOf(m.Reply)
		q.mu.Lock()
		defer q.mu.Unlock()
		if _, open := q.busy[requester]; open {
			q.refused.Add(1)
			return
		}
		select {
		case q.waiting <- query{reply: m.Reply, requester: requester}:
			q.busy[requester] = struct{}{}
		default:
			q.refused.Add(1)
		}
	}
}

func (q *queries) done(requester string) {
	q.mu.Lock()
	delete(q.busy, requester)
	q.mu.Unlock()
}

// requesterOf is the reply subject without the token that numbers the requests
// of one requester; a subject of two tokens or fewer has none.
func requesterOf(reply string) string {
	if strings.Count(reply, ".") < 2 {
		return reply
	}
	return reply[:strings.LastIndexByte(reply, '.')]
}

// answer serves the requests one after the other.
func (p *Publisher) answer(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case q := <-p.queries.waiting:
			if err := p.snapshot(ctx, q.reply); err != nil {
				p.queries.errors.Add(1)
				p.cfg.Log.Warn("answer snapshot request", "error", err)
			} else {
				p.queries.answered.Add(1)
			}
			p.queries.done(q.requester)
		}
	}
}

// cut pairs the cache state with the sequence that it stands at. The cache state may
// begin a new epoch at any moment, of which nothing is published yet; what is
// published is what can be cut.
func (p *Publisher) cut() ([]mirror.Op, State, uint64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range 3 {
		p.drainLocked()
		if ops, st := p.cfg.CacheState.Snapshot(); st.Epoch == p.epoch && st.Epoch != 0 {
			return ops, st, p.sequence, nil
		}
	}
	return nil, State{}, 0, errors.New("no epoch lasts long enough to be cut")
}

// snapshot sends the cache state at one sequence in chunks.
func (p *Publisher) snapshot(ctx context.Context, reply string) error {
	ops, st, sequence, err := p.cut()
	if err != nil {
		return err
	}
	e := newEncoder(p.cfg.Member) // the publisher's own is in use meanwhile
	for part := range e.parts(ops, st, p.limit()) {
		if ctx.Err() != nil {
			return nil
		}
		data, err := e.chunk(part, st, sequence)
		if err == nil {
			err = p.cfg.Conn.Publish(reply, data)
		}
		if err != nil {
			return err
		}
		p.queries.chunks.Add(1)
	}
	return nil
}
