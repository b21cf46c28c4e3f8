package intake

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// endpoint of an engine that gives tokens.
type endpoint int

const (
	renderCompletion endpoint = iota
	renderChat
	tokenize
	endpoints
)

func (e endpoint) String() string {
	return [...]string{"/v1/completions/render", "/v1/chat/completions/render", "/tokenize"}[e]
}

// outcome of one request to an engine.
type outcome int

const (
	ok outcome = iota
	// missing: the engine has no such endpoint, or it is switched off.
	missing
	// refused: the engine does not accept this document.
	refused
	// garbled: it answered, but not in a form that is known.
	garbled
	// failed: no answer; another engine may give one.
	failed
	outcomes
)

func (o outcome) String() string {
	return [...]string{"ok", "missing", "refused", "garbled", "failed"}[o]
}

const (
	// attempts is the number of engines asked for one prompt.
	attempts = 3
	// missingFor is how long a missing endpoint is not asked again: engines
	// come back at the same address with other options.
	missingFor = time.Minute
	// failedFor is how long an engine that failed comes last.
	failedFor = 2 * time.Second
	// maxEngines remembered; beyond, the memory starts anew.
	maxEngines = 8192
)

// engines remembers what was learned about each address.
type engines struct {
	turn atomic.Uint32 // spreads the work

	mu    sync.Mutex // guards known and what it points to
	known map[string]*engine
}

type engine struct {
	missing [endpoints]time.Time // not to be asked until
	failed  time.Time            // comes last until
}

func (e *engines) learn(address string, ep endpoint, o outcome) {
	e.mu.Lock()
	defer e.mu.Unlock()
	en := e.known[address]
	if en == nil {
		if len(e.known) >= maxEngines {
			clear(e.known)
		}
		en = &engine{}
		e.known[address] = en
	}
	switch o {
	case missing:
		en.missing[ep] = time.Now().Add(missingFor)
	case failed:
		en.failed = time.Now().Add(failedFor)
	default:
		en.failed = time.Time{}
	}
}

// has tells whether the endpoint is worth a request.
func (e *engines) has(address string, ep endpoint) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	en := e.known[address]
	return en == nil || time.Now().After(en.missing[ep])
}

// order returns the addresses in the order in which to ask: each once, another
// one first each time, those that failed lately last.
func (e *engines) order(addresses []string) []string {
	turn := int(e.turn.Add(1))
	seen := make(map[string]bool, len(addresses))
	fine, lately := make([]string, 0, len(addresses)), []string(nil)
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	for n := range addresses {
		a := addresses[(n+turn)%len(addresses)]
		if a == "" || seen[a] {
			continue
		}
		seen[a] = true
		if en := e.known[a]; en != nil && now.Before(en.failed) {
			lately = append(lately, a)
		} else {
			fine = append(fine, a)
		}
	}
	return append(fine, lately...)
}

func newClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 16,
			IdleConnTimeout:     90 * time.Second,
		},
		// An engine that sends us elsewhere is no engine.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// ask turns a document into tokens by asking one engine after the other.
func (i *Intake) ask(ctx context.Context, model string, d document) (*rendered, error) {
	addresses := i.cfg.Engines(model)
	if len(addresses) == 0 {
		return nil, errors.New("no engine of the model is known")
	}
	render := renderCompletion
	if d.chat {
		render = renderChat
	}
	var last error
	asked := 0
	for _, a := range i.engines.order(addresses) {
		if asked == attempts || ctx.Err() != nil {
			break
		}
		r, o, err := i.askOne(ctx, a, render, d, attempts-asked)
		if r != nil {
			return r, nil
		}
		if err == nil {
			continue // it has nothing to be asked
		}
		asked++
		last = err
		if o == refused {
			break
		}
	}
	switch {
	case last != nil:
		return nil, fmt.Errorf("no engine could turn the prompt into tokens: %w", last)
	case d.tokenize == nil:
		return nil, errors.New("no engine could turn the prompt into tokens: it needs a render endpoint")
	}
	return nil, errors.New("no engine could turn the prompt into tokens")
}

// askOne asks one engine at the endpoints that it is believed to have, and
// leaves time to ask the others. Without any such endpoint it returns nothing.
func (i *Intake) askOne(ctx context.Context, address string, render endpoint, d document, share int) (*rendered, outcome, error) {
	if deadline, ok := ctx.Deadline(); ok && share > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)*2/3)
		defer cancel()
	}
	var (
		worst outcome
		last  error
	)
	for _, try := range []struct {
		endpoint
		body []byte
	}{{render, d.render}, {tokenize, d.tokenize}} {
		if try.body == nil || !i.engines.has(address, try.endpoint) {
			continue
		}
		r, o, err := i.post(ctx, address, try.endpoint, try.body)
		i.counts.calls[try.endpoint][o].Add(1)
		if ctx.Err() == nil || !errors.Is(err, context.Canceled) {
			i.engines.learn(address, try.endpoint, o)
		}
		if o == ok {
			return r, ok, nil
		}
		worst, last = max(worst, o), fmt.Errorf("%s %w", try.endpoint, err)
		if o == failed {
			break
		}
	}
	return nil, worst, last
}

// post makes one request. Its errors quote nothing of what the engine said.
func (i *Intake) post(ctx context.Context, address string, ep endpoint, body []byte) (*rendered, outcome, error) {
	url := strings.TrimSuffix(address, "/")
	if !strings.Contains(url, "://") {
		url = "http://" + url
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+ep.String(), bytes.NewReader(body))
	if err != nil {
		return nil, failed, errors.New("cannot be asked: the engine's address is not valid")
	}
	req.Header.Set("Content-Type", "application/json")
	if i.cfg.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+i.cfg.APIKey)
	}
	resp, err := i.client.Do(req)
	if err != nil {
		return nil, failed, because(ctx, err, "did not answer")
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, i.cfg.MaxAnswer+1))
	switch {
	case err != nil:
		return nil, failed, because(ctx, err, "broke off its answer")
	case int64(len(answer)) > i.cfg.MaxAnswer:
		return nil, failed, fmt.Errorf("answered with more than %d bytes", i.cfg.MaxAnswer)
	case resp.StatusCode != http.StatusOK:
		return nil, judge(resp.StatusCode, answer), fmt.Errorf("answered %d", resp.StatusCode)
	}
	parse := parseRender
	if ep == tokenize {
		parse = parseTokenize
	}
	r, err := parse(answer)
	if err != nil {
		return nil, garbled, fmt.Errorf("answered, but %w", err)
	}
	return r, ok, nil
}

// because keeps of a transport error what the caller may see and branch on.
func because(ctx context.Context, err error, what string) error {
	switch {
	case errors.Is(err, context.Canceled):
		return fmt.Errorf("%s: %w", what, context.Canceled)
	case ctx.Err() != nil:
		return fmt.Errorf("%s in time", what)
	}
	return errors.New(what)
}

// judge sorts the status codes of vLLM's releases.
func judge(status int, answer []byte) outcome {
	switch status {
	case http.StatusForbidden, http.StatusMethodNotAllowed, http.StatusNotImplemented:
		return missing
	case http.StatusNotFound:
		// The same code says that the model is not served.
		var e struct {
			Error struct{ Type, Param string }
		}
		if json.Unmarshal(answer, &e) == nil && (e.Error.Param == "model" || e.Error.Type == "NotFoundError") {
			return failed
		}
		return missing
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		return refused
	}
	return failed
}
