// Package replica lets the schedulers of a pool know of each other's decisions:
// what each reserved on whom, what became of it, where sessions went, and what
// will be cached there.
// It reads and writes one subject of the bus, takes what is pending from the
// outbox, and reserves and predicts what others did as if it had been done here.
//
// Everything here is best effort and bounded. A message that is lost, late or
// refused makes a scheduler a little less well informed, for as long as
// reservations last without a report or until a load sample says better.
package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/protocol/pb"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/outbox"
	"github.com/kvscout/kvscout/scheduler/internal/predict"
)

const (
	// pause between two messages: news that come meanwhile travel together. The
	// first after a pause go at once.
	pause = 2 * time.Millisecond
	// helloEvery is how often a scheduler says that it is there, and peerLife
	// how long that is believed. Nobody sends news to nobody.
	helloEvery  = time.Second
	peerTimeout = 3 * helloEvery
	// maxPeers bounds the schedulers that are remembered.
	maxPeers = 64
	// maxMessages bounds those that wait; what does not fit is lost.
	maxMessages = 1024
	// stale is the age of a decision that is no news any more: load samples
	// have seen it.
	stale = 2 * time.Second
)

// Config of a Replica.
type Config struct {
	Conn *nats.Conn
	Pool string
	// Name of this scheduler, for the people behind others.
	Name string
	// Fleet with the reservations, blocks that are Predicted there, and what this
	// scheduler did itself.
	Fleet     *fleet.Fleet
	Predicted *predict.Blocks
	Outbox    *outbox.Outbox
	// Log of schedulers that come and go; nil: nowhere.
	Log *slog.Logger
}

// Replica is one scheduler among those of a pool.
type Replica struct {
	cfg     Config
	subject string
	sender  uint64        // one incarnation of this scheduler
	greet   chan struct{} // has an entry when somebody new sent something
	count   counters
}

type counters struct {
	peers                                       atomic.Int64
	sent, received, reservations, ends          atomic.Uint64
	unknown, stale, lost, malformed, unsendable atomic.Uint64
}

// Stats of a Replica.
type Stats struct {
	// Peers are the other schedulers that sent something lately.
	Peers int64
	// Sent and Received messages, Reservations and Ends taken from them, Unknown
	// reservations of members that are not known here, Stale ones that came too
	// late, messages Lost by their sequence, Malformed or refused, Unsendable,
	// and news Dropped because there were too many.
	Sent, Received, Reservations, Ends, Unknown, Stale, Lost, Malformed, Unsendable, Dropped uint64
}

// New checks the configuration.
func New(cfg Config) (*Replica, error) {
	if cfg.Conn == nil || cfg.Fleet == nil || cfg.Predicted == nil || cfg.Outbox == nil {
		return nil, errors.New("replica: connection, fleet, predicted blocks and outbox are needed")
	}
	subjects, err := protocol.NewSubjects(cfg.Pool)
	if err != nil {
		return nil, fmt.Errorf("replica: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Replica{cfg: cfg, subject: subjects.Picks(), sender: max(1, rand.Uint64()), greet: make(chan struct{}, 1)}, nil
}

// Stats returns the counts.
func (r *Replica) Stats() Stats {
	c := &r.count
	return Stats{
		Peers: c.peers.Load(), Sent: c.sent.Load(), Received: c.received.Load(), Reservations: c.reservations.Load(), Ends: c.ends.Load(),
		Unknown: c.unknown.Load(), Stale: c.stale.Load(), Lost: c.lost.Load(), Malformed: c.malformed.Load(),
		Unsendable: c.unsendable.Load(), Dropped: r.cfg.Outbox.Dropped(),
	}
}

// Run sends and receives until ctx is done.
func (r *Replica) Run(ctx context.Context) error {
	messages := make(chan *nats.Msg, maxMessages)
	s, err := r.cfg.Conn.ChanSubscribe(r.subject, messages)
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", r.subject, err)
	}
	defer func() {
		if err := s.Unsubscribe(); err != nil {
			r.cfg.Log.Debug("unsubscribe", "subject", r.subject, "error", err)
		}
	}()
	defer r.share(0)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { r.receive(ctx, messages); return nil })
	g.Go(func() error { r.publish(ctx); return nil })
	return g.Wait()
}

// publish sends news, and a sign of life where there are none.
func (r *Replica) publish(ctx context.Context) {
	var pending outbox.Pending
	sequence := uint64(0)
	hello := time.NewTicker(helloEvery)
	defer hello.Stop()
	rest := time.NewTimer(pause)
	defer rest.Stop()
	send := func(p *pb.Picks) {
		sequence++
		p.Version, p.Sender, p.Sequence = protocol.Version, r.sender, sequence
		data, err := proto.Marshal(p)
		if err == nil {
			err = r.cfg.Conn.Publish(r.subject, data)
		}
		if err != nil { // while the connection is away
			r.count.unsendable.Add(1)
			return
		}
		r.count.sent.Add(1)
	}
	send(r.hello())
	for {
		select {
		case <-ctx.Done():
			return
		case <-hello.C:
			send(r.hello())
			continue
		case <-r.greet: // it shall not wait for the next hello
			send(r.hello())
			continue
		case <-r.cfg.Outbox.Wake():
		}
		r.cfg.Outbox.Take(&pending)
		for _, p := range messagesOf(&pending, time.Now()) {
			send(p)
		}
		rest.Reset(pause)
		select {
		case <-ctx.Done():
			return
		case <-rest.C:
		}
	}
}

// hello is a sign of life.
func (r *Replica) hello() *pb.Picks { return &pb.Picks{Name: r.cfg.Name} }

// messagesOf packs news, reservations before ends.
func messagesOf(n *outbox.Pending, now time.Time) []*pb.Picks {
	var list []*pb.Picks
	for from := 0; from < len(n.Reservations); from += protocol.MaxPicks {
		p := &pb.Picks{}
		for i := from; i < min(from+protocol.MaxPicks, len(n.Reservations)); i++ {
			p.Reservations = append(p.Reservations, reservationOf(&n.Reservations[i], now))
		}
		list = append(list, p)
	}
	for from := 0; from < len(n.Ends); from += protocol.MaxPicks {
		if from > 0 || len(list) == 0 {
			list = append(list, &pb.Picks{})
		}
		p := list[len(list)-1]
		for i := from; i < min(from+protocol.MaxPicks, len(n.Ends)); i++ {
			e := &n.Ends[i]
			p.Ends = append(p.Ends, &pb.End{Decision: uint64(e.Decision), Kind: pb.End_Kind(e.Outcome), Member: e.Member})
		}
	}
	return list
}

func reservationOf(c *outbox.Reservation, now time.Time) *pb.Reservation {
	to := &pb.Reservation{
		Decision: uint64(c.Decision), Member: c.Member, Decode: c.Decode, Epoch: c.Epoch,
		AgeMs:          uint32(max(0, now.Sub(c.At).Milliseconds())),
		UncachedTokens: c.Amounts.Uncached, CachedTokens: c.Amounts.Cached,
		PrefillMs: c.Amounts.PrefillMS, FirstTokenMs: c.Amounts.FirstTokenMS, Share: c.Amounts.Share, EndMs: c.Amounts.EndMS,
		Session: c.Amounts.Mark,
	}
	if len(c.Marks) > 0 {
		to.MarkStride, to.PredictedMs = predict.Stride, uint32(c.TTL.Milliseconds())
		to.Marks = make([]uint64, len(c.Marks))
		for i, k := range c.Marks {
			to.Marks[i] = uint64(k)
		}
	}
	return to
}

// peer is another scheduler, as far as is known.
type peer struct {
	name     string // empty until it has said hello
	sequence uint64
	lastSeen time.Time
}

// receive takes what others send.
func (r *Replica) receive(ctx context.Context, messages <-chan *nats.Msg) {
	peers := make(map[uint64]*peer)
	poll := time.NewTicker(helloEvery)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-poll.C:
			for sender, p := range peers {
				if now.Sub(p.lastSeen) > peerTimeout {
					delete(peers, sender)
					r.cfg.Log.Warn("another scheduler has gone silent", "peer", p.name, "for", now.Sub(p.lastSeen).Round(time.Millisecond),
						"do", "nothing if it was stopped; else see whether it runs and reaches NATS")
				}
			}
			r.known(len(peers))
		case m := <-messages:
			p, err := protocol.ReadPicks(m.Data)
			if err != nil {
				r.count.malformed.Add(1)
				continue
			}
			if p.GetSender() != r.sender {
				r.take(peers, p, time.Now())
			}
		}
	}
}

func (r *Replica) known(peers int) {
	r.count.peers.Store(int64(peers))
	r.share(peers)
}

// share keeps what is done here for so many others, if there is one.
func (r *Replica) share(others int) {
	r.cfg.Fleet.SetOthers(others)
	r.cfg.Outbox.Open(others > 0)
}

func (r *Replica) take(peers map[uint64]*peer, p *pb.Picks, now time.Time) {
	from := peers[p.GetSender()]
	if from == nil {
		if len(peers) >= maxPeers {
			r.count.malformed.Add(1)
			return
		}
		from = &peer{sequence: p.GetSequence() - 1}
		peers[p.GetSender()] = from
		r.known(len(peers))
		select {
		case r.greet <- struct{}{}:
		default:
		}
	}
	if from.name == "" && p.GetName() != "" {
		from.name = p.GetName()
		r.cfg.Log.Info("another scheduler has joined", "peer", from.name)
	}
	switch next := p.GetSequence() - from.sequence; {
	case p.GetSequence() <= from.sequence:
		r.count.stale.Add(uint64(len(p.GetReservations())))
		return
	case next > 1:
		r.count.lost.Add(next - 1)
	}
	from.sequence, from.lastSeen = p.GetSequence(), now
	r.count.received.Add(1)
	for _, c := range p.GetReservations() {
		age := time.Duration(c.GetAgeMs()) * time.Millisecond
		switch {
		case age > stale:
			r.count.stale.Add(1)
		case r.adopt(adopted(c, now.Add(-age)), now):
			r.count.reservations.Add(1)
		default:
			r.count.unknown.Add(1)
		}
	}
	for _, e := range p.GetEnds() {
		r.count.ends.Add(1)
		asked, _ := r.cfg.Fleet.Report(fleet.Report{
			Decision: fleet.Decision(e.GetDecision()), Outcome: fleet.Outcome(e.GetKind()), Member: e.GetMember(),
		}, now)
		if asked.GivenUp {
			r.cfg.Predicted.Withdraw(e.GetDecision())
		}
	}
}

// adopt takes a decision of another scheduler as if it had been made here. It
// returns false if it says nothing here: its member is unknown, another
// process, or the decision is known.
func (r *Replica) adopt(c *outbox.Reservation, now time.Time) bool {
	if !r.cfg.Fleet.Adopt(c.Decision, c.Member, c.Epoch, c.Decode, c.Amounts, c.At, now) {
		return false
	}
	if m := r.cfg.Fleet.View().Named(c.Member); m != nil {
		r.cfg.Predicted.Adopt(uint64(c.Decision), index.Member(m.ID), c.Epoch, c.Marks, c.TTL, c.At, now)
	}
	return true
}

func adopted(c *pb.Reservation, at time.Time) *outbox.Reservation {
	to := &outbox.Reservation{
		Decision: fleet.Decision(c.GetDecision()), Member: c.GetMember(), Decode: c.GetDecode(), Epoch: c.GetEpoch(), At: at,
		Amounts: fleet.Choice{
			Uncached: c.GetUncachedTokens(), Cached: c.GetCachedTokens(),
			PrefillMS: c.GetPrefillMs(), FirstTokenMS: c.GetFirstTokenMs(), Share: c.GetShare(), EndMS: c.GetEndMs(),
			Mark: c.GetSession(),
		},
	}
	if c.GetMarkStride() == predict.Stride {
		to.TTL = time.Duration(c.GetPredictedMs()) * time.Millisecond
		to.Marks = make([]blockkey.Key, len(c.GetMarks()))
		for i, k := range c.GetMarks() {
			to.Marks[i] = blockkey.Key(k)
		}
	}
	return to
}
