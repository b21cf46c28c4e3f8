package e2e

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

// prometheusProgram is a program of the real Prometheus, from a variable of the
// environment or the path.
func prometheusProgram(t *testing.T, variable, name string) string {
	t.Helper()
	path, err := exec.LookPath(cmp.Or(os.Getenv(variable), name))
	switch {
	case err == nil:
		return path
	case os.Getenv("KVSCOUT_REQUIRE_PROMETHEUS") != "":
		t.Fatal(err)
	}
	t.Skipf("no %s: make test-prometheus", name)
	return ""
}

// Time of the played series: each fault lasts from begins to ends.
const (
	every            = time.Minute
	begins, ends     = time.Hour, 90 * time.Minute
	played           = 3 * time.Hour
	firing, quiet    = ends - time.Minute, played - time.Minute
	stepsTo, stepsIn = int(begins / every), int((ends - begins) / every)
	stepsAfter       = int((played - ends) / every)
)

// gauge has one value, and another in the fault.
func gauge(usual, fault float64) string {
	return fmt.Sprintf("%vx%d %vx%d %vx%d", usual, stepsTo-1, fault, stepsIn-1, usual, stepsAfter)
}

// counter grows by one number every minute, and by another in the fault.
func counter(usual, fault float64) string {
	return fmt.Sprintf("0+%vx%d %v+%vx%d %v+%vx%d", usual, stepsTo-1,
		usual*float64(stepsTo-1)+fault, fault, stepsIn-1,
		usual*float64(stepsTo-1)+fault*float64(stepsIn)+usual, usual, stepsAfter)
}

// away is not scraped in the fault.
func away(series string) string {
	parts := strings.Fields(series)
	return fmt.Sprintf("%s _x%d %s", parts[0], stepsIn, parts[2])
}

// healthy are all series that alerts watch, of a scheduler with four members and
// one agent, under load.
func healthy() map[string]string {
	const second = 60 // of rates
	return map[string]string{
		`kvscout_scheduler_ready{instance="s"}`:                                                 gauge(1, 1),
		`kvscout_scheduler_connected{instance="s"}`:                                             gauge(1, 1),
		`kvscout_scheduler_members{instance="s",trust="exact"}`:                                 gauge(4, 4),
		`kvscout_scheduler_members{instance="s",trust="syncing"}`:                               gauge(0, 0),
		`kvscout_scheduler_members{instance="s",trust="unknown"}`:                               gauge(0, 0),
		`rpc_server_call_duration_seconds_count{instance="s"}`:                                  counter(200*second, 200*second),
		`kvscout_scheduler_ingest_resyncs_total{instance="s"}`:                                  counter(.01*second, .01*second),
		`kvscout_scheduler_ingest_snapshots_total{instance="s",outcome="complete"}`:             counter(.01*second, .01*second),
		`kvscout_scheduler_ingest_snapshots_total{instance="s",outcome="no_responder"}`:         counter(0, 0),
		`kvscout_scheduler_ingest_messages_discarded_total{instance="s",reason="repeated"}`:     counter(second, second),
		`kvscout_scheduler_ingest_messages_discarded_total{instance="s",reason="dropped"}`:      counter(0, 0),
		`kvscout_scheduler_ingest_messages_discarded_total{instance="s",reason="wrong_member"}`: counter(0, 0),
		`kvscout_scheduler_ingest_faults_total{instance="s",kind="epoch_back"}`:                 counter(0, 0),
		`kvscout_scheduler_ingest_announcements_refused_total{instance="s"}`:                    counter(0, 0),
		`kvscout_scheduler_index_entries_shed_total{instance="s"}`:                              counter(0, 0),
		`kvscout_scheduler_decisions_total{instance="s",fallback="true"}`:                       counter(2*second, 2*second),
		`kvscout_scheduler_decisions_total{instance="s",fallback="false"}`:                      counter(98*second, 98*second),
		`kvscout_scheduler_decision_duration_seconds_bucket{instance="s",le="0.001"}`:           counter(100*second, 100*second),
		`kvscout_scheduler_decision_duration_seconds_bucket{instance="s",le="0.1"}`:             counter(100*second, 100*second),
		`kvscout_scheduler_decision_duration_seconds_bucket{instance="s",le="1"}`:               counter(100*second, 100*second),
		`kvscout_scheduler_decision_duration_seconds_bucket{instance="s",le="+Inf"}`:            counter(100*second, 100*second),
		`kvscout_scheduler_intake_calls_total{instance="s",outcome="failed"}`:                   counter(0, 0),
		`kvscout_scheduler_delivered_tokens_total{instance="s",stage="prompt"}`:                 counter(1e5*second, 1e5*second),
		`kvscout_scheduler_delivered_tokens_total{instance="s",stage="predicted"}`:              counter(5e4*second, 5e4*second),
		`kvscout_scheduler_delivered_tokens_total{instance="s",stage="delivered"}`:              counter(5e4*second, 5e4*second),
		`kvscout_scheduler_calls_refused_total{instance="s"}`:                                   counter(0, 0),
		`kvscout_scheduler_connections_refused_total{instance="s"}`:                             counter(0, 0),
		`kvscout_scheduler_panics_total{instance="s"}`:                                          counter(0, 0),
		`kvscout_agent_connected{instance="a",rank="0"}`:                                        gauge(1, 1),
		`kvscout_agent_believed{instance="a",rank="0"}`:                                         gauge(1, 1),
		`kvscout_agent_trust{instance="a",rank="0",trust="exact"}`:                              gauge(1, 1),
		`kvscout_agent_event_batches_lost_total{instance="a",rank="0"}`:                         counter(0, 0),
		`kvscout_agent_event_batches_unreadable_total{instance="a",rank="0"}`:                   counter(0, 0),
		`kvscout_agent_mirror_blocks_dropped_total{instance="a",rank="0"}`:                      counter(0, 0),
		`kvscout_agent_engine_polls_total{instance="a",outcome="ok"}`:                           counter(second, second),
		`kvscout_agent_engine_polls_total{instance="a",outcome="error"}`:                        counter(0, 0),
		`kvscout_scheduler_ingest_messages_discarded_total{instance="s",reason="malformed"}`:    counter(0, 0),
		`kvscout_agent_trust{instance="b",rank="0",trust="exact"}`:                              gauge(0, 0), // never was: no alert
		`kvscout_agent_connected{instance="b",rank="0"}`:                                        gauge(0, 0),
	}
}

// rulesFault is what a fault changes in the series of a fleet, and the alerts
// that fire then, and no others.
type rulesFault struct {
	name  string
	fires []string
	set   map[string]string
	gone  string // beginning of the series that are not scraped then
}

var rulesFaults = []rulesFault{
	{name: "nothing"},
	{name: "a rolling restart of engines", set: map[string]string{
		`kvscout_scheduler_members{instance="s",trust="exact"}`:    strings.Repeat("3 4x3 ", int(played/every)/5),
		`kvscout_scheduler_members{instance="s",trust="syncing"}`:  strings.Repeat("1 0x3 ", int(played/every)/5),
		`kvscout_scheduler_ingest_resyncs_total{instance="s"}`:     counter(6, 6),
		`kvscout_agent_trust{instance="a",rank="0",trust="exact"}`: strings.Repeat("0 1x3 ", int(played/every)/5),
		`kvscout_agent_connected{instance="a",rank="0"}`:           strings.Repeat("0 1x3 ", int(played/every)/5),
	}},
	{name: "half an hour of twice the load", set: map[string]string{
		`rpc_server_call_duration_seconds_count{instance="s"}`:                     counter(12000, 24000),
		`kvscout_scheduler_decisions_total{instance="s",fallback="false"}`:         counter(5880, 11760),
		`kvscout_scheduler_decisions_total{instance="s",fallback="true"}`:          counter(120, 240),
		`kvscout_scheduler_delivered_tokens_total{instance="s",stage="predicted"}`: counter(3000000.0, 6000000.0),
		`kvscout_scheduler_delivered_tokens_total{instance="s",stage="delivered"}`: counter(3000000.0, 5940000.0),
	}},
	{name: "the scheduler is gone", fires: []string{"KvscoutSchedulerDown"}, gone: "kvscout_scheduler_"},
	{name: "it does not become ready", fires: []string{"KvscoutSchedulerNotReady"}, set: map[string]string{`kvscout_scheduler_ready{instance="s"}`: gauge(1, 0)}},
	{name: "NATS is cut off", fires: []string{"KvscoutSchedulerCutOff"}, set: map[string]string{`kvscout_scheduler_connected{instance="s"}`: gauge(1, 0)}},
	{name: "all members leave", fires: []string{"KvscoutNoMembers"}, set: map[string]string{`kvscout_scheduler_members{instance="s",trust="exact"}`: gauge(4, 0)}},
	{name: "a member stays SYNCING", fires: []string{"KvscoutMembersSyncing"}, set: map[string]string{
		`kvscout_scheduler_members{instance="s",trust="exact"}`: gauge(4, 3), `kvscout_scheduler_members{instance="s",trust="syncing"}`: gauge(0, 1)}},
	{name: "an engine loses its events", fires: []string{"KvscoutMembersUnknown"}, set: map[string]string{
		`kvscout_scheduler_members{instance="s",trust="exact"}`: gauge(4, 3), `kvscout_scheduler_members{instance="s",trust="unknown"}`: gauge(0, 1)}},
	{name: "cache states are lost again and again", fires: []string{"KvscoutResyncs"}, set: map[string]string{`kvscout_scheduler_ingest_resyncs_total{instance="s"}`: counter(0.6, 12)}},
	{name: "agents answer no snapshot", fires: []string{"KvscoutFailedSnapshots"}, set: map[string]string{
		`kvscout_scheduler_ingest_snapshots_total{instance="s",outcome="no_responder"}`: counter(0, 12)}},
	{name: "messages are dropped", fires: []string{"KvscoutBusDrops"}, set: map[string]string{
		`kvscout_scheduler_ingest_messages_discarded_total{instance="s",reason="dropped"}`: counter(0, 6)}},
	{name: "an agent speaks for another member", fires: []string{"KvscoutRefusedMessages"}, set: map[string]string{
		`kvscout_scheduler_ingest_messages_discarded_total{instance="s",reason="wrong_member"}`: counter(0, 6)}},
	{name: "the index is full", fires: []string{"KvscoutIndexShedding"}, set: map[string]string{`kvscout_scheduler_index_entries_shed_total{instance="s"}`: counter(0, 600)}},
	{name: "prompts come without tokens", fires: []string{"KvscoutFallbacks"}, set: map[string]string{
		`kvscout_scheduler_decisions_total{instance="s",fallback="true"}`: counter(120, 3000), `kvscout_scheduler_decisions_total{instance="s",fallback="false"}`: counter(5880, 3000)}},
	{name: "no engine makes tokens", fires: []string{"KvscoutUnresolvedPrompts"}, set: map[string]string{
		`kvscout_scheduler_intake_calls_total{instance="s",outcome="failed"}`: counter(0, 120)}},
	{name: "decisions are slow", fires: []string{"KvscoutSlowDecisions"}, set: map[string]string{
		`kvscout_scheduler_decision_duration_seconds_bucket{instance="s",le="0.001"}`: counter(6000, 4000), `kvscout_scheduler_decision_duration_seconds_bucket{instance="s",le="0.1"}`: counter(6000, 5800)}},
	{name: "engines find less than was promised", fires: []string{"KvscoutPredictionsTooHigh"}, set: map[string]string{
		`kvscout_scheduler_delivered_tokens_total{instance="s",stage="delivered"}`: counter(3000000.0, 1400000.0)}},
	{name: "too many calls", fires: []string{"KvscoutRefusedCalls"}, set: map[string]string{`kvscout_scheduler_calls_refused_total{instance="s"}`: counter(0, 20)}},
	{name: "a call panics", fires: []string{"KvscoutPanics"}, set: map[string]string{`kvscout_scheduler_panics_total{instance="s"}`: counter(0, 2)}},
	{name: "an event stream is lost", fires: []string{"KvscoutEventStreamLost"}, set: map[string]string{`kvscout_agent_connected{instance="a",rank="0"}`: gauge(1, 0)}},
	{name: "an agent is refused", fires: []string{"KvscoutAgentNotBelieved"}, set: map[string]string{`kvscout_agent_believed{instance="a",rank="0"}`: gauge(1, 0)}},
	{name: "a rank is no longer EXACT", fires: []string{"KvscoutAgentNotExact"}, set: map[string]string{`kvscout_agent_trust{instance="a",rank="0",trust="exact"}`: gauge(1, 0)}},
	{name: "batches are gone for good", fires: []string{"KvscoutLostBatches"}, set: map[string]string{`kvscout_agent_event_batches_lost_total{instance="a",rank="0"}`: counter(0, 10)}},
	{name: "events cannot be read", fires: []string{"KvscoutUnreadableEvents"}, set: map[string]string{`kvscout_agent_event_batches_unreadable_total{instance="a",rank="0"}`: counter(0, 10)}},
	{name: "the mirror is full", fires: []string{"KvscoutMirrorFull"}, set: map[string]string{`kvscout_agent_mirror_blocks_dropped_total{instance="a",rank="0"}`: counter(0, 1000)}},
	{name: "an engine's HTTP server is silent", fires: []string{"KvscoutEngineSilent"}, set: map[string]string{
		`kvscout_agent_engine_polls_total{instance="a",outcome="ok"}`: counter(60, 2), `kvscout_agent_engine_polls_total{instance="a",outcome="error"}`: counter(0, 58)}},
}

type (
	sample  = map[string]any
	rawTest = map[string]any
)

// TestPrometheusAlertsFireInTheirFault plays every fault to the real rules: the
// alerts that are its own fire, no other does, and none before or long after.
func TestPrometheusAlertsFireInTheirFault(t *testing.T) {
	t.Parallel()
	promtool := prometheusProgram(t, "PROMTOOL", "promtool")
	fires := make(map[string]bool)
	var tests []rawTest
	for _, f := range rulesFaults {
		series := healthy()
		for name, values := range f.set {
			if series[name] == "" {
				t.Errorf("%s: %s is none of the series of a healthy fleet", f.name, name)
			}
			series[name] = values
		}
		var inputs, expected []sample
		for _, name := range slices.Sorted(maps.Keys(series)) {
			if f.gone != "" && strings.HasPrefix(name, f.gone) {
				series[name] = away(series[name])
			}
			inputs = append(inputs, sample{"series": name, "values": series[name]})
		}
		for _, alert := range f.fires {
			fires[alert] = true
			expected = append(expected, sample{"labels": fmt.Sprintf(`{alertname=%q}`, alert), "value": 1})
		}
		at := func(when time.Duration, want []sample) sample {
			return sample{"expr": `count by (alertname) (ALERTS{alertstate="firing"})`, "eval_time": when.String(), "exp_samples": want}
		}
		tests = append(tests, rawTest{"name": f.name, "interval": every.String(), "input_series": inputs,
			"promql_expr_test": []sample{at(begins-every, nil), at(firing, expected), at(quiet, nil)}})
	}
	for _, a := range alerts(t) {
		if !fires[a.Alert] {
			t.Errorf("no fault makes %s fire", a.Alert)
		}
	}
	checkRules(t, promtool, "../deploy/alerts.yaml", tests)
}

// TestPrometheusRecordingRules holds them against what can be reckoned by hand.
func TestPrometheusRecordingRules(t *testing.T) {
	t.Parallel()
	promtool := prometheusProgram(t, "PROMTOOL", "promtool")
	inputs := []sample{}
	for series, perSecond := range map[string]float64{
		`kvscout_scheduler_hit_tokens_total{stage="prompt"}`:             10_000,
		`kvscout_scheduler_hit_tokens_total{stage="ideal"}`:              8000,
		`kvscout_scheduler_hit_tokens_total{stage="feasible"}`:           7500,
		`kvscout_scheduler_hit_tokens_total{stage="routed"}`:             7000,
		`kvscout_scheduler_hit_tokens_total{stage="least_load"}`:         2000,
		`kvscout_scheduler_used_tokens_total`:                            6000,
		`kvscout_scheduler_lost_tokens_total{cause="unseen"}`:            1500,
		`kvscout_scheduler_lost_tokens_total{cause="evicted"}`:           500,
		`kvscout_scheduler_decision_duration_seconds_bucket{le="0.001"}`: 98,
		`kvscout_scheduler_decision_duration_seconds_bucket{le="0.002"}`: 100,
		`kvscout_scheduler_decision_duration_seconds_bucket{le="+Inf"}`:  100,
	} {
		inputs = append(inputs, sample{"series": series, "values": fmt.Sprintf("0+%vx20", every.Seconds()*perSecond)})
	}
	inputs = append(inputs, sample{"series": `kvscout_scheduler_prefill_tokens_per_second{stat="median"}`, "values": "2500x20"})
	var tests []sample
	for expr, want := range map[string][]sample{
		"stage:kvscout_scheduler_hit_tokens:share5m": {
			{"labels": `{stage="ideal"}`, "value": .8}, {"labels": `{stage="feasible"}`, "value": .75},
			{"labels": `{stage="routed"}`, "value": .7}, {"labels": `{stage="least_load"}`, "value": .2},
		},
		"kvscout:cached:share5m":                      {{"labels": "{}", "value": .75}},
		"kvscout:gained_tokens:rate5m":                {{"labels": "{}", "value": 5000}},
		"kvscout:gained_engines:rate5m":               {{"labels": "{}", "value": 2}},
		"cause:kvscout_scheduler_lost_tokens:share5m": {{"labels": `{cause="unseen"}`, "value": .1875}, {"labels": `{cause="evicted"}`, "value": .0625}},
		"kvscout:decision_seconds:p99_5m":             {{"labels": "{}", "value": .0015}},
	} {
		tests = append(tests, sample{"expr": "round(" + expr + ", 1e-6)", "eval_time": "15m", "exp_samples": want})
	}
	checkRules(t, promtool, "../deploy/recordings.yaml", []rawTest{{"name": "gain", "interval": every.String(), "input_series": inputs, "promql_expr_test": tests}})
}

// checkRules lets promtool check a file of rules and play tests to them.
func checkRules(t *testing.T, promtool, rules string, tests []rawTest) {
	t.Helper()
	path, err := filepath.Abs(rules)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), promtool, "check", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	text, err := yaml.Marshal(map[string]any{"rule_files": []string{path}, "evaluation_interval": every.String(), "tests": tests})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "tests.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), promtool, "test", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
