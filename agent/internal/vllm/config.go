package vllm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
)

// Config is what an engine in development mode tells of its configuration, as
// far as it decides what a prefix-cache hit is.
type Config struct {
	Told bool // false: the engine tells nothing
	// Speculative is the method of speculative decoding; empty: there is none.
	Speculative string
	// KeepsLastBlock: the method would drop the last block of a hit, and is told
	// not to.
	KeepsLastBlock bool
	// Chunk of chunked-local attention in tokens; 0: there is none.
	Chunk int
}

// In an engine's configuration as text: what it says of speculative decoding,
// and its method.
var (
	speculation = regexp.MustCompile(`\bspeculative_config=(None|SpeculativeConfig\([^)]*)`)
	method      = regexp.MustCompile(`\bmethod='([a-z0-9_]+)'`)
)

// chunkSize finds the chunk in a model's configuration that was turned to text.
var chunkSize = regexp.MustCompile(`"attention_chunk_size":\s*(\d+)`)

// Config asks for the engine's configuration. Engines outside development mode
// have no such page. Some cannot give it as JSON; as text it says less.
func (e *Engine) Config(ctx context.Context) (Config, error) {
	c, err := e.wholeConfig(ctx)
	if err == nil {
		return c, nil
	}
	body, textErr := e.getBy(ctx, e.slow, "/server_info?config_format=text")
	if textErr != nil {
		return Config{}, err
	}
	said := speculation.FindSubmatch(body)
	if said == nil {
		return Config{}, err
	}
	c = Config{Told: true}
	if string(said[1]) != "None" {
		m := method.FindSubmatch(said[1])
		if m == nil {
			return Config{}, err
		}
		c.Speculative = string(m[1])
	}
	return c, nil
}

func (e *Engine) wholeConfig(ctx context.Context) (Config, error) {
	var page struct {
		Config struct {
			Speculative *struct {
				Method string `json:"method"`
				Keeps  bool   `json:"disable_eagle_block_drop"`
			} `json:"speculative_config"`
			Model struct {
				Chunk    int             `json:"attention_chunk_size"`
				HF       json.RawMessage `json:"hf_config"`
				HFOfText json.RawMessage `json:"hf_text_config"`
			} `json:"model_config"`
		} `json:"vllm_config"`
	}
	body, err := e.getBy(ctx, e.slow, "/server_info?config_format=json")
	switch {
	case errors.Is(err, errAbsent):
		return Config{}, nil
	case err != nil:
		return Config{}, err
	}
	if err := json.Unmarshal(body, &page); err != nil {
		return Config{}, fmt.Errorf("read /server_info: %w", err)
	}
	c := Config{Told: true, Chunk: page.Config.Model.Chunk}
	if s := page.Config.Speculative; s != nil {
		c.Speculative, c.KeepsLastBlock = s.Method, s.Keeps
	}
	for _, raw := range []json.RawMessage{page.Config.Model.HFOfText, page.Config.Model.HF} {
		text := string(raw)
		_ = json.Unmarshal(raw, &text) // an object stays the text that it is
		if m := chunkSize.FindStringSubmatch(text); m != nil && c.Chunk <= 0 {
			c.Chunk, _ = strconv.Atoi(m[1])
		}
	}
	if c.Chunk < 0 || c.Chunk > maxBlockSize {
		c.Chunk = 0
	}
	return c, nil
}
