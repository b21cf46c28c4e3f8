package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/kvscout/kvscout/protocol/bus"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/scheduler/internal/chronicle"
)

const (
	// agentPort is where agents serve their pages unless they are told otherwise.
	agentPort = "9478"
	// maxSkew of clocks is what does no harm: certificates and the lag of events are
	// judged by them.
	maxSkew = 2 * time.Second
	// expiresSoon is when to think of a certificate.
	expiresSoon = 7 * 24 * time.Hour
	// enough decisions, or reports, to conclude something from.
	enough = 100
	// looks is how many pages are asked at a time, lookWait how long one may take.
	looks    = 16
	lookWait = 3 * time.Second
	// maxPage bounds a page in bytes.
	maxPage = 1 << 20
)

var doctor = command{
	name: "doctor", does: "what is wrong, and what to do about it, in the order in which to do it",
	more: `
It asks the scheduler, the pages of agents, NATS if it is told where, and with
-probe the engines. Exit status 1: something must be mended.

  kvscout doctor
  kvscout doctor -nats-url nats://nats:4222 -members 8 -probe

`,
	bind: func(fs *flag.FlagSet) func(context.Context, *session) error {
		d := new(examination)
		fs.StringVar(&d.nats, "nats-url", "", "`URL` of the NATS server, to connect to it; empty: what the scheduler says counts")
		fs.StringVar(&d.login.Credentials, "nats-credentials", "", "`file` with credentials for -nats-url")
		fs.StringVar(&d.login.Seed, "nats-seed", "", "`file` with the nkey seed for -nats-url")
		fs.StringVar(&d.login.CA, "nats-tls-ca", "", "`file` with the CA of the server's certificate")
		fs.StringVar(&d.login.Cert, "nats-tls-cert", "", "`file` with our certificate for -nats-url")
		fs.StringVar(&d.login.Key, "nats-tls-key", "", "`file` with the private key of -nats-tls-cert")
		fs.StringVar(&d.agents, "agents", "", "`list` of host:port separated by commas, of the agents' pages (their -admin-address); empty: port "+agentPort+" of every member's address, as far as it can be reached")
		fs.IntVar(&d.expected, "members", 0, "`number` of members that there should be; 0: not known")
		fs.BoolVar(&d.probe, "probe", false, "send each engine a completion of one token, to see whether its usage names cached tokens")
		return func(ctx context.Context, s *session) error {
			if d.expected < 0 {
				return wrongFlag(settings.Wrong(fs, "members", "must not be negative"))
			}
			d.session = s
			d.examine(ctx)
			if ctx.Err() != nil {
				return nil
			}
			return d.say()
		}
	},
}

// level says how bad a finding is.
type level string

const (
	well level = "ok"
	look level = "look" // it may be meant so
	mend level = "mend"
)

// finding is one thing that was seen.
type finding struct {
	Level level  `json:"level"`
	About string `json:"about"`
	Text  string `json:"finding"`
	Do    string `json:"do,omitempty"`
}

// examination is one run of doctor.
type examination struct {
	*session
	login    bus.Login
	nats     string
	agents   string
	expected int
	probe    bool

	fleet    *api.ListMembersResponse
	findings []finding
}

func (d *examination) find(l level, about, text, do string) {
	d.findings = append(d.findings, finding{l, clean(about), clean(text), clean(do)})
}

// examine looks at everything in the order of causes: what comes later may be
// the consequence of what came before.
func (d *examination) examine(ctx context.Context) {
	if d.nats != "" {
		d.examineNATS(ctx)
	}
	if !d.examineScheduler(ctx) {
		return
	}
	d.examineMembers()
	d.examineAgents(ctx)
	d.examineVersions()
	d.examineReports()
	d.examineTokens(ctx)
	if d.probe {
		d.probeEngines(ctx)
	}
}

func (d *examination) examineNATS(ctx context.Context) {
	ctx, cancel := d.bounded(ctx)
	defer cancel()
	server, trip, err := d.login.Try(ctx, d.nats)
	shown := settings.RedactURLs(d.nats)
	if err != nil {
		d.find(mend, "NATS", shown+": "+err.Error(), "start the server, or correct -nats-url and the files of the other -nats flags, which agents and schedulers have, too")
		return
	}
	d.find(well, "NATS", fmt.Sprintf("%s answers in %s ms", server, ms(float64(trip.Microseconds())/1000)), "")
}

// examineScheduler tells whether there is a fleet to look at.
func (d *examination) examineScheduler(ctx context.Context) bool {
	before := time.Now()
	fleet, err := d.list(ctx, "")
	after := time.Now()
	switch {
	case err != nil && reasonOf(err) == "NOT_AN_OPERATOR":
		d.find(mend, "rights", "the caller is no operator: nothing more can be seen", d.right())
		return false
	case err != nil:
		d.find(mend, "scheduler", d.explained(ctx, err).Error(), "")
		return false
	}
	d.fleet = fleet
	about := fleet.GetScheduler()
	name := fmt.Sprintf("%s (release %s, pool %s)", about.GetName(), known(about.GetRelease()), about.GetPool())
	switch {
	case about.GetName() == "":
		d.find(look, "scheduler", "it does not say what it is: it is of an older release than this program", "upgrade it")
	case !about.GetNatsConnected():
		d.find(mend, "scheduler", name+": "+about.GetReadiness(), "see its -nats-url and its log; with -nats-url doctor tries to connect itself")
	case !fleet.GetReady():
		d.find(mend, "scheduler", name+" is not ready: "+about.GetReadiness(), "wait some seconds after a start; else see the members below, and its log")
	default:
		d.find(well, "scheduler", name+": "+about.GetReadiness(), "")
	}
	if at := about.GetTimeMs(); at > 0 {
		d.clock("scheduler", time.UnixMicro(int64(at*1000)), before, after, time.Millisecond)
	}
	d.certificate(ctx)
	return true
}

// certificate looks at how long TLS will go on working.
func (d *examination) certificate(ctx context.Context) {
	if !d.tls {
		return
	}
	state, err := d.reach(ctx)
	if err != nil || state == nil || len(state.PeerCertificates) == 0 {
		return // the call was answered: it is a matter of the moment
	}
	until := state.PeerCertificates[0].NotAfter
	if left := time.Until(until); left < expiresSoon {
		d.find(look, "certificate", fmt.Sprintf("that of the scheduler expires in %s", chronicle.Age(float64(left.Milliseconds()))), "renew it; the files of -grpc-tls-cert and -grpc-tls-key are read again for every connection")
	}
}

// clock compares a clock, which was read between two moments and shows time in
// steps, with this machine's.
func (d *examination) clock(of string, shown, before, after time.Time, step time.Duration) {
	early, late := shown.Add(-step), shown.Add(step)
	off := time.Duration(0)
	switch {
	case late.Before(before):
		off = late.Sub(before)
	case early.After(after):
		off = early.Sub(after)
	}
	if off.Abs() <= maxSkew {
		return
	}
	d.find(mend, "clock", fmt.Sprintf("that of %s is at least %s %s that of this machine", of, chronicle.Age(float64(off.Abs().Milliseconds())), map[bool]string{true: "ahead of", false: "behind"}[off > 0]),
		"have both set by NTP: certificates, and the age of events, are judged by clocks")
}

// cures by what a member's explanation has in it; the first that fits. The page
// docs/OPERATIONS.md has all of them.
var cures = []struct{ has, do string }{
	{"publishes no KV events", `start the engine with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","topic":"kv"}'`},
	{"are KV events enabled", `start the engine with --kv-events-config '{"enable_kv_cache_events":true, ...}', or correct the agent's -events`},
	{"prefix caching is off", "remove the engine's --no-enable-prefix-caching"},
	{"are not those of the engine", "correct the agent's -engine or -events, or the engine's endpoint: the agent hears another engine"},
	{"events that this agent cannot read", "use an agent of a newer release, or report it with the text"},
	{"no replay:", "set replay_endpoint in the engine's --kv-events-config"},
	{"without a replay socket", "set replay_endpoint in the engine's --kv-events-config"},
	{"older events are lost", "raise buffer_steps in the engine's --kv-events-config, or start the agent with the engine"},
	{"block size is not known", "give the agent -block-size if it stays"},
	{"kind is not told", "say the kinds by the agent's -groups, in the order of the engine's log, or upgrade the engine"},
	{"does not tell by which method", "name the method by the agent's -speculative"},
	{"is not known: ", "see the agent's -attention-chunk, or set VLLM_SERVER_DEV_MODE=1 for the engine"},
	{"hashes cannot be recomputed", "give the agent -hash-seed, the engine's PYTHONHASHSEED"},
	{"the index is full", "raise the scheduler's -index-memory"},
	{"the connection to NATS is lost", "see NATS"},
	{"less in the engine's cache than was promised", "see whether callers report the engine's own cached_tokens, of the member that served them"},
}

const elsewhere = "docs/OPERATIONS.md, \"Reasons that an agent gives\", says what to do"

func cure(explanation string) string {
	for _, c := range cures {
		if strings.Contains(explanation, c.has) {
			return c.do
		}
	}
	return elsewhere
}

func (d *examination) examineMembers() {
	list := d.fleet.GetMembers()
	switch n := len(list); {
	case n == 0:
		d.find(mend, "members", "there are none", "start an agent beside each engine, with this NATS and -pool "+d.fleet.GetScheduler().GetPool()+"; their /believed says whether a scheduler hears them")
	case d.expected > 0 && n < d.expected:
		d.find(mend, "members", fmt.Sprintf("there are %d of %d", n, d.expected), "look for agents that do not run, or whose /believed says that no scheduler believes them")
	case d.expected > 0 && n > d.expected:
		d.find(look, "members", fmt.Sprintf("there are %d, %d more than expected", n, n-d.expected), "")
	}
	exact := 0
	for _, m := range list {
		if d.examineMember(m) {
			exact++
		}
	}
	if exact > 0 {
		d.find(well, "members", fmt.Sprintf("%d of %d are EXACT and take part", exact, len(list)), "")
	}
}

// examineMember tells whether nothing is wrong with a member.
func (d *examination) examineMember(m *api.MemberState) bool {
	about := "member " + m.GetMember().GetId()
	before := len(d.findings)
	switch m.GetIneligible() {
	case api.Ineligible_INELIGIBLE_UNSPECIFIED:
	case api.Ineligible_INELIGIBLE_SILENT:
		d.find(mend, about, "its agent has sent nothing for "+chronicle.Age(m.GetCacheState().GetAgeMs()), "see whether the agent runs and reaches NATS; else the member is forgotten after the scheduler's -grace")
		return false // the rest follows from it
	case api.Ineligible_INELIGIBLE_UNREACHABLE:
		d.find(mend, about, "its agent does not reach the engine", "see whether the engine runs, and the agent's -engine")
		return false
	case api.Ineligible_INELIGIBLE_SLEEPING:
		d.find(look, about, "the engine sleeps", "POST /wake_up to the engine if it should not")
	case api.Ineligible_INELIGIBLE_CORDONED, api.Ineligible_INELIGIBLE_EVICTED, api.Ineligible_INELIGIBLE_DELETING:
		d.find(look, about, chronicle.Reason(m), "nothing if that is meant: it is picked only where no other can be")
	case api.Ineligible_INELIGIBLE_NOT_READY, api.Ineligible_INELIGIBLE_ENDED:
		d.find(mend, about, chronicle.Reason(m), "kubectl describe pod "+m.GetMember().GetPod()+": its conditions and events say why")
	default:
		d.find(mend, about, chronicle.Reason(m), "see the engine's log")
	}
	why := m.GetCacheState().GetExplanation()
	switch trust := m.GetCacheState().GetTrust(); trust {
	case api.Trust_TRUST_EXACT:
	case api.Trust_TRUST_SYNCING:
		d.find(look, about, "SYNCING: "+why, "ask again in some seconds; if it stays, "+cure(why))
	case api.Trust_TRUST_APPROXIMATE:
		d.find(look, about, "APPROXIMATE: "+why, cure(why))
	default:
		d.find(mend, about, chronicle.Trust(trust)+": "+why, cure(why))
	}
	if w := m.GetWarning(); w != "" {
		d.find(mend, about, w, "correct the agent's -address")
	}
	return len(d.findings) == before
}

func (d *examination) examineVersions() {
	ours := d.fleet.GetScheduler().GetRelease()
	others := make(map[string]int)
	for _, m := range d.fleet.GetMembers() {
		about := "member " + m.GetMember().GetId()
		if r := known(m.GetAgentRelease()); r != known(ours) {
			others[r]++
		}
		switch v := m.GetEngineVersion(); judged(v) {
		case unjudged:
			d.find(look, about, fmt.Sprintf("its engine's version %q is none that is known", v), "its answers are believed as its events are understood; see docs/COMPATIBILITY.md")
		case older:
			d.find(look, about, fmt.Sprintf("vLLM %s is older than any that was judged (%s to %s)", v, oldestJudged, newestJudged), "upgrade the engine")
		case newer:
			d.find(look, about, fmt.Sprintf("vLLM %s is newer than any that was judged (%s to %s)", v, oldestJudged, newestJudged), "see docs/COMPATIBILITY.md of a newer release of kvscout")
		}
	}
	var list []string
	for r, n := range others {
		list = append(list, fmt.Sprintf("%d of %s", n, r))
	}
	if len(list) > 0 {
		slices.Sort(list)
		d.find(look, "versions", fmt.Sprintf("the scheduler is of release %s, agents are not: %s", known(ours), strings.Join(list, ", ")), "finish the upgrade; docs/VERSIONS.md says in which order")
	}
}

func known(release string) string {
	if release == "" {
		return "unknown"
	}
	return release
}

// examineReports looks at what callers tell, without which nothing is learned of
// how true the answers were.
func (d *examination) examineReports() {
	var requests, predicted, cached uint64
	for _, m := range d.fleet.GetMembers() {
		requests += m.GetReportedRequests()
		predicted += m.GetPredictedCachedTokens()
		cached += m.GetReportedCachedTokens()
	}
	switch {
	case requests == 0 && d.fleet.GetDecisions() >= enough:
		d.find(look, "reports", fmt.Sprintf("of %d decisions none was reported with prompt_tokens and cached_tokens", d.fleet.GetDecisions()),
			"have proxies call Report, ask for usage in streams (stream_options), and start engines with --enable-prompt-tokens-details; -probe tells of the engines")
	case requests >= enough && float64(predicted) > 1.02*float64(cached):
		d.find(look, "reports", fmt.Sprintf("%d requests found %d tokens in caches, %d were promised", requests, cached, predicted),
			"see whether callers report the engine's own cached_tokens, of the member that served them")
	case requests > 0:
		d.find(well, "reports", fmt.Sprintf("%d requests found %d tokens in caches, %d were promised", requests, cached, predicted), "")
	}
}

// marks of the levels.
var marks = map[level]cell{well: {"ok  ", green}, look: {"look", yellow}, mend: {"MEND", red}}

// say tells the findings; what must be mended is an error.
func (d *examination) say() error {
	toMend, toLook := 0, 0
	for _, f := range d.findings {
		switch f.Level {
		case mend:
			toMend++
		case look:
			toLook++
		}
	}
	if d.output == "json" {
		encoder := json.NewEncoder(d.Out)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(struct {
			OK       bool      `json:"ok"`
			Findings []finding `json:"findings"`
		}{toMend == 0, d.findings}); err != nil {
			return err
		}
	} else {
		for _, f := range d.findings {
			d.tellFinding(f)
		}
		fmt.Fprintf(d.Out, "%d to mend, %d to look at\n", toMend, toLook)
	}
	if toMend > 0 {
		return errMend
	}
	return nil
}

// tellFinding writes a finding, within the width of a terminal.
func (d *examination) tellFinding(f finding) {
	m := marks[f.Level]
	for i, line := range wrap(f.About+": "+f.Text, d.width()-6) {
		if i == 0 {
			fmt.Fprintf(d.Out, "%s  %s\n", paint(m.text, m.colour, d.colours), line)
		} else {
			fmt.Fprintf(d.Out, "      %s\n", line)
		}
	}
	if f.Do == "" {
		return
	}
	for i, line := range wrap(f.Do, d.width()-10) {
		head := "   "
		if i == 0 {
			head = paint("do:", bold, d.colours)
		}
		fmt.Fprintf(d.Out, "      %s %s\n", head, line)
	}
}

// wrap breaks a text between words; a width below 20 breaks nothing.
func wrap(text string, width int) (lines []string) {
	if width < 20 {
		return []string{text}
	}
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case len([]rune(line))+1+len([]rune(word)) > width:
			lines = append(lines, line)
			line = word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}

// get reads a page, and says when the clock that stamped it was read.
func get(ctx context.Context, client *http.Client, url string) (page []byte, stamp time.Time, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, stamp, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return nil, stamp, err
	}
	defer answer.Body.Close()
	if page, err = io.ReadAll(io.LimitReader(answer.Body, maxPage)); err != nil {
		return nil, stamp, err
	}
	stamp, _ = http.ParseTime(answer.Header.Get("Date"))
	return page, stamp, nil
}
