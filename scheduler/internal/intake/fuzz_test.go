package intake

import (
	"encoding/json"
	"errors"
	"testing"
)

// FuzzBody: whatever a body holds, the answer is a prompt, a reason or an
// error, and what goes to an engine is valid JSON.
func FuzzBody(f *testing.F) {
	for _, s := range []string{
		`{"model":"m","messages":` + chatMessages + `,"tools":[],"reasoning_effort":"low","chat_template_kwargs":{"a":1}}`,
		`{"prompt":[[1,2],[3]],"cache_salt":"s"}`, `{"prompt":["a\"]}","b"]}`, `{"prompt": [ 1 , 22 ] }`, `{"prompt":"x"}`,
		`{"messages":[{"content":[{"type":"image_url"},"x"]}]}`, `{"a":{"b":[{}]},"prompt":[],"prompt":["x"]}`, `{}`, `[]`, `nul`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		b, err := parseBody(raw)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("error of no class: %v", err)
			}
			return
		}
		if b.why != "" {
			return
		}
		if b.ids != nil {
			if len(b.ids)%4 != 0 {
				t.Errorf("%d bytes of ids", len(b.ids))
			}
			return
		}
		d := b.document("m")
		if !json.Valid(d.render) || d.tokenize != nil && !json.Valid(d.tokenize) {
			t.Errorf("broken documents %q, %q", d.render, d.tokenize)
		}
	})
}

// FuzzAnswer: whatever an engine answers, there is an error or a prompt whose
// items lie inside it.
func FuzzAnswer(f *testing.F) {
	for _, s := range []string{
		generate, `[` + generate + `]`, `[[{"role":"x"}],[{"prompt_token_ids":[1]}]]`, `{"tokens":[1,2],"count":2}`, `[]`, `[[],[]]`, `null`,
		`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["h"]},"mm_placeholders":{"image":[{"offset":0,"length":2}]}}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		for _, parse := range []func([]byte) (*rendered, error){parseRender, parseTokenize} {
			r, err := parse(answer)
			if err != nil {
				continue
			}
			if len(r.tokens)%4 != 0 {
				t.Errorf("%d bytes of ids", len(r.tokens))
			}
			for _, it := range r.items {
				if it.ID == "" || it.Offset < 0 || it.Length <= 0 || it.Offset+it.Length > len(r.tokens)/4 {
					t.Errorf("item %+v in %d tokens", it, len(r.tokens)/4)
				}
			}
		}
	})
}
