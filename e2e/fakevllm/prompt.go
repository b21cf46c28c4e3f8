package fakevllm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
)

// prompts is the "prompt" of a completion: a text, token ids, or a list of
// either.
type prompts [][]uint32

// UnmarshalJSON tells the four forms apart by how they begin.
func (p *prompts) UnmarshalJSON(b []byte) error {
	b = bytes.TrimSpace(b)
	if len(b) == 0 || b[0] != '[' {
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return errors.New("prompt is neither text nor token ids")
		}
		*p = prompts{appendText(nil, s)}
		return nil
	}
	first := bytes.TrimSpace(b[1:])
	switch {
	case len(first) > 0 && first[0] == '"':
		var list []string
		if err := json.Unmarshal(b, &list); err != nil {
			return err
		}
		for _, s := range list {
			*p = append(*p, appendText(nil, s))
		}
		return nil
	case len(first) > 0 && first[0] == '[':
		var list []json.RawMessage
		if err := json.Unmarshal(b, &list); err != nil {
			return err
		}
		for _, raw := range list {
			ids, err := parseIDs(raw)
			if err != nil {
				return err
			}
			*p = append(*p, ids)
		}
		return nil
	}
	ids, err := parseIDs(b)
	*p = prompts{ids}
	return err
}

// parseIDs reads a JSON array of token ids, known to be well-formed JSON. Long
// prompts spend most of their time here, hence not encoding/json.
func parseIDs(b []byte) ([]uint32, error) {
	if len(b) < 2 || b[0] != '[' {
		return nil, errors.New("prompt is not an array of token ids")
	}
	ids := make([]uint32, 0, len(b)/6+1)
	value, digits := uint64(0), 0
	for _, c := range b[1:] {
		switch {
		case c >= '0' && c <= '9':
			value = value*10 + uint64(c-'0')
			if digits++; value > math.MaxUint32 {
				return nil, errors.New("token id is too large")
			}
		case c == ',' || c == ']':
			if digits > 0 {
				ids = append(ids, uint32(value))
			}
			value, digits = 0, 0
		case c == ' ' || c == '\n' || c == '\t' || c == '\r':
		default:
			return nil, fmt.Errorf("token id with %q in it", c)
		}
	}
	return ids, nil
}

// chatMessages is the "messages" of a chat. Content is a text or a list of
// text parts.
type chatMessages []message

// UnmarshalJSON joins the parts.
func (m *chatMessages) UnmarshalJSON(b []byte) error {
	var list []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return fmt.Errorf("messages: %w", err)
	}
	for _, in := range list {
		out := message{role: in.Role}
		switch {
		case len(in.Content) == 0 || bytes.Equal(in.Content, []byte("null")):
		case in.Content[0] == '"':
			if err := json.Unmarshal(in.Content, &out.content); err != nil {
				return err
			}
		default:
			var parts []struct {
				Type, Text string
			}
			if err := json.Unmarshal(in.Content, &parts); err != nil {
				return fmt.Errorf("content: %w", err)
			}
			for _, part := range parts {
				if part.Type != "text" {
					return fmt.Errorf("content part %q: the model takes text only", part.Type)
				}
				out.content += part.Text
			}
		}
		*m = append(*m, out)
	}
	return nil
}
