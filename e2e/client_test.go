package e2e

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	"github.com/kvscout/kvscout/protocol/client"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// through sends a prompt by the client, as a proxy does, and gives where it was
// served, and whether a scheduler said so.
func (p *play) through(c *client.Client, q prompt, own func([]string) string) (address string, picked bool) {
	p.t.Helper()
	err := c.Do(p.t.Context(), q.request(), own, func(_ context.Context, place *client.Placement) (*api.Report, error) {
		_, text, err := p.try("http://"+place.Address+"/v1/completions", nil, object{"model": model, "prompt": q.tokens, "max_tokens": 1})
		if err != nil {
			return nil, client.Another(err)
		}
		place.FirstToken()
		var u usage
		if err := json.Unmarshal(text, &u); err != nil {
			return nil, err
		}
		address, picked = place.Address, place.Decision != nil
		cached := uint32(u.Usage.Details.CachedTokens)
		if held := place.Candidate().GetCachedTokens().GetGpu(); picked && held != cached {
			p.t.Errorf("promised %d tokens, served %d", held, cached)
		}
		return &api.Report{PromptTokens: proto.Uint32(uint32(u.Usage.PromptTokens)), CachedTokens: &cached}, nil
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return address, picked
}

// TestClientServesThroughEverything: a member that dies gives way to another, the
// proxy's own choice stands in while the scheduler is away, and it is asked again
// when it is back. What the scheduler learns is what the engines count.
func TestClientServesThroughEverything(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	one, two := p.engine(fakevllm.Config{}).watched("one"), p.engine(fakevllm.Config{}).watched("two")
	c, err := p.Proxy(patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	q := random(1, 160)
	first, picked := p.through(c, q, nil)
	if !picked {
		t.Fatal("not picked")
	}
	holder, other := one, two
	if first == two.Addr() {
		holder, other = two, one
	}
	holder.truth(patience, q)
	if again, _ := p.through(c, q, nil); again != first {
		t.Errorf("the second time at %s, the holder is %s", again, first)
	}
	p.until("reports have come", func() bool { return p.member(holder.id()).GetReportedCachedTokens() == 144 })

	holder.stop()
	if at, _ := p.through(c, random(2, 160), func([]string) string { return other.Addr() }); at != other.Addr() {
		t.Errorf("served at %s", at)
	}
	holder.start()

	p.StopScheduler()
	var asked atomic.Int64
	own := func([]string) string { asked.Add(1); return other.Addr() }
	if at, picked := p.through(c, random(3, 160), own); picked || at != other.Addr() || asked.Load() != 1 {
		t.Errorf("served at %s, picked %v, own choice asked %d times", at, picked, asked.Load())
	}
	if err := p.StartScheduler(); err != nil {
		t.Fatal(err)
	}
	seed := uint64(3)
	p.until("it is asked again", func() bool {
		seed++ // of what was not picked no scheduler knows yet that it is held
		_, picked := p.through(c, random(seed, 160), own)
		return picked
	})
}

// A scheduler that hangs costs no request more than the client's timeout, and the
// one that stands by answers.
func TestClientGoesRoundASchedulerThatHangs(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	p.engine(fakevllm.Config{}).watched("pod")
	p.ready()
	hangs := proxy(t, p.GRPC, nil, nil)
	hangs.Stall(true)
	c, err := client.New(client.Config{Schedulers: []string{hangs.Addr(), p.GRPC}, Timeout: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 3 {
		if _, err := c.Pick(t.Context(), random(1, 100).request()); err != nil {
			t.Error(err)
		}
	}
}
