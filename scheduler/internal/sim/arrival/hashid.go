package arrival

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// hashIDs is a line of a trace in ids. Fields that no reader of ours needs
// are skipped.
type hashIDs struct {
	Timestamp *float64        `json:"timestamp"`
	Input     *int            `json:"input_length"`
	Output    *int            `json:"output_length"`
	IDs       idList          `json:"hash_ids"`
	Chat      json.RawMessage `json:"chat_id"`
	Parent    json.RawMessage `json:"parent_chat_id"`
}

// idList is an array of integers; made by hand because it is nearly all of a
// line.
type idList []uint64

func (l *idList) UnmarshalJSON(text []byte) error {
	text = bytes.TrimSpace(text)
	if len(text) < 2 || text[0] != '[' {
		return fmt.Errorf("hash_ids is %.20s: want a list of integers", text)
	}
	*l = make(idList, 0, bytes.Count(text, []byte{','})+1)
	for piece := range bytes.SplitSeq(text[1:len(text)-1], []byte{','}) {
		piece = bytes.TrimSpace(piece)
		if len(piece) == 0 {
			continue // of an empty list: others are not JSON
		}
		id, err := strconv.ParseUint(string(piece), 10, 64)
		if err != nil {
			signed, err := strconv.ParseInt(string(piece), 10, 64)
			if err != nil {
				return fmt.Errorf("hash_ids holds %.20s: want integers of 64 bits", piece)
			}
			id = uint64(signed)
		}
		*l = append(*l, id)
	}
	return nil
}

// readHashIDs reads a trace in ids and says how many tokens an id stands for:
// of the sizes in use, the first that fits every line.
func readHashIDs(first []byte, in *lines) ([]record, int, error) {
	var list []record
	sizes, unit := []int{512, 16, 32, 64, 128, 256, 1024}, time.Millisecond
	sessions := make(map[string]string)
	for line := first; line != nil; line = in.next() {
		var q hashIDs
		if err := json.Unmarshal(line, &q); err != nil {
			return nil, 0, in.errorf("%w: %s", err, formats)
		}
		if q.Timestamp == nil || q.Input == nil || q.Output == nil || q.IDs == nil {
			return nil, 0, in.errorf("timestamp, input_length, output_length or hash_ids is missing: %s", formats)
		}
		input, output, err := in.lengths(*q.Input, *q.Output)
		if err != nil {
			return nil, 0, err
		}
		if len(list) == 0 && len(q.Chat) > 0 {
			unit = time.Second
			sizes[0], sizes[1] = sizes[1], sizes[0]
		}
		if at := *q.Timestamp * float64(unit); math.Abs(at) > math.MaxInt64/2 {
			return nil, 0, in.errorf("timestamp %v: out of range", *q.Timestamp)
		}
		sizes = slices.DeleteFunc(sizes, func(size int) bool {
			return len(q.IDs) != input/size && len(q.IDs) != (input+size-1)/size
		})
		if len(sizes) == 0 {
			return nil, 0, in.errorf("%d ids for %d tokens: no number of tokens an id that is in use fits this and the lines before", len(q.IDs), input)
		}
		r := record{at: time.Duration(*q.Timestamp * float64(unit)), input: input, output: output, ids: q.IDs}
		if len(q.Chat) > 0 {
			chat := string(q.Chat)
			if r.session = sessions[string(q.Parent)]; r.session == "" {
				r.session = chat
			}
			sessions[chat] = r.session
		}
		list = append(list, r)
	}
	return list, sizes[0], in.err()
}
