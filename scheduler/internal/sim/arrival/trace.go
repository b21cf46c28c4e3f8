package arrival

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"
)

// maxLine bounds a line of a trace: a prompt of a million tokens in ids of 16
// fits.
const maxLine = 4 << 20

// record is one request as a trace tells it. Times count from the first.
type record struct {
	at            time.Duration
	input, output int
	ids           []uint64 // chained or not; the prompt's content, idTokens each
	session       string
}

// Trace reads a whole trace and recognises its format from its content, which
// may be gzipped:
//
//   - JSON lines with timestamp, input_length, output_length and hash_ids, as
//     Mooncake (ms, ids of 512 tokens) and, with chat_id and parent_chat_id,
//     Qwen-Bailian (s, ids of 16 tokens) publish them. How many tokens an id
//     stands for follows from the lengths. Ids are chained, so they may name
//     whole prefixes or single blocks. What the last id covers in part is
//     never shared.
//   - CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens, as Azure
//     publishes it: no prompt shares anything with another.
//
// Timestamps that many requests share are ticks: the seed spreads their
// requests evenly over the tick. The name is for errors.
func Trace(r io.Reader, name string, o Options) (Workload, error) {
	if err := o.check(); err != nil {
		return Workload{}, err
	}
	in, err := plain(r)
	if err != nil {
		return Workload{}, fmt.Errorf("%s: %w", name, err)
	}
	lines := &lines{scan: bufio.NewScanner(in)}
	lines.scan.Buffer(nil, maxLine)
	var list []record
	idTokens := 0
	if first := lines.next(); first == nil {
		err = cmp.Or(lines.err(), errors.New("no request in it: "+formats))
	} else if first[0] == '{' {
		list, idTokens, err = readHashIDs(first, lines)
	} else {
		list, err = readAzure(first, lines)
	}
	if err != nil {
		return Workload{}, fmt.Errorf("%s: %w", name, err)
	}
	return traced(name, list, idTokens, o), nil
}

const formats = "want JSON lines with timestamp, input_length, output_length, hash_ids, or CSV with the header " + azureHeader

// plain looks through gzip.
func plain(r io.Reader) (io.Reader, error) {
	b := bufio.NewReader(r)
	if magic, _ := b.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		return gzip.NewReader(b)
	}
	return b, nil // an error of reading comes again
}

// lines gives the lines that are not blank, and counts all.
type lines struct {
	scan *bufio.Scanner
	n    int
}

func (l *lines) next() []byte {
	for l.scan.Scan() {
		l.n++
		line := bytes.TrimSpace(l.scan.Bytes())
		if l.n == 1 {
			line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
		}
		if len(line) > 0 {
			return line
		}
	}
	return nil
}

func (l *lines) errorf(format string, args ...any) error {
	return fmt.Errorf("line %d: %w", l.n, fmt.Errorf(format, args...))
}

// err says why next gave nothing.
func (l *lines) err() error {
	err := l.scan.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		return fmt.Errorf("line %d: longer than %d bytes", l.n+1, maxLine)
	}
	if err != nil {
		return fmt.Errorf("line %d: %w", l.n+1, err)
	}
	return nil
}

// lengths checks what a line says. A request that generated nothing is taken
// as one that generated one token.
func (l *lines) lengths(input, output int) (int, int, error) {
	if input < 1 || input > maxTokens || output < 0 || output > maxTokens {
		return 0, 0, l.errorf("%d tokens of input and %d of output: want 1 to %d and 0 to %[3]d", input, output, maxTokens)
	}
	return input, max(1, output), nil
}

// traced makes a workload of records, whatever their order.
func traced(name string, list []record, idTokens int, o Options) Workload {
	slices.SortStableFunc(list, func(a, b record) int { return cmp.Compare(a.at, b.at) })
	first := list[0].at
	for i := range list {
		list[i].at -= first
	}
	tick := tickOf(list)
	speed := o.Speed
	if speed == 0 {
		speed = 1
	}
	return Workload{Name: name, play: func(seed uint64) Source {
		at := spread(list, tick, seed)
		plan := make([]planned, len(list))
		for i, q := range list {
			plan[i] = planned{at: time.Duration(float64(at[i]) / speed), length: q.input, output: q.output, session: q.session,
				spans: func(dst []span) []span { return q.spans(dst, i, idTokens) }}
		}
		if o.First > 0 {
			plan = slices.DeleteFunc(plan, func(q planned) bool { return q.at >= o.First })
		}
		return newSchedule(o.BlockSize, plan)
	}}
}

// spans are the ids that are covered whole, then the rest, which is private.
func (q record) spans(dst []span, n, idTokens int) []span {
	rest := q.input
	for _, id := range q.ids {
		if rest < idTokens {
			break
		}
		dst = append(dst, span{id: id, tokens: idTokens})
		rest -= idTokens
	}
	return append(dst, span{id: private(n), tokens: rest})
}

// tickOf gives the resolution of the timestamps, or zero where requests do not
// crowd on few of them. Ticks that nobody uses leave longer gaps, and rounding
// a few shorter ones: the tick is the gap that one in twenty stays below.
func tickOf(list []record) time.Duration {
	var gaps []time.Duration
	for i := 1; i < len(list); i++ {
		if gap := list[i].at - list[i-1].at; gap > 0 {
			gaps = append(gaps, gap)
		}
	}
	if len(gaps) == 0 || len(list) < 2*(len(gaps)+1) {
		return 0
	}
	slices.Sort(gaps)
	return gaps[len(gaps)/20]
}

// spread gives each record's time. Those of one tick fall evenly at random
// between it and the next, so that no request leaves its tick.
func spread(list []record, tick time.Duration, seed uint64) []time.Duration {
	rng := rand.New(rand.NewPCG(seed, 0x7469636b))
	at := make([]time.Duration, len(list))
	for i := 0; i < len(list); {
		end := i + 1
		for end < len(list) && list[end].at == list[i].at {
			end++
		}
		width := tick
		if end < len(list) {
			width = min(width, list[end].at-list[i].at)
		}
		for ; i < end; i++ {
			at[i] = list[i].at
			if width > 0 {
				at[i] += time.Duration(rng.Int64N(int64(width)))
			}
		}
	}
	return at
}
