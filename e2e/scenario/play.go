package scenario

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"
)

const (
	patience = 30 * time.Second
	// still is how long nothing must have moved for a look to count.
	still = 60 * time.Millisecond
	// attempts to stop an engine in the middle of something.
	attempts = 8
)

// Engine is where an engine is.
type Engine struct {
	URL    string
	Events string // host:port
	Model  string
}

// Request is one to send.
type Request struct {
	Prompt, Output int // tokens
	Stream         bool
	Choices        int // 0: 1
	Prompts        int // that share nothing; 0: 1
	Adapter        string
}

// request is one under way.
type request struct {
	leave context.CancelFunc
	done  chan struct{}
	err   error // after done
}

// Play is one scenario on one engine. Its methods end it by a panic of failure.
type Play struct {
	engine Engine
	client *http.Client
	heard  *listener
	name   string
	try    int

	before sheet
	quiet  events
	group  sync.WaitGroup
	ctx    context.Context
	out    []string
	// cut: the engine was stopped at a place that chance chose.
	cut bool
}

type failure struct{ error }

// errLate says that an engine did not stop where it should have.
var errLate = errors.New("the engine was past it")

func (p *Play) check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Run plays a scenario on an idle engine and says what moved.
func (s Scenario) Run(ctx context.Context, e Engine) (string, error) {
	heard, err := listen(e.Events)
	if err != nil {
		return "", fmt.Errorf("%s: %w", s.Name, err)
	}
	defer heard.close()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for try := range attempts {
		p := &Play{engine: e, client: client, heard: heard, name: s.Name, try: try}
		if err = p.run(ctx, s.play); !errors.Is(err, errLate) {
			if err != nil {
				err = fmt.Errorf("%s: %w", s.Name, err)
			}
			return "== " + s.Name + "\n" + strings.Join(p.out, "\n") + "\n", err
		}
	}
	return "", fmt.Errorf("%s: %d attempts: %w", s.Name, attempts, err)
}

func (p *Play) run(ctx context.Context, play func(*Play)) (err error) {
	ctx, stop := context.WithCancel(ctx)
	p.ctx = ctx
	defer p.group.Wait()
	defer stop()
	defer func() {
		switch f := recover().(type) {
		case nil:
		case failure:
			err = f.error
			if errors.Is(err, errLate) {
				p.ctx = context.WithoutCancel(ctx)
				stop()
				p.clean()
			}
		default:
			panic(f)
		}
	}()
	p.clean()
	// A request whose events come shows that nothing of before is under way, and
	// that an emptied cache was told of.
	p.finish(p.send("before", Request{Prompt: 40, Output: 1}))
	p.before, p.quiet = p.settle()
	play(p)
	return nil
}

// clean lets the engine go on, waits until nobody is served, and empties it.
func (p *Play) clean() {
	p.post("/resume")
	p.wait("be idle", func(s sheet) bool { return s["num_requests_running"]+s["num_requests_waiting"] == 0 })
	p.post("/reset_prefix_cache")
}

func (p *Play) do(method, path string, body any) *http.Response {
	raw, err := json.Marshal(body)
	p.check(err)
	r, err := http.NewRequestWithContext(p.ctx, method, p.engine.URL+path, bytes.NewReader(raw))
	p.check(err)
	r.Header.Set("Content-Type", "application/json")
	answer, err := p.client.Do(r)
	p.check(err)
	return answer
}

func (p *Play) post(path string) {
	answer := p.do(http.MethodPost, path, nil)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	p.check(err)
	if answer.StatusCode != http.StatusOK {
		p.check(fmt.Errorf("%s: %s: %.300s", path, answer.Status, text))
	}
}

func (p *Play) hold()   { p.post("/pause?mode=keep&clear_cache=false") }
func (p *Play) resume() { p.post("/resume") }

// linger lets what was sent to a held engine wait for more than waited.
func (p *Play) linger() { time.Sleep(2 * waited) }

// page is what the engine tells since the play began.
func (p *Play) page() (sheet, events) {
	answer := p.do(http.MethodGet, "/metrics", nil)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	p.check(err)
	s, err := parse(string(text))
	p.check(err)
	e, err := p.heard.read()
	p.check(err)
	return s, e
}

// settle reads the engine when nothing moves any more.
func (p *Play) settle() (sheet, events) {
	began, since := time.Now(), time.Now()
	last, heard := p.page()
	for time.Since(since) < still {
		if time.Since(began) > patience {
			p.check(errors.New("the engine does not come to rest"))
		}
		time.Sleep(still / 6)
		if s, e := p.page(); e != heard || !maps.Equal(s, last) {
			last, heard, since = s, e, time.Now()
		}
	}
	return last, heard
}

// look writes down what has moved since the play began.
func (p *Play) look(when string) {
	s, e := p.settle()
	p.out = append(p.out, "-- "+when)
	p.out = append(p.out, s.since(p.before).lines(e.since(p.quiet), p.cut)...)
}

// wait until a page, since the play began, is as wanted.
func (p *Play) wait(what string, holds func(sheet) bool) {
	for began := time.Now(); ; time.Sleep(2 * time.Millisecond) {
		if s, _ := p.page(); holds(s.since(p.before)) {
			return
		}
		if time.Since(began) > patience {
			p.check(fmt.Errorf("the engine would not %s", what))
		}
	}
}

// until lets a held engine go on, and holds it where it should stand with all of
// the requests under way.
func (p *Play) until(what string, holds func(sheet) bool, under ...*request) {
	p.linger()
	stands := func(s sheet) bool {
		for _, r := range under {
			select {
			case <-r.done:
				p.check(fmt.Errorf("%s: %w", what, errLate))
			default:
			}
		}
		return holds(s.since(p.before))
	}
	for began := time.Now(); time.Since(began) < patience; {
		p.resume()
		s, _ := p.page()
		for !stands(s) && time.Since(began) < patience {
			s, _ = p.page()
		}
		p.hold()
		if s, _ = p.settle(); stands(s) {
			return
		}
	}
	p.check(fmt.Errorf("%s: it never was so", what))
}

// tokens of a document.
func (p *Play) tokens(document string, n int) []uint32 {
	h := fnv.New64a()
	fmt.Fprint(h, p.name, p.try, document)
	rng := rand.New(rand.NewPCG(h.Sum64(), 1))
	list := make([]uint32, n)
	for i := range list {
		list[i] = 3 + rng.Uint32N(3900)
	}
	return list
}

// send starts a request for the head of a document. It has reached the engine's
// HTTP server when send returns, and its scheduler soon after.
func (p *Play) send(document string, q Request) *request {
	body := map[string]any{
		"model": p.engine.Model, "prompt": p.tokens(document, q.Prompt), "max_tokens": q.Output,
		"ignore_eos": true, "stream": q.Stream, "temperature": 0,
	}
	if q.Choices > 0 {
		body["n"], body["temperature"] = q.Choices, 1
	}
	if q.Prompts > 0 {
		var list [][]uint32
		for i := range q.Prompts {
			list = append(list, p.tokens(fmt.Sprint(document, " ", i), q.Prompt))
		}
		body["prompt"] = list
	}
	if q.Adapter != "" {
		body["model"] = q.Adapter
	}
	raw, err := json.Marshal(body)
	p.check(err)
	ctx, leave := context.WithCancel(p.ctx)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, p.engine.URL+"/v1/completions", bytes.NewReader(raw))
	if err != nil {
		leave()
		p.check(err)
	}
	r.Header.Set("Content-Type", "application/json")
	sent := &request{leave: leave, done: make(chan struct{})}
	p.group.Go(func() {
		defer close(sent.done)
		defer leave()
		answer, err := p.client.Do(r)
		if err != nil {
			sent.err = err
			return
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		switch {
		case err != nil:
			sent.err = err
		case answer.StatusCode != http.StatusOK:
			sent.err = fmt.Errorf("%s: %.300s", answer.Status, text)
		case q.Stream && !bytes.Contains(text, []byte("data: [DONE]")):
			sent.err = fmt.Errorf("the stream ends with %q", text[max(0, len(text)-100):])
		}
	})
	// Those that are sent to a held engine are to arrive in their order.
	time.Sleep(still / 2)
	return sent
}

// finish waits for answers.
func (p *Play) finish(list ...*request) {
	end := time.After(patience)
	for _, r := range list {
		select {
		case <-r.done:
			p.check(r.err)
		case <-end:
			p.check(errors.New("no answer"))
		}
	}
}

// leave hangs up, and waits until the engine has one request less.
func (p *Play) leave(r *request) {
	count := func(s sheet) float64 { return s["num_requests_running"] + s["num_requests_waiting"] }
	s, _ := p.page()
	before := count(s)
	r.leave()
	<-r.done
	p.wait("let a request go", func(s sheet) bool { return count(s) == before-1 })
}
