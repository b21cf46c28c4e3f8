package vllm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kvscout/kvscout/agent/internal/zmtp"
)

// endMarker stands where a reply's last message has its sequence.
const endMarker = math.MaxUint64

const (
	// replaySilence without an end marker means that it was dropped: the
	// engine's ROUTER drops without a word when its pipe is full.
	replaySilence = time.Second
	// replayTries in a row without progress, then the replay is given up.
	replayTries = 3
	replayPause = 50 * time.Millisecond
	// checkSilence bounds a check of a stream that is believed whole: live
	// messages wait meanwhile.
	checkSilence = 300 * time.Millisecond
	// compareWithin bounds the time in which an engine must verify that it is
	// the one we knew. Later is too late: its old cache state is believed meanwhile.
	compareWithin = 800 * time.Millisecond
)

var (
	errNoReplay = errors.New("the engine has no replay socket")
	errSilent   = errors.New("no end of the replay")
	errHole     = errors.New("hole in the replay")
	errForeign  = errors.New("the newest known batch is not the engine's")
	errReply    = errors.New("reply without sequence or payload")
)

func bigEndian(frame []byte) uint64 { return binary.BigEndian.Uint64(frame) }

// reply reads one message of a replay. Releases differ in whether a topic
// comes first, so it is read from the end: payload, before it the sequence.
func reply(frames [][]byte) (sequence uint64, payload []byte, err error) {
	n := len(frames)
	if n < 2 || len(frames[n-2]) != 8 {
		return 0, nil, errReply
	}
	return bigEndian(frames[n-2]), frames[n-1], nil
}

// ask requests a replay from the given sequence. Each request has a connection
// of its own, so that late answers to an earlier one cannot be mixed in.
func (t *Tail) ask(ctx context.Context, from uint64) (*feed, error) {
	conn, err := zmtp.Dial(ctx, t.at.Load().replay, zmtp.Options{Type: zmtp.DEALER, MaxMessage: maxMessage, HandshakeTimeout: replaySilence})
	if err != nil {
		return nil, err
	}
	if err := conn.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		conn.Close()
		return nil, err
	}
	t.count(func(st *TailStats) { st.Replays++ })
	return newFeed(ctx, conn, nil), nil
}

// replay asks for everything from the given sequence on and hands it to take,
// until the end marker, or until take has an error.
func (t *Tail) replay(ctx context.Context, from uint64, silence time.Duration, take func(sequence uint64, payload []byte) error) error {
	f, err := t.ask(ctx, from)
	if err != nil {
		return err
	}
	defer f.close()
	timer := time.NewTimer(silence)
	defer timer.Stop()
	for {
		select {
		case m, ok := <-f.messages:
			if !ok {
				return f.err
			}
			sequence, payload, err := reply(m.Frames)
			if err == nil && sequence == endMarker {
				return nil
			}
			if err == nil {
				err = take(sequence, payload)
			}
			f.done(m)
			if err != nil {
				return err
			}
			timer.Reset(silence)
		case <-timer.C:
			return errSilent
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// compare asks the engine for the newest batch that we have from it, and says
// why it is another engine; empty: it is the same. What comes behind that
// batch is applied on the way.
func (t *Tail) compare(ctx context.Context) (why string) {
	if t.at.Load().replay == "" {
		return "connection lost, and without a replay socket a restart cannot be ruled out"
	}
	deadline := time.Now().Add(compareWithin)
	for refused := false; ; {
		verdict := "the engine has not reached the last known batch"
		first := true
		err := t.replay(ctx, t.last, time.Until(deadline), func(sequence uint64, payload []byte) error {
			if !first {
				return t.due(sequence, payload)
			}
			first = false
			switch {
			case sequence != t.last:
				verdict = "the engine does not keep the last known batch any more"
			case t.foreign(sequence, payload):
				verdict = fmt.Sprintf("batch %d is not the one that was known", sequence)
			default:
				verdict = ""
				t.confirm()
				return nil
			}
			return errHole
		})
		if !first || err == nil {
			return verdict
		}
		// An engine opens both sockets in one go, so once may be too early.
		if ctx.Err() != nil || refused && gone(err) || time.Until(deadline) < replayPause {
			return "the engine cannot be asked for the last known batch: " + err.Error()
		}
		refused = gone(err)
		sleep(ctx, replayPause)
	}
}

// due applies a replayed batch if it is the next one.
func (t *Tail) due(sequence uint64, payload []byte) error {
	switch {
	case sequence < t.want:
		return nil // asked for once more, or repeated by the engine
	case sequence > t.want:
		return errHole
	}
	t.apply(sequence, payload, true)
	return nil
}

// once asks for everything behind the newest known batch and applies it. The
// request begins with that batch: the answer counts only if it does so too, and
// with the same content, because the engine may have become another since.
//
// late says that the request before was answered from a later batch on: then
// what lies between is given up, now it only makes the answer too late.
func (t *Tail) once(ctx context.Context, silence time.Duration, late bool) (tooLate bool, err error) {
	from := t.want
	if t.any {
		from = t.last
	}
	began := false
	err = t.replay(ctx, from, silence, func(sequence uint64, payload []byte) error {
		if began {
			return t.due(sequence, payload)
		}
		switch {
		case sequence <= from && t.foreign(sequence, payload):
			return errForeign
		case sequence < from:
			return nil
		case sequence > from:
			if tooLate = true; !late {
				return errHole
			}
			t.lose(sequence)
		}
		began = true
		return t.due(sequence, payload)
	})
	if err == nil && !began && t.any {
		err = errForeign // it has not come that far
	}
	return tooLate, err
}

// catchUp replays until nothing more comes. head is the sequence of a live
// message that waits, 0 if there is none. A live stream that speaks again shows
// by itself what is missing.
//
// Replies lose messages in the middle or at the end, even before an end marker
// that arrives: only an answer without anything new says that there is no more.
// The first message of a reply cannot get lost, so when two replies in a row
// begin too late, the engine does not have the rest.
func (t *Tail) catchUp(ctx context.Context, head uint64, live *feed) error {
	if t.at.Load().replay == "" {
		return errNoReplay
	}
	late := false // the reply before began too late, or ended before head
	for tries := 0; ; {
		before := t.want
		tooLate, err := t.once(ctx, replaySilence, late)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errForeign):
			return err
		case head != 0 && t.want >= head:
			return nil
		case t.want != before:
			tries, late = 0, false
			if head == 0 && err == nil && len(live.messages) > 0 {
				return nil
			}
			continue
		case err == nil && !tooLate && (head == 0 || late):
			return nil
		}
		late = tooLate || err == nil
		if tries++; tries >= replayTries {
			return err
		}
		sleep(ctx, replayPause)
	}
}
