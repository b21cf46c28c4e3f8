package intake

import (
	"bytes"
	"context"
	"crypto/tls"
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
	attempts = 4
	// missingFor is how long a missing endpoint is not asked again: engines
	// come back at the same address with other options.
	missingFor = time.Minute
	// failedFor is how long an engine that failed comes last. It doubles with
	// every further failure, up to 16 times as long.
	failedFor = 2 * time.Second
	// hedgeAfter is how long an engine may be silent before another one is
	// asked as well, at least: twice the usual time if that is more, and
	// hedgeByte for every byte.
	hedgeAfter = 100 * time.Millisecond
	hedgeByte  = time.Microsecond
	// silent is how many such waits a prompt may take in all while nobody answers.
	// Then all of them hang, or are slower than ever: the next prompt waits longer,
	// and the decision need not.
	silent = 5
	// distrust bounds a prompt that only engines can be asked for that failed
	// lately.
	distrust = 400 * time.Millisecond
	// maxEngines remembered; beyond, the memory starts anew.
	maxEngines = 8192
)

// engines remembers what was learned about each address.
type engines struct {
	turn  atomic.Uint32 // spreads the work
	usual atomic.Int64  // moving average of the nanoseconds to an answer, or to none

	answered atomic.Bool // anybody, ever

	mu    sync.Mutex // guards known and what it points to
	known map[string]*engine
}

type engine struct {
	missing [endpoints]time.Time // not to be asked until
	failed  time.Time            // comes last until
	times   int                  // it failed one after the other
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
		// Until then it is asked with little patience, and a failure says little.
		if now := time.Now(); now.After(en.failed) {
			en.failed = now.Add(failedFor << min(en.times, 4))
			en.times++
		}
	default:
		en.failed, en.times = time.Time{}, 0
	}
}

// took learns from the time to an answer: the first one is all that is known.
func (e *engines) took(d time.Duration) {
	if !e.answered.Swap(true) {
		e.usual.Store(int64(d))
		return
	}
	e.waited(d)
}

// waited learns from an answer, or from none in that time.
func (e *engines) waited(d time.Duration) {
	was := e.usual.Load()
	e.usual.CompareAndSwap(was, was+(int64(d)-was)/8) // who loses says about the same
}

// hedge is how long to wait for one engine before another one is asked too.
func (e *engines) hedge(bytes int) time.Duration {
	return max(hedgeAfter, 2*time.Duration(e.usual.Load())) + time.Duration(bytes)*hedgeByte
}

// has tells whether the endpoint is worth a request.
func (e *engines) has(address string, ep endpoint) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	en := e.known[address]
	return en == nil || time.Now().After(en.missing[ep])
}

// order returns the addresses in the order in which to ask: each once, another
// one first each time, those that failed lately last. It tells whether there
// is one that did not.
func (e *engines) order(addresses []string) (order []string, trusted bool) {
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
	return append(fine, lately...), len(fine) > 0
}

func newClient(trust *tls.Config) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
			TLSClientConfig:     trust,
			MaxIdleConnsPerHost: 16,
			IdleConnTimeout:     90 * time.Second,
		},
		// An engine that sends us elsewhere is no engine.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// errSilent is why engines are no longer asked: none of them has answered for
// longer than is usual.
var errSilent = errors.New("no engine answers")

// overtaken is why an engine is no longer asked: another one has answered.
type overtaken struct {
	after time.Duration // that the other one took
	hedge time.Duration // that it was asked later
}

func (*overtaken) Error() string { return "another engine was quicker" }

// answer is what became of asking one engine.
type answer struct {
	rendered *rendered
	outcome  outcome
	err      error // nil and not rendered: it has nothing to be asked
	took     time.Duration
}

// ask turns a document into tokens by asking engines: the next one when one
// fails, or is silent for longer than is usual. The first answer counts. So an
// engine that hangs costs one wait, and comes last from then on.
func (i *Intake) ask(ctx context.Context, model string, d document) (*rendered, error) {
	addresses, err := i.cfg.Engines(model)
	if err != nil {
		return nil, err
	}
	if len(addresses) == 0 {
		return nil, errors.New("no engine of the model is known")
	}
	render := renderCompletion
	if d.chat {
		render = renderChat
	}
	order, trusted := i.engines.order(addresses)
	if !trusted {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, distrust)
		defer cancel()
	}
	hedge := i.engines.hedge(len(d.render))
	limit := silent * hedge
	if trusted {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, errSilent)
		defer cancel()
	}
	if deadline, ok := ctx.Deadline(); ok {
		hedge = min(hedge, time.Until(deadline)/3)
	}
	var asking sync.WaitGroup
	defer asking.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	answers := make(chan answer, len(order))
	patience := time.NewTimer(hedge)
	defer patience.Stop()
	var last error
	open, failures := 0, 0
	for {
		if len(order) > 0 && open+failures < attempts && ctx.Err() == nil {
			address := order[0]
			order = order[1:]
			open++
			asking.Go(func() { answers <- i.askOne(ctx, address, render, d) })
			patience.Reset(hedge)
		}
		if open == 0 {
			break
		}
		var a answer
		select {
		case <-patience.C:
			continue
		case a = <-answers:
		}
		open--
		switch {
		case a.rendered != nil:
			i.engines.took(a.took)
			cancel(&overtaken{a.took, hedge})
			return a.rendered, nil
		case a.err != nil:
			failures++
			last = a.err
		}
		if a.outcome == refused {
			break // so would the others
		}
	}
	switch {
	case last != nil:
		if errors.Is(context.Cause(ctx), errSilent) {
			i.engines.waited(limit)
		}
		return nil, fmt.Errorf("no engine could turn the prompt into tokens: %w", last)
	case d.tokenize == nil:
		return nil, errors.New("no engine could turn the prompt into tokens: it needs a render endpoint")
	}
	return nil, errors.New("no engine could turn the prompt into tokens")
}

// askOne asks one engine at the endpoints that it is believed to have.
func (i *Intake) askOne(ctx context.Context, address string, render endpoint, d document) answer {
	start := time.Now()
	var worst answer
	for _, try := range []struct {
		endpoint
		body []byte
	}{{render, d.render}, {tokenize, d.tokenize}} {
		if try.body == nil || !i.engines.has(address, try.endpoint) {
			continue
		}
		r, o, err := i.post(ctx, address, try.endpoint, try.body)
		took := time.Since(start)
		if ctx.Err() == nil || !hurried(ctx, took) {
			i.counts.calls[try.endpoint][o].Add(1)
			i.engines.learn(address, try.endpoint, o)
		}
		if o == ok {
			return answer{rendered: r, outcome: ok, took: took}
		}
		worst = answer{outcome: max(worst.outcome, o), err: fmt.Errorf("%s %w", try.endpoint, err), took: took}
		if o == failed {
			break
		}
	}
	return worst
}

// hurried tells of an engine that is asked no longer whether it had too little
// time to be blamed: the caller went away or had no more, or another engine was
// quicker that was not asked later.
func hurried(ctx context.Context, took time.Duration) bool {
	var by *overtaken
	switch {
	case errors.As(context.Cause(ctx), &by):
		return took < by.after+by.hedge
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return took < hedgeAfter
	}
	return true
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
	case errors.Is(err, context.Canceled) || errors.Is(ctx.Err(), context.Canceled):
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
