package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// agentPage is what /believed of an agent says, as far as it is looked at.
type agentPage struct {
	Believed *bool  `json:"believed"`
	Reason   string `json:"reason"`
	NATS     string `json:"nats"`
	Engine   struct {
		Error string `json:"error"`
	} `json:"engine"`
	Ranks []struct {
		Member string `json:"member"`
	} `json:"ranks"`
}

// visit is what came of asking one address.
type visit struct {
	address       string
	text          []byte
	shown         time.Time // by the clock there; zero: it did not say
	before, after time.Time
	err           error
}

// visitor follows no redirection: an agent, or an engine, is asked, and nobody
// whom it names.
func visitor() (*http.Client, func()) {
	transport := &http.Transport{Proxy: nil, DisableKeepAlives: true}
	return &http.Client{Transport: transport, Timeout: lookWait, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
		transport.CloseIdleConnections
}

// each asks all addresses, some at a time, and gives what came in their order.
func each(addresses []string, ask func(*visit)) []visit {
	visits := make([]visit, len(addresses))
	var g sync.WaitGroup
	room := make(chan struct{}, looks)
	for i, a := range addresses {
		visits[i].address = a
		room <- struct{}{}
		g.Go(func() {
			defer func() { <-room }()
			visits[i].before = time.Now()
			ask(&visits[i])
			visits[i].after = time.Now()
		})
	}
	g.Wait()
	return visits
}

// examineAgents reads the agents' own pages: what no scheduler hears, they say.
func (d *examination) examineAgents(ctx context.Context) {
	var addresses []string
	told := d.agents != ""
	if told {
		for a := range strings.SplitSeq(d.agents, ",") {
			addresses = append(addresses, strings.TrimSpace(a))
		}
	} else {
		for _, m := range d.fleet.GetMembers() {
			if host, _, err := net.SplitHostPort(m.GetMember().GetAddress()); err == nil {
				addresses = append(addresses, net.JoinHostPort(host, agentPort))
			}
		}
		slices.Sort(addresses)
		addresses = slices.Compact(addresses)
	}
	client, end := visitor()
	defer end()
	read := 0
	var away []string
	for _, v := range each(addresses, func(v *visit) { v.text, v.shown, v.err = get(ctx, client, "http://"+v.address+"/believed") }) {
		var page agentPage
		if v.err == nil {
			v.err = json.Unmarshal(v.text, &page)
		}
		switch {
		case v.err == nil && page.Believed != nil:
			read++
			d.examineAgent(&v, &page)
		case told:
			d.find(mend, "agent "+v.address, "its page cannot be read: "+cause(v.err), "see whether the agent runs; its -admin-address says where its page is")
		default:
			away = append(away, v.address)
		}
	}
	switch {
	case len(away) > 0:
		d.find(look, "agents", fmt.Sprintf("the pages of %d of %d were not found, as at %s", len(away), len(addresses), away[0]),
			"nothing, if they are closed to this machine or elsewhere: -agents names them")
	case read > 0:
		d.find(well, "agents", fmt.Sprintf("%d say of themselves what they see", read), "")
	}
}

func (d *examination) examineAgent(v *visit, page *agentPage) {
	about := "agent " + v.address
	if !*page.Believed {
		do := cure(page.Reason)
		if strings.Contains(page.Reason, "NATS") {
			do = "see the agent's -nats-url and its log, and docs/SECURITY.md where the server refuses it"
		}
		d.find(mend, about, page.Reason, do)
	}
	if page.Engine.Error != "" && *page.Believed {
		d.find(look, about, "the newest question to its engine failed: "+page.Engine.Error, "see whether the engine runs, and the agent's -engine")
	}
	for _, r := range page.Ranks {
		if *page.Believed && !slices.ContainsFunc(d.fleet.GetMembers(), func(m *api.MemberState) bool { return m.GetMember().GetId() == r.Member }) {
			d.find(mend, about, "its member "+r.Member+" is not known to this scheduler", "see whether both have the same -pool and NATS: another scheduler believes it")
		}
	}
	if !v.shown.IsZero() {
		d.clock(about, v.shown, v.before, v.after, time.Second)
	}
}

func cause(err error) string {
	if err == nil {
		return "it is not an agent's"
	}
	return err.Error()
}

// probeEngines has each engine serve a request of one token. No key is sent: the
// addresses are what members say.
func (d *examination) probeEngines(ctx context.Context) {
	var addresses []string
	models := make(map[string]string)
	for _, m := range d.fleet.GetMembers() {
		if a := m.GetMember().GetAddress(); a != "" && len(m.GetModels()) > 0 && m.GetIneligible() != api.Ineligible_INELIGIBLE_SLEEPING && models[a] == "" {
			models[a] = m.GetModels()[0]
			addresses = append(addresses, a)
		}
	}
	client, end := visitor()
	client.Timeout = d.timeout
	defer end()
	named := 0
	for _, v := range each(addresses, func(v *visit) { v.text, v.err = complete1(ctx, client, v.address, models[v.address]) }) {
		about := "engine " + v.address
		var answer struct {
			Usage *struct {
				Details *struct {
					Cached *int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			} `json:"usage"`
		}
		if v.err == nil {
			v.err = json.Unmarshal(v.text, &answer)
		}
		switch {
		case v.err != nil:
			d.find(look, about, "it serves no completion: "+v.err.Error(), "see its log; engines with an API key cannot be probed")
		case answer.Usage == nil:
			d.find(mend, about, "its answer has no usage", "see whether this is vLLM, and what stands before it")
		case answer.Usage.Details == nil || answer.Usage.Details.Cached == nil:
			d.find(mend, about, "its usage does not name cached tokens", "start it with --enable-prompt-tokens-details")
		default:
			named++
		}
	}
	if named > 0 {
		d.find(well, "engines", fmt.Sprintf("the usage of %d names cached tokens", named), "")
	}
}

// complete1 asks an engine for one token.
func complete1(ctx context.Context, client *http.Client, address, model string) ([]byte, error) {
	question, err := json.Marshal(map[string]any{"model": model, "prompt": "kvscout doctor", "max_tokens": 1})
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/v1/completions", bytes.NewReader(question))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	answer, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxPage))
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("HTTP status %d", answer.StatusCode)
	}
	return text, err
}

// The releases of vLLM that docs/COMPATIBILITY.md judges.
const (
	oldestJudged = "0.10.2"
	newestJudged = "0.32.0"
)

// standing of an engine's version.
type standing int

const (
	fine standing = iota
	unjudged
	older
	newer
)

// judged tells where a version stands. Of the newest, every patch is fine.
func judged(version string) standing {
	v, ok := numbers(version)
	low, _ := numbers(oldestJudged)
	high, _ := numbers(newestJudged)
	switch {
	case !ok:
		return unjudged
	case slices.Compare(v, low) < 0:
		return older
	case slices.Compare(v[:2], high[:2]) > 0:
		return newer
	}
	return fine
}

// numbers of a version like 0.32.0, or 0.32.1rc1.dev3+gabc.
func numbers(version string) ([]int, bool) {
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 4)
	if len(parts) < 3 {
		return nil, false
	}
	var list []int
	for _, p := range parts[:3] {
		digits := p[:len(p)-len(strings.TrimLeft(p, "0123456789"))]
		n, err := strconv.Atoi(digits)
		if err != nil {
			return nil, false
		}
		list = append(list, n)
	}
	return list, true
}
