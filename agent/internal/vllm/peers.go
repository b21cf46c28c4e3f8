package vllm

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/kvscout/kvscout/agent/internal/zmtp"
)

const (
	// maxPeers bounds the peers of a Tail that listens, the one that is followed
	// included.
	maxPeers = 64
	// waitingMessage bounds the first message of a peer that waits: all of them
	// together hold no more than one that is followed.
	waitingMessage = feedBytes / maxPeers
)

var errNoBatch = errors.New("the first message is no batch of events")

// peers are those that have connected to a Tail that listens. One at a time is
// followed, and anybody can connect and shake hands: so the others are heard
// as far as their first message, and one whose first message is a batch goes
// before all that have said nothing. A batch verifies no more than that: who can
// connect can lie, and the replay is what tells incarnations of the engine apart.
type peers struct {
	listener *zmtp.Listener
	tail     *Tail // for its counters, settings and log
	changed  chan struct{}
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu    sync.Mutex // guards all below
	all   []*peer    // in the order in which they came
	turns uint64     // how often one that had shaken hands came or went
	wrong bool       // a failed peer was logged since the last that was followed
}

// peer is one connection; peers.mu guards it.
type peer struct {
	conn   *zmtp.Conn
	feed   *feed         // nil: the hands are not shaken yet
	spoke  bool          // with a batch, which waits
	chosen bool          // is followed, or was
	turn   chan struct{} // closed when chosen
}

// newPeers lets peers in from here on, until close.
func newPeers(ctx context.Context, listener *zmtp.Listener, t *Tail) *peers {
	ctx, cancel := context.WithCancel(ctx)
	p := &peers{listener: listener, tail: t, changed: make(chan struct{}, 1), cancel: cancel}
	p.wg.Add(1)
	go func() {
		defer p.wg.Done()
		p.accept(ctx)
	}()
	return p
}

// close hangs up on everybody and waits for that.
func (p *peers) close() {
	p.cancel()
	p.wg.Wait()
	p.listener.Close()
}

func (p *peers) accept(ctx context.Context) {
	for {
		conn, err := p.listener.Accept(ctx)
		if ctx.Err() != nil {
			if err == nil {
				conn.Close()
			}
			return
		}
		if err != nil {
			p.complain(err)
			sleep(ctx, redialSlow)
			continue
		}
		conn.SetMaxMessage(waitingMessage)
		one := &peer{conn: conn, turn: make(chan struct{})}
		p.admit(one)
		p.wg.Add(1)
		go func() {
			defer p.wg.Done()
			p.meet(ctx, one)
		}()
	}
}

// admit makes room for one: the oldest that has said nothing is hung up on, and
// only where there is none, the oldest that waits with a batch. An engine that
// this hits connects again.
func (p *peers) admit(one *peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.all) >= maxPeers {
		i := slices.IndexFunc(p.all, func(o *peer) bool { return !o.chosen && !o.spoke })
		if i < 0 {
			i = slices.IndexFunc(p.all, func(o *peer) bool { return !o.chosen })
		}
		if i >= 0 {
			p.all[i].conn.Close()
			p.remove(p.all[i])
			p.tail.count(func(st *TailStats) { st.HungUp++ })
		}
	}
	p.all = append(p.all, one)
}

// meet stays with one until its end.
func (p *peers) meet(ctx context.Context, one *peer) {
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.remove(one)
	}()
	if err := one.conn.Handshake(ctx); err != nil {
		if ctx.Err() == nil {
			p.complain(err)
		}
		return
	}
	p.mu.Lock()
	if !slices.Contains(p.all, one) { // hung up on meanwhile
		p.mu.Unlock()
		return
	}
	one.feed = newFeed(ctx, one.conn, func(ctx context.Context, m *zmtp.Message) error { return p.first(ctx, one, m) })
	p.turned()
	p.mu.Unlock()
	<-one.feed.lost
	p.mu.Lock()
	waited := !one.chosen
	p.mu.Unlock()
	if waited && ctx.Err() == nil {
		p.complain(one.feed.err)
	}
}

// first takes the first message of one and returns when it is to be handed on.
func (p *peers) first(ctx context.Context, one *peer, m *zmtp.Message) error {
	batch := isBatch(m.Frames, p.tail.cfg.Topic)
	p.mu.Lock()
	if !one.chosen {
		if !batch {
			p.mu.Unlock()
			p.tail.count(func(st *TailStats) { st.Malformed++ })
			return errNoBatch
		}
		one.spoke = true
		p.wake()
	}
	p.mu.Unlock()
	select {
	case <-one.turn:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// next waits for a peer to follow: the first that has spoken, else the newest,
// as a connection that ended is followed by one that comes. It is nil when ctx
// has ended.
func (p *peers) next(ctx context.Context) *feed {
	for ctx.Err() == nil {
		if one := p.choose(); one != nil {
			return one.feed
		}
		select {
		case <-p.changed:
		case <-ctx.Done():
		}
	}
	return nil
}

func (p *peers) choose() *peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best *peer
	for _, one := range p.all {
		if one.feed != nil && !one.chosen && (best == nil || !best.spoke) {
			best = one
		}
	}
	if best != nil {
		best.chosen, p.wrong = true, false
		best.feed.spoke = best.spoke
		best.conn.SetMaxMessage(maxMessage)
		close(best.turn)
	}
	return best
}

// spoken says whether one waits that has spoken.
func (p *peers) spoken() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.all, func(o *peer) bool { return o.spoke && !o.chosen })
}

// turnover changes whenever one that had shaken hands comes or goes.
func (p *peers) turnover() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turns
}

// remove strikes one off; p.mu is held.
func (p *peers) remove(one *peer) {
	if i := slices.Index(p.all, one); i >= 0 {
		p.all = slices.Delete(p.all, i, i+1)
		if one.feed != nil {
			p.turned()
		}
	}
}

func (p *peers) turned() { p.turns++; p.wake() }

func (p *peers) wake() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// complain logs why a peer was of no use, once for each that is followed.
func (p *peers) complain(err error) {
	p.mu.Lock()
	logged := p.wrong
	p.wrong = true
	p.mu.Unlock()
	if !logged {
		p.tail.cfg.Log.Info("a peer is no engine that publishes", "endpoint", p.tail.at.Load().events, "error", err)
	}
}

// isBatch says whether a message is one that an engine publishes under topic.
func isBatch(frames [][]byte, topic string) bool {
	if len(frames) < 3 || len(frames[1]) != 8 || bigEndian(frames[1]) == endMarker || !strings.HasPrefix(string(frames[0]), topic) {
		return false
	}
	_, err := new(Decoder).Decode(frames[2])
	return err == nil
}
