package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// Question is a prompt whose cached part is asked for.
type Question struct {
	Model  string
	Rank   int
	Steer  bool // the engine has several ranks
	Tokens []uint32
}

const (
	countedWithin = time.Second // the engine's metrics follow its answers
	countedPoll   = 50 * time.Millisecond
)

var errUncounted = errors.New("the engine did not count the request alone")

// Cached lets an idle engine compute one token behind the prompt and says how
// many of the prompt's tokens it found in its cache. Engines that do not tell
// it in the answer (--enable-prompt-tokens-details) tell it in their counters,
// of which before is a sample.
func (e *Engine) Cached(ctx context.Context, q Question, before *Load) (float64, error) {
	said, err := e.complete(ctx, q)
	if err != nil {
		return 0, err
	}
	if said != nil {
		return *said, nil
	}
	if before.PromptTokens == nil || before.CachedTokens == nil {
		return 0, errUncounted
	}
	for deadline := time.Now().Add(countedWithin); time.Now().Before(deadline) && ctx.Err() == nil; sleep(ctx, countedPoll) {
		page, err := e.Metrics(ctx)
		if err != nil {
			return 0, err
		}
		l := page.Load(q.Rank)
		if l == nil || l.PromptTokens == nil || l.CachedTokens == nil {
			return 0, errUncounted
		}
		switch grown := *l.PromptTokens - *before.PromptTokens; {
		case grown == 0:
		case grown == float64(len(q.Tokens)):
			return *l.CachedTokens - *before.CachedTokens, nil
		default:
			return 0, errUncounted
		}
	}
	return 0, errUncounted
}

// complete gives what the answer says of cached tokens; nil: nothing.
func (e *Engine) complete(ctx context.Context, q Question) (*float64, error) {
	const path = "/v1/completions"
	body, err := json.Marshal(map[string]any{"model": q.Model, "prompt": q.Tokens, "max_tokens": 1, "temperature": 0})
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.base.JoinPath(path).String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if e.key != "" {
		req.Header.Set("Authorization", "Bearer "+e.key)
	}
	if q.Steer {
		req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(q.Rank))
	}
	resp, err := e.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answered %s", path, resp.Status)
	}
	var answer struct {
		Usage *struct {
			Details *struct {
				Cached *float64 `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxPage)).Decode(&answer); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if answer.Usage == nil || answer.Usage.Details == nil {
		return nil, nil
	}
	return answer.Usage.Details.Cached, nil
}

// Load is that of one rank; nil: the page has none.
func (p *Page) Load(rank int) *Load {
	for i := range p.Ranks {
		if p.Ranks[i].Rank == rank {
			return &p.Ranks[i].Load
		}
	}
	return nil
}
