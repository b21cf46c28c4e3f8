package intake

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

var errAnswer = errors.New("the answer has not the form of any known engine")

// ids decodes a list of token ids straight into bytes.
type ids []byte

func (t *ids) UnmarshalJSON(value []byte) (err error) {
	if isNull(value) {
		return nil
	}
	*t, err = tokenIDs(value)
	return err
}

// generateRequest is the render endpoints' answer for one prompt. Before
// vLLM 0.20 it was the engine's own prompt type, with other names and the
// multimodal features on the top level.
type generateRequest struct {
	TokenIDs       ids `json:"token_ids"`
	PromptTokenIDs ids `json:"prompt_token_ids"`
	features
	Features  *features `json:"features"`
	CacheSalt string    `json:"cache_salt"`
}

type features struct {
	Hashes       map[string][]string      `json:"mm_hashes"`
	Placeholders map[string][]placeholder `json:"mm_placeholders"`
}

type placeholder struct {
	Offset int `json:"offset"`
	Length int `json:"length"`
}

// parseRender reads what a render endpoint answers:
//
//	{"token_ids": ...}                          chat
//	[{"token_ids": ...}, ...]                   completion, one per prompt
//	[messages, [{"prompt_token_ids": ...}]]     chat up to vLLM 0.16
//
// Of several prompts it returns the first.
func parseRender(answer []byte) (*rendered, error) {
	if !json.Valid(answer) {
		return nil, errAnswer
	}
	if first(answer) == '[' {
		answer = firstPrompt(answer)
	}
	if first(answer) != '{' {
		return nil, errAnswer
	}
	var g generateRequest
	if err := json.Unmarshal(answer, &g); err != nil {
		return nil, errAnswer // its text may quote the prompt
	}
	r := &rendered{tokens: g.TokenIDs, salt: g.CacheSalt}
	if r.tokens == nil {
		r.tokens = g.PromptTokenIDs
	}
	if r.tokens == nil {
		return nil, errAnswer
	}
	f := &g.features
	if g.Features != nil {
		f = g.Features
	}
	var err error
	if r.items, err = f.items(len(r.tokens) / 4); err != nil {
		return nil, err
	}
	r.tokens = slices.Clip(r.tokens)
	return r, nil
}

// firstPrompt finds the first prompt's object in an array.
func firstPrompt(answer []byte) []byte {
	var all [2][]byte
	n := 0
	elements(answer, func(v span) bool {
		all[n] = v.of(answer)
		n++
		return n < len(all)
	})
	if n == 2 && first(all[0]) == '[' && first(all[1]) == '[' {
		var prompt []byte
		elements(all[1], func(v span) bool {
			prompt = v.of(all[1])
			return false
		})
		return prompt
	}
	return all[0]
}

func (f *features) items(length int) ([]blockkey.Item, error) {
	var items []blockkey.Item
	for kind, places := range f.Placeholders {
		hashes := f.Hashes[kind]
		if len(hashes) != len(places) {
			return nil, fmt.Errorf("the answer has %d hashes for %d items", len(hashes), len(places))
		}
		for i, p := range places {
			items = append(items, blockkey.Item{ID: hashes[i], Offset: p.Offset, Length: p.Length})
		}
	}
	for kind, hashes := range f.Hashes {
		if len(hashes) != len(f.Placeholders[kind]) {
			return nil, fmt.Errorf("the answer has %d hashes for %d items", len(hashes), len(f.Placeholders[kind]))
		}
	}
	slices.SortFunc(items, func(a, b blockkey.Item) int {
		if a.Offset != b.Offset {
			return a.Offset - b.Offset
		}
		return strings.Compare(a.ID, b.ID)
	})
	end := 0
	for _, it := range items {
		if it.ID == "" || it.Length <= 0 || it.Offset < end || it.Offset > length-it.Length {
			return nil, errors.New("the answer's items do not fit its tokens")
		}
		end = it.Offset + it.Length
	}
	return items, nil
}

// parseTokenize reads what /tokenize answers.
func parseTokenize(answer []byte) (*rendered, error) {
	var t struct {
		Tokens ids `json:"tokens"`
	}
	if json.Unmarshal(answer, &t) != nil || t.Tokens == nil {
		return nil, errAnswer
	}
	return &rendered{tokens: slices.Clip(t.Tokens)}, nil
}
