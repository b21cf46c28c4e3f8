// Package recording reads recordings of real engines: every event message as
// it was received, every request as it was sent, and the engine's own count of
// cached tokens in its answer. One JSON object a line, plain or gzip.
package recording

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// maxLine bounds one line: a prompt of a million tokens fits.
const maxLine = 64 << 20

// Recording is one engine's run.
type Recording struct {
	Meta  Meta
	Steps []Step
}

// Meta says what engine was recorded.
type Meta struct {
	Version    string            `json:"version"`
	Options    string            `json:"options"`
	Args       string            `json:"args"`
	BlockSize  int               `json:"block_size"`
	Blocks     int               `json:"blocks"`
	Algorithm  string            `json:"algo"`
	Seed       *string           `json:"seed"` // nil: random
	LoraPaths  map[string]string `json:"lora_paths"`
	ServedName string            `json:"-"` // as the recorded metrics name it
	Rule       Rule              `json:"rule"`
}

// Rule is what the recorded engine's configuration says of its hits.
type Rule struct {
	Drops []int `json:"eagle"` // groups that drop the last block of a hit
	Chunk int   `json:"chunk"` // of chunked-local attention, in tokens
	Unit  int   `json:"U"`     // of the hashes, in tokens; 0: it follows from the groups
}

// Step is one thing that happened, At seconds after the recording began.
// Exactly one of the pointers is set.
type Step struct {
	At      float64
	Batch   *Batch
	Send    *Send
	Done    *Done
	Action  string
	Result  string // the action that took effect
	Aborted bool
	Metrics string
}

// Batch is one event message of one data-parallel rank.
type Batch struct {
	Rank     int
	Topic    []byte
	Sequence uint64
	Payload  []byte
}

// Send is a request as it was sent.
type Send struct {
	Number    int // of the request; 0 when it is to be aborted
	Tokens    []uint32
	MaxTokens int
	Adapter   string // model named by the request when it is not the base model
	Salt      string
	Rank      *int // where it was steered to
	// SkipsCache: the engine was asked for the logprobs of the prompt.
	SkipsCache bool
}

// Done is the engine's answer.
type Done struct {
	Number       int
	PromptTokens int
	CachedTokens int
}

// line has every key that a line may have.
type line struct {
	T            float64         `json:"t"`
	Meta         *Meta           `json:"meta"`
	Rank         int             `json:"rank"`
	Frames       []string        `json:"frames"`
	Send         int             `json:"send"`
	Tokens       []uint32        `json:"tokens"`
	MaxTokens    int             `json:"max_tokens"`
	Model        string          `json:"model"`
	CacheSalt    string          `json:"cache_salt"`
	ToRank       *int            `json:"to_rank"`
	Logprobs     json.RawMessage `json:"prompt_logprobs"`
	Done         int             `json:"done"`
	PromptTokens int             `json:"prompt_tokens"`
	CachedTokens *int            `json:"cached_tokens"`
	Action       string          `json:"action"`
	ActionResult json.RawMessage `json:"action_result"`
	SendAbort    json.RawMessage `json:"send_abort"`
	Aborted      json.RawMessage `json:"aborted"`
	Metrics      string          `json:"metrics"`
}

// Open reads the recording in a file, plain or gzip.
func Open(path string) (*Recording, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var reader io.Reader = bytes.NewReader(data)
	if bytes.HasPrefix(data, []byte{0x1f, 0x8b}) {
		if reader, err = gzip.NewReader(reader); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	r, err := Read(reader)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

// Read reads a recording.
func Read(reader io.Reader) (*Recording, error) {
	r := &Recording{}
	scanner := bufio.NewScanner(reader)
	scanner.Buffer(make([]byte, 1<<20), maxLine)
	for number := 1; scanner.Scan(); number++ {
		if len(bytes.TrimSpace(scanner.Bytes())) == 0 {
			continue
		}
		var l line
		if err := json.Unmarshal(scanner.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if l.Meta != nil {
			r.Meta = *l.Meta
			continue
		}
		step, ok, err := l.step()
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if ok {
			r.Steps = append(r.Steps, step)
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, err
	}
	if r.Meta.BlockSize < 1 {
		return nil, fmt.Errorf("no line has meta with a block_size: not a recording")
	}
	r.Meta.ServedName = r.servedName()
	return r, nil
}

func (l *line) step() (Step, bool, error) {
	s := Step{At: l.T}
	switch {
	case l.Frames != nil:
		batch, err := l.batch()
		if err != nil {
			return s, false, err
		}
		s.Batch = batch
	case l.Send > 0 || present(l.SendAbort):
		s.Send = &Send{Number: l.Send, Tokens: l.Tokens, MaxTokens: l.MaxTokens, Adapter: l.Model, Salt: l.CacheSalt, Rank: l.ToRank, SkipsCache: present(l.Logprobs)}
	case l.Done > 0:
		s.Done = &Done{Number: l.Done, PromptTokens: l.PromptTokens}
		if l.CachedTokens != nil {
			s.Done.CachedTokens = *l.CachedTokens
		}
	case l.Action != "":
		s.Action = l.Action
	case present(l.ActionResult):
		if json.Unmarshal(l.ActionResult, &s.Result) != nil {
			s.Result = string(l.ActionResult)
		}
	case present(l.Aborted):
		s.Aborted = true
	case l.Metrics != "":
		s.Metrics = l.Metrics
	default:
		return s, false, nil
	}
	return s, true, nil
}

func present(raw json.RawMessage) bool {
	return len(raw) > 0 && string(raw) != "null" && string(raw) != "false"
}

func (l *line) batch() (*Batch, error) {
	if len(l.Frames) != 3 {
		return nil, fmt.Errorf("an event message has %d frames, want topic, sequence and payload", len(l.Frames))
	}
	var frames [3][]byte
	for i, text := range l.Frames {
		frame, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			return nil, fmt.Errorf("frame %d: %w", i, err)
		}
		frames[i] = frame
	}
	if len(frames[1]) != 8 {
		return nil, fmt.Errorf("the sequence has %d bytes, want 8", len(frames[1]))
	}
	return &Batch{Rank: l.Rank, Topic: frames[0], Sequence: binary.BigEndian.Uint64(frames[1]), Payload: frames[2]}, nil
}

// Ranks is the number of data-parallel ranks that were heard, at least 1.
func (r *Recording) Ranks() int {
	ranks := 1
	for _, s := range r.Steps {
		if s.Batch != nil {
			ranks = max(ranks, s.Batch.Rank+1)
		}
		if s.Send != nil && s.Send.Rank != nil {
			ranks = max(ranks, *s.Send.Rank+1)
		}
	}
	return ranks
}

// servedName finds the base model's name in the recorded metrics.
func (r *Recording) servedName() string {
	const label = `model_name="`
	for _, s := range r.Steps {
		if _, rest, found := strings.Cut(s.Metrics, label); found {
			name, _, _ := strings.Cut(rest, `"`)
			return name
		}
	}
	return "model"
}
