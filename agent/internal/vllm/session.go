package vllm

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// pingAfter is the silence after which the engine's socket is asked for a
	// sign of life. Without one for silentFor the cache state is suspected; for
	// deadAfter, and the connection is over. The socket answers from a thread of
	// its own, however busy the engine is.
	pingAfter = 300 * time.Millisecond
	silentFor = 400 * time.Millisecond
	deadAfter = 10 * time.Second
	// pollEvery is how often a session polls for what no message says.
	// A stream is quiet after quietLooks; a check that failed is made again after
	// checkAgain more.
	pollEvery  = 100 * time.Millisecond
	quietPolls = 3
	checkAgain = 20
	// beginEvery is how often a session begins anew for peers that come and go.
	beginEvery = time.Second
	// stoppedFor is the time between two looks that means that this process was
	// stopped.
	stoppedFor = time.Second
)

// session is the time of one connection.
type session struct {
	live *feed
	any  bool
	last uint64 // newest sequence seen on this connection

	polled  time.Time // last
	idle    int       // looks since the last message
	checked bool      // that nothing was lost, be it before the subscription counted
	silent  bool      // the engine does not answer at present

	// Of a Tail that listens.
	spoke    bool   // the peer has sent a batch
	turnover uint64 // of the peers, at the last begin
	begun    time.Time
}

func (t *Tail) session(ctx context.Context, live *feed) {
	s := &session{live: live, polled: time.Now(), spoke: live.spoke}
	if t.peers != nil {
		s.turnover = t.peers.turnover()
	}
	defer func() {
		live.close()
		t.count(func(st *TailStats) { st.Connected = false })
		t.setState(Syncing, "connection to the engine's event stream lost")
	}()
	t.count(func(st *TailStats) { st.Connections++; st.Connected = true })
	t.cfg.Log.Info("event stream connected", "endpoint", t.at.Load().events)
	// A replay ends with the connection: what it says is then about to be void.
	replayCtx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-s.live.lost:
			stop()
		case <-replayCtx.Done():
		}
	}()
	if !t.begin(replayCtx, s.live) {
		return
	}
	t.follow(replayCtx, s)
	select {
	case <-s.live.lost:
		if ctx.Err() == nil {
			t.cfg.Log.Warn("event stream ended", "endpoint", t.at.Load().events, "error", s.live.err)
		}
	default: // it is left, and its reader still runs
	}
}

// begin finds out whether the engine at the other end is the one that was
// known, and catches up with it. It is false when the connection has ended.
func (t *Tail) begin(ctx context.Context, live *feed) bool {
	select {
	case why := <-t.restart:
		t.newIncarnation(why)
	default:
	}
	if t.any {
		if why := t.compare(ctx); why != "" {
			if ctx.Err() != nil {
				return false // undecided: the next connection decides
			}
			t.newIncarnation(why)
		}
	} else {
		if t.met {
			t.newIncarnation("connection lost, and no batch is known that could tell the engine from another")
		}
		t.want, t.whole = 0, true
	}
	t.met = true
	return t.reach(ctx, live)
}

// reach catches up with the engine and says what the cache state is worth then. It
// is false when this connection says nothing more.
func (t *Tail) reach(ctx context.Context, live *feed) bool {
	t.blind = false
	err := t.catchUp(ctx, 0, live)
	switch {
	case ctx.Err() != nil:
		return false
	case errors.Is(err, errForeign):
		t.newIncarnation(err.Error())
		return false
	case err != nil && t.any:
		// What the engine has sent since cannot be had: removals, too.
		t.cfg.Log.Warn("replay gave up", "from", t.want, "error", err)
		t.forget(fmt.Sprintf("what came behind batch %d cannot be replayed", t.last))
	case err != nil:
		t.blind = !t.born
	}
	t.settle()
	return true
}

// follow applies the live stream until it ends or a restart is asked for.
func (t *Tail) follow(ctx context.Context, s *session) {
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		select {
		case m, ok := <-s.live.messages:
			if !ok {
				return
			}
			goOn := t.live(ctx, s, m.Frames)
			s.live.done(m)
			if ctx.Err() != nil || !goOn {
				return
			}
		case now := <-poll.C:
			if !t.poll(ctx, s, now) {
				return
			}
		case why := <-t.restart:
			t.newIncarnation(why)
			return
		case <-ctx.Done():
			return
		}
	}
}

// poll sees what no message tells: that the engine does not answer, and that
// the newest batches got lost. It is false when the session is over.
func (t *Tail) poll(ctx context.Context, s *session, now time.Time) bool {
	if now.Sub(s.polled) > stoppedFor {
		s.checked = false // nobody read meanwhile: the engine may have dropped
	}
	s.polled = now
	if t.peers != nil {
		if goOn, decided := t.pollPeers(ctx, s, now); decided {
			return goOn
		}
	}
	switch silent := s.live.conn.Unanswered() > silentFor; {
	case silent:
		s.silent, s.checked = true, false
		t.setState(Syncing, "the engine's event socket does not answer")
		return true
	case s.silent && len(s.live.messages) == 0:
		s.silent = false // what it sent before its answer has been applied
		t.settle()
	}
	s.idle++
	if s.checked || s.idle < quietPolls || len(s.live.messages) > 0 || t.at.Load().replay == "" {
		return true
	}
	return t.check(ctx, s)
}

// lookAround sees whether the peer that is followed is the engine, as far as
// the others show it. When that decides the poll, the session goes on suspected
// or is over.
//
// A peer that has sent a batch is left while it does not answer, if another
// sends one. One that has sent nothing is left as soon as another sends a batch;
// until then anybody who comes or goes may be the engine, which is asked anew.
func (t *Tail) pollPeers(ctx context.Context, s *session, now time.Time) (goOn, decided bool) {
	switch {
	case s.spoke && !s.silent:
		return true, false
	case t.peers.spoken():
		t.cfg.Log.Warn("another peer publishes, leaving the one that is silent", "endpoint", t.at.Load().events)
		return false, true
	case s.spoke || t.peers.turnover() == s.turnover:
		return true, false
	}
	t.setState(Syncing, "peers of the listening agent came or went, and none of them has published yet")
	if now.Sub(s.begun) < beginEvery {
		return true, true
	}
	s.turnover, s.begun = t.peers.turnover(), now
	goOn = t.begin(ctx, s.live)
	return goOn, !goOn
}

// check asks a quiet engine whether the newest batch applied is its newest. One
// that got lost with none behind it would never be missed.
func (t *Tail) check(ctx context.Context, s *session) bool {
	before := t.want
	tooLate, err := t.once(ctx, checkSilence, false)
	switch {
	case ctx.Err() != nil:
		return false
	case errors.Is(err, errForeign):
		t.newIncarnation(err.Error())
		return false
	case tooLate, t.want != before && err != nil, t.blind && err == nil:
		if !t.blind {
			t.count(func(st *TailStats) { st.Gaps++ })
			t.cfg.Log.Warn("the newest batches were lost", "from", before)
		}
		t.setState(Syncing, fmt.Sprintf("replaying from batch %d", before))
		s.checked = true
		return t.reach(ctx, s.live)
	case err != nil:
		s.idle = -checkAgain
	case t.want != before:
		// Lost, or overtaken by the answer. The next poll asks for more.
		t.cfg.Log.Debug("batches that nobody had announced", "from", before, "to", t.want-1)
	default:
		s.checked = true
	}
	return true
}

// live takes one message of the stream: topic, sequence, payload. It is false
// when the session is over.
func (t *Tail) live(ctx context.Context, s *session, frames [][]byte) bool {
	s.idle, s.checked = 0, false
	if len(frames) < 3 || len(frames[1]) != 8 {
		t.count(func(st *TailStats) { st.Malformed++ })
		return true
	}
	sequence, payload := bigEndian(frames[1]), frames[2]
	if sequence == endMarker {
		t.count(func(st *TailStats) { st.Malformed++ })
		return true
	}
	s.spoke = s.spoke || t.peers != nil && isBatch(frames, t.cfg.Topic)
	switch {
	case s.any && sequence <= s.last:
		// One connection keeps the order, so numbers fall only with a new incarnation.
		t.newIncarnation(fmt.Sprintf("sequence fell from %d to %d", s.last, sequence))
	case sequence < t.want && t.foreign(sequence, payload):
		t.newIncarnation(fmt.Sprintf("batch %d differs from its replay", sequence))
	}
	s.any, s.last = true, sequence
	if sequence > t.want {
		if err := t.fill(ctx, sequence, s.live); errors.Is(err, errForeign) {
			t.newIncarnation(err.Error())
			return false
		}
	}
	if ctx.Err() != nil {
		return false
	}
	if sequence >= t.want {
		t.apply(sequence, payload, false)
		t.blind = false
	}
	if !s.silent || len(s.live.messages) == 0 {
		t.settle()
	}
	return true
}

// fill closes the gap before head, or gives up what lies in it.
func (t *Tail) fill(ctx context.Context, head uint64, live *feed) error {
	if !t.blind {
		t.count(func(st *TailStats) { st.Gaps++ })
		t.cfg.Log.Warn("gap in the event stream", "from", t.want, "to", head-1)
	}
	if t.at.Load().replay != "" {
		t.setState(Syncing, fmt.Sprintf("replaying from batch %d", t.want))
	}
	err := t.catchUp(ctx, head, live)
	switch {
	case ctx.Err() != nil, errors.Is(err, errForeign):
		return err
	case err != nil:
		t.cfg.Log.Warn("replay gave up", "from", t.want, "error", err)
	}
	if t.want < head {
		t.lose(head)
	}
	return nil
}
