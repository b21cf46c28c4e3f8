package intake

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
)

// body is what an OpenAI request body says that matters here.
type body struct {
	raw         []byte
	model, salt string
	fields      map[string]span // the fields that are wanted, null ones left out
	ids         []byte          // the prompt, where it was given as token ids
	note        string
	why         string // why there can be no tokens
}

// wanted are the fields of a body that are looked at; all others only pass on
// to an engine that renders the body as it is.
var wanted = []string{
	"model", "cache_salt", "messages", "prompt", "prompt_embeds", "truncate_prompt_tokens",
	"add_special_tokens", "documents", "reasoning_effort", "chat_template_kwargs",
	"add_generation_prompt", "continue_final_message", "chat_template", "mm_processor_kwargs", "tools",
	"prompt_logprobs", "echo", "logprobs",
}

// passed are the fields of a chat body that /tokenize takes under the same name.
var passed = []string{
	"add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template", "mm_processor_kwargs", "tools",
}

// templated are the fields of a chat body that reach the template as
// chat_template_kwargs, and /tokenize takes only there.
var templated = []string{"documents", "reasoning_effort"}

func parseBody(raw []byte) (*body, error) {
	if !json.Valid(raw) {
		return nil, fmt.Errorf("openai body: not valid JSON: %w", ErrInvalid)
	}
	b := &body{raw: raw}
	if !b.scan() {
		return nil, fmt.Errorf("openai body: not a JSON object: %w", ErrInvalid)
	}
	for name, to := range map[string]*string{"model": &b.model, "cache_salt": &b.salt} {
		if v := b.field(name); v != nil {
			if first(v) != '"' {
				return nil, fmt.Errorf("openai body: %s is not a string: %w", name, ErrInvalid)
			}
			*to = text(v)
		}
	}
	messages, prompt := b.field("messages"), b.field("prompt")
	switch {
	case messages != nil && prompt != nil:
		return nil, fmt.Errorf("openai body: both messages and prompt: %w", ErrInvalid)
	case b.field("prompt_embeds") != nil:
		b.why = "a prompt of embeddings has no tokens"
	case messages != nil:
		if first(messages) != '[' {
			return nil, fmt.Errorf("openai body: messages is not a list: %w", ErrInvalid)
		}
	case prompt != nil:
		if err := b.parsePrompt(prompt); err != nil {
			return nil, fmt.Errorf("openai body: %w", err)
		}
	default:
		b.why = "the body has neither messages nor prompt"
	}
	return b, nil
}

// skipsCache says whether the engine computes the whole prompt whatever it holds:
// it has no logits of what is cached. A completion that echoes its prompt with
// logprobs asks for those of the prompt; a chat that echoes does always, because
// its number of logprobs is 0 where none is given, which is not none.
func (b *body) skipsCache() bool {
	echo := b.field("echo")
	echoes := echo != nil && string(echo) != "false"
	return b.field("prompt_logprobs") != nil || echoes && (b.field("messages") != nil || b.field("logprobs") != nil)
}

func (b *body) scan() bool {
	b.fields = make(map[string]span)
	return members(b.raw, func(name string, v span) {
		if !slices.Contains(wanted, name) {
			return
		}
		// As in Python, the last of equal names counts.
		if delete(b.fields, name); !isNull(v.of(b.raw)) {
			b.fields[name] = v
		}
	})
}

// field returns a wanted field's value, nil when it is absent or null.
func (b *body) field(name string) []byte {
	v, ok := b.fields[name]
	if !ok {
		return nil
	}
	return v.of(b.raw)
}

// parsePrompt sorts out the four forms of a completion's prompt. Of several
// prompts the first one stands for all.
func (b *body) parsePrompt(prompt []byte) error {
	switch first(prompt) {
	case '"':
	case '[':
		var at span
		count := 0
		elements(prompt, func(v span) bool {
			if count++; count == 1 {
				at = v
			}
			c := prompt[v.from]
			return c == '"' || c == '[' // a list of ids is one prompt
		})
		if count == 0 {
			return fmt.Errorf("the prompt is empty: %w", ErrInvalid)
		}
		if c := prompt[at.from]; c == '"' || c == '[' {
			if count > 1 {
				b.note = fmt.Sprintf("ranked by the first of %d prompts", count)
			}
			b.replace("prompt", slices.Clone(at.of(prompt)))
		}
	default:
		return fmt.Errorf("prompt is neither text nor a list: %w", ErrInvalid)
	}
	prompt = b.field("prompt")
	if string(prompt) == `""` || first(prompt) == '[' && prompt[space(prompt, 1)] == ']' {
		return fmt.Errorf("the prompt is empty: %w", ErrInvalid)
	}
	if first(prompt) == '[' && b.field("truncate_prompt_tokens") == nil {
		ids, err := tokenIDs(prompt)
		if err != nil {
			return fmt.Errorf("prompt is %w: %w", err, ErrInvalid)
		}
		b.ids = ids
	}
	return nil
}

// maxBeginning bytes hold 1,000 characters however they are written.
const maxBeginning = 12 << 10

// beginning is that of the messages as they stand there, or of the prompt if it
// is text.
func (b *body) beginning() string {
	if m := b.field("messages"); m != nil {
		return string(m[:min(len(m), maxBeginning)])
	}
	p := b.field("prompt")
	if len(p) == 0 || p[0] != '"' {
		return ""
	}
	if len(p) <= maxBeginning {
		return text(p)
	}
	at := 1
	for at < maxBeginning {
		switch {
		case p[at] != '\\':
			at++
		case p[at+1] == 'u':
			at += 6
		default:
			at += 2
		}
	}
	return text(append(p[:at:at], '"'))
}

// replace gives a field of the body another value.
func (b *body) replace(name string, value []byte) {
	at := b.fields[name]
	b.raw = slices.Concat(b.raw[:at.from], value, b.raw[at.to:])
	b.scan()
}

// document is a request to engines for tokens.
type document struct {
	chat bool
	// render is the body for the render endpoint, tokenize the one for
	// /tokenize; nil where /tokenize would not give the right tokens.
	render, tokenize []byte
}

// digest names the document for a model; the lengths keep the parts apart.
func (d document) digest(model string) digest {
	h := sha256.New()
	fmt.Fprintf(h, "%t %d %d ", d.chat, len(model), len(d.render))
	h.Write([]byte(model))
	h.Write(d.render)
	return digest(h.Sum(nil))
}

// document says how to ask for the body's tokens. The body's own model goes
// to the engine; where it has none, the request's.
func (b *body) document(model string) document {
	d := document{chat: b.field("messages") != nil, render: b.raw}
	if b.model == "" && model != "" {
		o := object{}
		o.add("model", quote(model))
		d.render = o.wrap(b.raw)
	} else {
		model = b.model
	}
	// Only a render cuts a prompt as the engine would, and only a render knows
	// how long an image is in tokens.
	if b.field("truncate_prompt_tokens") != nil || d.chat && multimodal(b.field("messages")) {
		return d
	}
	o := object{}
	if model != "" {
		o.add("model", quote(model))
	}
	if !d.chat {
		o.add("prompt", b.field("prompt"))
		o.add("add_special_tokens", b.field("add_special_tokens"))
		d.tokenize = o.close()
		return d
	}
	o.add("messages", b.field("messages"))
	for _, name := range passed {
		o.add(name, b.field(name))
	}
	kwargs := object{}
	for _, name := range templated {
		kwargs.add(name, b.field(name))
	}
	given := b.field("chat_template_kwargs")
	switch {
	case given == nil && len(kwargs.raw) > 0:
		given = kwargs.close()
	case first(given) == '{' && len(kwargs.raw) > 0:
		given = kwargs.follow(given)
	}
	o.add("chat_template_kwargs", given)
	d.tokenize = o.close()
	return d
}

// object writes a JSON object.
type object struct{ raw []byte }

// add appends a member; a nil value is left out.
func (o *object) add(name string, value []byte) {
	if value == nil {
		return
	}
	if len(o.raw) > 0 {
		o.raw = append(o.raw, ',')
	}
	o.raw = append(append(append(o.raw, quote(name)...), ':'), value...)
}

// close returns the object, and leaves it open for more.
func (o *object) close() []byte { return slices.Concat([]byte("{"), o.raw, []byte("}")) }

// wrap returns the object with the members of another one behind its own.
func (o *object) wrap(other []byte) []byte { return join(o.raw, inside(other)) }

// follow returns the object with the members of another one before its own.
func (o *object) follow(other []byte) []byte { return join(inside(other), o.raw) }

func join(a, b []byte) []byte {
	if len(a) > 0 && len(b) > 0 {
		return slices.Concat([]byte("{"), a, []byte(","), b, []byte("}"))
	}
	return slices.Concat([]byte("{"), a, b, []byte("}"))
}

// inside returns what stands between an object's braces.
func inside(doc []byte) []byte {
	doc = bytes.TrimSpace(doc)
	return bytes.TrimSpace(doc[1 : len(doc)-1])
}

func quote(s string) []byte {
	q, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings always have a JSON form
	}
	return q
}

// multimodal tells whether any part of any message is something other than
// text.
func multimodal(messages []byte) bool {
	found := false
	elements(messages, func(m span) bool {
		message := m.of(messages)
		members(message, func(name string, v span) {
			if name != "content" {
				return
			}
			parts := v.of(message)
			elements(parts, func(p span) bool {
				found = found || !isText(p.of(parts))
				return !found
			})
		})
		return !found
	})
	return found
}

// isText tells whether a part of a message is text to the chat template.
func isText(part []byte) bool {
	if part[0] == '"' {
		return true
	}
	kind := ""
	members(part, func(name string, v span) {
		if name == "type" {
			kind = text(v.of(part))
		}
	})
	switch kind {
	case "text", "input_text", "output_text", "refusal", "thinking":
		return true
	}
	return false
}
