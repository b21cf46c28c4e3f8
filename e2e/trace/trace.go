// Package trace reads request traces in the format of the Mooncake release and
// turns their requests into prompts: one JSON object a line with a timestamp in
// ms, the lengths of input and output, and one id for each 512 tokens of input.
// Equal ids mean equal prefixes up to there.
package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	_ "embed" // the slice of the conversation trace
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"
)

// IDTokens is how many tokens of a prompt one id stands for.
const IDTokens = 512

// ConversationTick is the resolution of the conversation trace's timestamps.
const ConversationTick = 3 * time.Second

// ConversationSpan is how much of the conversation trace is at hand.
const ConversationSpan = 1200 * time.Second

// Request is one request of a trace.
type Request struct {
	At            time.Duration // since the start
	Input, Output int           // tokens
	IDs           []uint32      // the last may stand for fewer than IDTokens
}

//go:embed testdata/conversation-1200s.jsonl.gz
var conversation []byte

// Conversation is the first ConversationSpan of the Mooncake conversation trace.
func Conversation() ([]Request, error) {
	z, err := gzip.NewReader(bytes.NewReader(conversation))
	if err != nil {
		return nil, fmt.Errorf("conversation trace: %w", err)
	}
	list, err := Read(z)
	if err != nil {
		return nil, fmt.Errorf("conversation trace: %w", err)
	}
	return list, nil
}

// Read reads a whole trace. Requests must be in order of time.
func Read(r io.Reader) ([]Request, error) {
	var list []Request
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		var in struct {
			Timestamp float64  `json:"timestamp"`
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			IDs       []uint32 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &in); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		q := Request{At: time.Duration(in.Timestamp * float64(time.Millisecond)), Input: in.Input, Output: in.Output, IDs: in.IDs}
		if q.Input < 1 || q.Output < 1 || len(q.IDs) != (q.Input+IDTokens-1)/IDTokens {
			return nil, fmt.Errorf("line %d: %d ids for %d tokens, %d to generate", n, len(q.IDs), q.Input, q.Output)
		}
		if len(list) > 0 && q.At < list[len(list)-1].At {
			return nil, fmt.Errorf("line %d: earlier than the line before", n)
		}
		list = append(list, q)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return list, nil
}

// Spread moves each request to a random moment within its tick. Timestamps
// that were rounded to ticks would else come as bursts that never were.
func Spread(list []Request, tick time.Duration, rng *rand.Rand) {
	for i := range list {
		list[i].At = list[i].At.Truncate(tick) + time.Duration(rng.Int64N(int64(tick)))
	}
	slices.SortStableFunc(list, func(a, b Request) int { return int(a.At - b.At) })
}

// firstToken and tokenKinds bound the ids that prompts are made of: above what
// byte-level vocabularies use for bytes, within what two bytes can hold.
const (
	firstToken = 1000
	tokenKinds = 30000
)

// AppendTokens appends the request's prompt: tokens that follow from the ids
// alone, cut to the request's length.
func (q Request) AppendTokens(dst []uint32) []uint32 {
	for i, id := range q.IDs {
		x := uint64(id)*0x9e3779b97f4a7c15 + 0x632be59bd9b4e019
		for range min(IDTokens, q.Input-i*IDTokens) {
			x ^= x >> 12
			x ^= x << 25
			x ^= x >> 27
			dst = append(dst, firstToken+uint32((x*0x2545f4914f6cdd1d)>>33)%tokenKinds)
		}
	}
	return dst
}

// Ceiling is the share of the prompt tokens that one cache without bounds
// could hit: leading ids seen before, and never the last token.
func Ceiling(list []Request) float64 {
	seen := make(map[uint32]bool)
	hit, total := 0, 0
	for _, q := range list {
		n := 0
		for n < len(q.IDs) && seen[q.IDs[n]] {
			n++
		}
		hit += min(n*IDTokens, q.Input-1)
		total += q.Input
		for _, id := range q.IDs[n:] {
			seen[id] = true
		}
	}
	if total == 0 {
		return 0
	}
	return float64(hit) / float64(total)
}
