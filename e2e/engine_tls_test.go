package e2e

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/loopback"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/tlsclient"
	"github.com/kvscout/kvscout/scheduler"
)

// Engines that speak TLS are followed, asked for tokens and served like others:
// beside one that does not, and by a certificate that names no address.
func TestEnginesWithTLS(t *testing.T) {
	t.Parallel()
	ca := authority.New(t)
	trust := tlsclient.Trust{CA: ca.CA, Name: "localhost"}
	pair := ca.Issue(t, time.Now().Add(time.Hour))
	certificate, err := tls.LoadX509KeyPair(pair.Cert, pair.Key)
	if err != nil {
		t.Fatal(err)
	}
	address := net.JoinHostPort(loopback.Host(t), "28080")
	p := open(t, stage.Options{Change: func(c *scheduler.Config) { c.GatewayAddress, c.EngineTLS = address, trust }})
	p.http.Transport.(*http.Transport).TLSClientConfig = ca.Client(t, authority.Pair{})
	for i, config := range []*tls.Config{{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}, nil} {
		model := []string{"encrypted", "plain"}[i]
		e := p.engine(fakevllm.Config{Model: model, TLS: config}).watchedBy(stage.AgentOptions{Pod: model, Trust: trust})
		e.untilMember(e.id(), "be exact", stage.Exact)
		body := `{"model":"` + model + `","prompt":"` + strings.Repeat("a long prompt, ", 2000) + `","max_tokens":1}`
		for turn := range 2 {
			d, err := p.Client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Prompt: api.Body(body)}})
			if err != nil {
				t.Fatal(err)
			}
			best := d.GetRanking().GetCandidates()[0]
			if best.GetMember().GetTls() != (config != nil) || best.GetMember().GetAddress() != e.Addr() {
				t.Errorf("%s: %v", model, best.GetMember())
			}
			answer, err := p.http.Post("http://"+address+"/v1/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(answer.Body)
			answer.Body.Close()
			var used usage
			if err != nil || json.Unmarshal(text, &used) != nil || answer.StatusCode != http.StatusOK {
				t.Fatalf("%s: %d %.300s %v", model, answer.StatusCode, text, err)
			}
			if promised := int(best.GetCachedTokens().GetGpu()); promised != used.Usage.Details.CachedTokens || (promised > 0) != (turn > 0) {
				t.Errorf("%s, request %d: %d cached tokens are promised, the engine counts %d", model, turn, promised, used.Usage.Details.CachedTokens)
			}
			p.until("all blocks of the prompt but its last are held", func() bool {
				d, err := p.Client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Prompt: api.Body(body)}})
				return err == nil && d.GetRanking().GetCandidates()[0].GetCachedTokens().GetGpu() == 29_984
			})
		}
	}
	answer, err := p.http.Get("http://" + address + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if text, err := io.ReadAll(answer.Body); err != nil || !bytes.Contains(text, []byte(`"max_model_len"`)) || bytes.Count(text, []byte(`"max_model_len"`)) != 2 {
		t.Errorf("models: %s %v", text, err)
	}

	// Who signed for the engine is not known to this agent: it says so.
	e := p.engine(fakevllm.Config{TLS: &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}})
	agent, err := p.Agent(stage.AgentOptions{Engine: e.URL(), Pod: "stranger"})
	if err != nil {
		t.Fatal(err)
	}
	p.until("the agent says why it knows nothing", func() bool {
		answer, err := http.Get("http://" + agent.Admin() + "/readyz")
		if err != nil {
			return false
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		return err == nil && bytes.Contains(text, []byte("certificate")) && answer.StatusCode == http.StatusServiceUnavailable
	})
}
