package main

const (
	yellow, red = "yellow", "red"

	// of all prompt tokens that were picked for; of those that were reported.
	picked   = `scalar(sum(rate(kvscout_scheduler_hit_tokens_total{$$,stage="prompt"}[$__rate_interval])))`
	reported = `scalar(sum(rate(kvscout_scheduler_used_tokens_total{$$}[$__rate_interval])) + sum(rate(kvscout_scheduler_lost_tokens_total{$$}[$__rate_interval])))`
)

var dashboards = []dashboard{
	{
		uid: "kvscout-well", title: "kvscout: is it well", about: "What kvscout gains, whether it can be believed, and whether it serves.",
		rows: []row{
			{title: "Now", panels: []panel{
				{
					title: "Prompt tokens not computed", unit: "percentunit", see: "lost-tokens", number: true,
					about:   "Share of the prompt tokens of reported requests that engines found cached, by their own count.",
					queries: []query{{`sum(rate(kvscout_scheduler_used_tokens_total{$$}[$__rate_interval])) / ` + reported, "cached"}},
				},
				{
					title: "Gain over least load", unit: "percentunit", see: "lost-tokens", number: true,
					about:   "Share of prompt tokens that the picked members had cached, less that of the members with the fewest requests at the same moments. What the latter's caches would be under such a policy is not known.",
					queries: []query{{`(sum(rate(kvscout_scheduler_hit_tokens_total{$$,stage="routed"}[$__rate_interval])) - sum(rate(kvscout_scheduler_hit_tokens_total{$$,stage="least_load"}[$__rate_interval]))) / ` + picked, "gain"}},
				},
				{
					title: "Engines' worth of prefill saved", unit: "none", see: "lost-tokens", number: true,
					about:   "The gain as time of engines: 2 means that two more would be busy with prefill all the time, at the median speed that is learned.",
					queries: []query{{`(sum(rate(kvscout_scheduler_hit_tokens_total{$$,stage="routed"}[$__rate_interval])) - sum(rate(kvscout_scheduler_hit_tokens_total{$$,stage="least_load"}[$__rate_interval]))) / scalar(avg(kvscout_scheduler_prefill_tokens_per_second{$$,stat="median"}))`, "engines"}},
				},
				{
					title: "Members EXACT", unit: "percentunit", see: "trust", number: true,
					about:   "Share of the members whose cache state equals what their engine announced.",
					queries: []query{{`sum(kvscout_scheduler_members{$$,trust="exact"}) / sum(kvscout_scheduler_members{$$})`, "exact"}},
				},
				{
					title: "Schedulers ready", unit: "none", see: "when-a-scheduler-is-ready", number: true,
					about:   "Schedulers that are ready and hear their members over NATS.",
					queries: []query{{`sum(kvscout_scheduler_ready{$$} * kvscout_scheduler_connected{$$})`, "ready"}},
				},
				{
					title: "Alerts", unit: "none", see: "alerts", number: true, steps: []step{{1, red}},
					about:   "Alerts of deploy/alerts.yaml that fire.",
					queries: []query{{`count(ALERTS{alertname=~"Kvscout.+",alertstate="firing"}) or vector(0)`, "alerts"}},
				},
			}},
			{title: "Gain", panels: []panel{
				{
					title: "From prompts to hits", unit: "percentunit", see: "lost-tokens",
					about: "Shares of the prompt tokens that were picked for: any member had them (ideal), a candidate (feasible), the picked member (routed), the one with the fewest requests (least load); and of those that were reported, what engines found (delivered).",
					queries: []query{
						{`sum by (stage) (rate(kvscout_scheduler_hit_tokens_total{$$,stage=~"ideal|feasible|routed|least_load"}[$__rate_interval])) / ` + picked, "{{stage}}"},
						{`sum(rate(kvscout_scheduler_used_tokens_total{$$}[$__rate_interval])) / ` + reported, "delivered"},
					},
				},
				{
					title: "Prompt tokens by what became of them", unit: "percentunit", see: "lost-tokens", stacked: true, full: true,
					about: "Each token of reported requests was used, or lost to one cause.",
					queries: []query{
						{`sum(rate(kvscout_scheduler_used_tokens_total{$$}[$__rate_interval])) / ` + reported, "used"},
						{`sum by (cause) (rate(kvscout_scheduler_lost_tokens_total{$$}[$__rate_interval])) / ` + reported, "{{cause}}"},
					},
				},
			}},
			{title: "Truth", panels: []panel{
				{
					title: "Promised and found", unit: "short", see: "metrics",
					about:   "Cached tokens a second that were predicted for reported requests, and those that engines found.",
					queries: []query{{`sum by (stage) (rate(kvscout_scheduler_delivered_tokens_total{$$,stage=~"predicted|delivered"}[$__rate_interval]))`, "{{stage}}"}},
				},
				{
					title: "Members by trust", unit: "none", see: "trust", stacked: true,
					about:   "How far the members' cache states are believed.",
					queries: []query{{`sum by (trust) (kvscout_scheduler_members{$$})`, "{{trust}}"}},
				},
				{
					title: "Promised beyond what was found", unit: "none", see: "metrics", steps: []step{{16, yellow}, {160, red}},
					about:   "Cached tokens of a request that were promised and not found, the mean of a member's last 32 reports: the member with the most, and the median.",
					queries: []query{{`max by (stat) (kvscout_scheduler_promised_excess{$$,stat=~"median|max"})`, "{{stat}}"}},
				},
			}},
			{title: "Service", panels: []panel{
				{
					title: "Answers", unit: "reqps", see: "what-an-answer-says", stacked: true,
					about:   "Answers to Pick and Score a second, and whether they stand on exact prefixes.",
					queries: []query{{`sum by (method, fallback) (rate(kvscout_scheduler_decisions_total{$$}[$__rate_interval]))`, "{{method}}, fallback: {{fallback}}"}},
				},
				{
					title: "Time to decide", unit: "s", see: "metrics", steps: []step{{.1, red}},
					about: "From a prompt of tokens to the answer, without waiting for room.",
					queries: []query{
						{`histogram_quantile(0.5, sum by (le) (rate(kvscout_scheduler_decision_duration_seconds_bucket{$$}[$__rate_interval])))`, "half"},
						{`histogram_quantile(0.99, sum by (le) (rate(kvscout_scheduler_decision_duration_seconds_bucket{$$}[$__rate_interval])))`, "99 of 100"},
					},
				},
				{
					title: "Calls by code", unit: "reqps", see: "metrics", stacked: true,
					about:   "Calls of the API a second by what they were answered.",
					queries: []query{{`sum by (rpc_response_status_code) (rate(rpc_server_call_duration_seconds_count{$$,rpc_method=~"kvscout.+"}[$__rate_interval]))`, "{{rpc_response_status_code}}"}},
				},
			}},
		},
	},
	{
		uid: "kvscout-why", title: "kvscout: why is it slow or wrong", about: "Where tokens and time are lost, and which part does it, from the caller to the engine.",
		rows: []row{
			{title: "Lost tokens", panels: []panel{
				{
					title: "Lost by cause", unit: "percentunit", see: "lost-tokens", stacked: true,
					about:   "Shares of the prompt tokens of reported requests that something would change.",
					queries: []query{{`sum by (cause) (rate(kvscout_scheduler_lost_tokens_total{$$,cause!~"unseen|uncacheable"}[$__rate_interval])) / ` + reported, "{{cause}}"}},
				},
				{
					title: "Evicted, by the cache that would have kept it", unit: "short", see: "lost-tokens", stacked: true,
					about:   "Evicted tokens a second, by how many times the GPU pool a cache must be to have kept them: 2x is host memory as large as the pool.",
					queries: []query{{`sum by (kept) (rate(kvscout_scheduler_evicted_tokens_total{$$}[$__rate_interval]))`, "{{kept}}"}},
				},
				{
					title: "Cost that was avoided by diversion", unit: "s", see: "lost-tokens",
					about:   "Time a second that requests would have cost besides at the members that had more of their prompts.",
					queries: []query{{`sum(rate(kvscout_scheduler_diversion_cost_seconds_total{$$}[$__rate_interval]))`, "avoided"}},
				},
			}},
			{title: "Decisions", panels: []panel{
				{
					title: "Reasons", unit: "reqps", see: "what-an-answer-says", stacked: true,
					about:   "Why the first is first: least cost, one of several as good, the session's last, the only one, or another policy.",
					queries: []query{{`sum by (reason) (rate(kvscout_scheduler_decisions_total{$$}[$__rate_interval]))`, "{{reason}}"}},
				},
				{
					title: "Sessions that moved", unit: "reqps", see: "sessions", stacked: true,
					about:   "Requests a second that left their session's last member.",
					queries: []query{{`sum by (reason) (rate(kvscout_scheduler_sticky_broken_total{$$}[$__rate_interval]))`, "{{reason}}"}},
				},
				{
					title: "Reports and lost reservations", unit: "reqps", see: "metrics",
					about: "What became of requests by report; reservations that no report ended.",
					queries: []query{
						{`sum by (outcome) (rate(kvscout_scheduler_reports_total{$$}[$__rate_interval]))`, "{{outcome}}"},
						{`sum by (reason) (rate(kvscout_scheduler_reservations_lost_total{$$}[$__rate_interval]))`, "lost: {{reason}}"},
					},
				},
				{
					title: "Members that fail", unit: "reqps", see: "members-that-fail", steps: []step{{.1, yellow}},
					about: "Reports a second that a member failed, and times that one was left out for it.",
					queries: []query{
						{`sum(rate(kvscout_scheduler_member_failures_total{$$}[$__rate_interval]))`, "failures"},
						{`sum(rate(kvscout_scheduler_member_pauses_total{$$}[$__rate_interval]))`, "left out"},
					},
				},
			}},
			{title: "Time before a decision", panels: []panel{
				{
					title: "Waiting for room", unit: "none", see: "requests-that-wait",
					about:   "Requests that wait for a member to have room.",
					queries: []query{{`sum(kvscout_scheduler_queue_waiting{$$})`, "waiting"}},
				},
				{
					title: "Turning prompts into tokens", unit: "s", see: "metrics", steps: []step{{.5, yellow}},
					about: "For which engines are asked where prompts are text.",
					queries: []query{
						{`histogram_quantile(0.5, sum by (le) (rate(kvscout_scheduler_intake_duration_seconds_bucket{$$}[$__rate_interval])))`, "half"},
						{`histogram_quantile(0.99, sum by (le) (rate(kvscout_scheduler_intake_duration_seconds_bucket{$$}[$__rate_interval])))`, "99 of 100"},
					},
				},
				{
					title: "Engines asked for tokens", unit: "reqps", see: "metrics", stacked: true,
					about: "Requests a second to engines, by outcome; prompts that stayed without tokens.",
					queries: []query{
						{`sum by (outcome) (rate(kvscout_scheduler_intake_calls_total{$$}[$__rate_interval]))`, "{{outcome}}"},
						{`sum(rate(kvscout_scheduler_intake_unresolved_total{$$}[$__rate_interval]))`, "without tokens"},
					},
				},
			}},
			{title: "Cache states at the schedulers", panels: []panel{
				{
					title: "Events on their way", unit: "s", see: "metrics", steps: []step{{1, red}},
					about: "From the engine's stamp on its events to the index that has them, by the clocks of both machines; and to its agent.",
					queries: []query{
						{`histogram_quantile(0.99, sum by (le) (rate(kvscout_scheduler_event_lag_seconds_bucket{$$}[$__rate_interval])))`, "index, 99 of 100"},
						{`histogram_quantile(0.99, sum by (le) (rate(kvscout_agent_event_lag_seconds_bucket[$__rate_interval])))`, "agent, 99 of 100"},
					},
				},
				{
					title: "Faults and resyncs", unit: "short", see: "reasons-that-a-scheduler-adds", steps: []step{{.1, yellow}},
					about: "What showed that a cache state is not its agent's, a second; cache states forgotten, to be fetched again.",
					queries: []query{
						{`sum by (kind) (rate(kvscout_scheduler_ingest_faults_total{$$}[$__rate_interval]))`, "{{kind}}"},
						{`sum(rate(kvscout_scheduler_ingest_resyncs_total{$$}[$__rate_interval]))`, "resyncs"},
					},
				},
				{
					title: "Messages that changed nothing", unit: "short", see: "metrics", stacked: true,
					about:   "Messages of agents a second, by why: repeated and ignored are harmless.",
					queries: []query{{`sum by (reason) (rate(kvscout_scheduler_ingest_messages_discarded_total{$$}[$__rate_interval]))`, "{{reason}}"}},
				},
				{
					title: "Index", unit: "bytes", see: "memory",
					about: "Memory of the index, and of what is remembered of prompts.",
					queries: []query{
						{`sum by (instance) (kvscout_scheduler_index_memory_bytes{$$})`, "{{instance}} index"},
						{`sum by (instance) (kvscout_scheduler_books_memory_bytes{$$})`, "{{instance}} books"},
					},
				},
			}},
			{title: "Agents and engines", panels: []panel{
				{
					title: "Ranks by trust", unit: "none", see: "reasons-that-an-agent-gives", stacked: true,
					about:   "What agents say of their ranks' cache states themselves.",
					queries: []query{{`sum by (trust) (kvscout_agent_trust)`, "{{trust}}"}},
				},
				{
					title: "Batches of events", unit: "short", see: "metrics",
					about: "Batches a second: applied, asked for again, gone for good, unreadable.",
					queries: []query{
						{`sum(rate(kvscout_agent_event_batches_total[$__rate_interval]))`, "applied"},
						{`sum(rate(kvscout_agent_event_batches_replayed_total[$__rate_interval]))`, "replayed"},
						{`sum(rate(kvscout_agent_event_batches_lost_total[$__rate_interval]))`, "lost"},
						{`sum(rate(kvscout_agent_event_batches_unreadable_total[$__rate_interval]))`, "unreadable"},
					},
				},
				{
					title: "Polls of engines", unit: "reqps", see: "metrics", stacked: true,
					about:   "Polls of the engines' HTTP servers a second, by outcome.",
					queries: []query{{`sum by (outcome) (rate(kvscout_agent_engine_polls_total[$__rate_interval]))`, "{{outcome}}"}},
				},
				{
					title: "Speed of prefill", unit: "short", see: "metrics",
					about:   "Tokens a second that members compute, as learned: the slowest, the median, the quickest.",
					queries: []query{{`avg by (stat) (kvscout_scheduler_prefill_tokens_per_second{$$})`, "{{stat}}"}},
				},
			}},
		},
	},
}
