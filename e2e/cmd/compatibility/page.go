package main

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/kvscout/kvscout/e2e/realvllm"
)

const head = `# Compatibility

For whoever runs vLLM beside kvscout, and asks what is exact with a release, and what to set.

What kvscout promised beside real vLLM engines on CPU, and what they then did, release by release. This page is made by ` + "`make test-vllm-all`" + `
from the results in [compatibility](compatibility); ` + "`make test-vllm-0.28.0`" + ` runs one release. Every request is sent alone and judged by the engine's own
` + "`cached_tokens`" + `: *exact* is equal, *over* more than the engine had, *under* less.

`

// feature is a column: the phases that show it.
type feature struct {
	name string
	cell func(realvllm.Result) string
}

var features = []feature{
	{"events", func(r realvllm.Result) string {
		return r.Wire.Events + counts(r, "full", "sequential, with evictions", "turns")
	}},
	{"replay, agent restarted", func(r realvllm.Result) string { return counts(r, "full", "after a restart of the agent") }},
	{"tells its endpoints", func(r realvllm.Result) string { return yes(r.Wire.Told) }},
	{"salts", func(r realvllm.Result) string {
		if !r.Wire.Salted && r.Wire.Events != "" {
			return "not in its events" + counts(r, "full", "salts")
		}
		return counts(r, "full", "salts")
	}},
	{"LoRA", func(r realvllm.Result) string { return counts(r, "full", "adapters") }},
	{"ranks", func(r realvllm.Result) string { return counts(r, "ranks") }},
	{"offloading", func(r realvllm.Result) string { return counts(r, "offload") }},
	{"sliding + full", func(r realvllm.Result) string { return counts(r, "hybrid") }},
	{"hybrid offloading", func(r realvllm.Result) string { return counts(r, "hybrid, offload") }},
	{"decode engine", func(r realvllm.Result) string { return counts(r, "decode") }},
	{"operated", func(r realvllm.Result) string { return counts(r, "operated") }},
	{"operated, offloading", func(r realvllm.Result) string { return counts(r, "operated, offload") }},
	{"special requests", func(r realvllm.Result) string { return counts(r, "special") }},
	{"render", func(r realvllm.Result) string {
		switch {
		case r.Wire.Render == http.StatusOK:
			return "yes"
		case r.Wire.RenderAsked == http.StatusOK:
			return "when asked to"
		case r.Wire.Render == 0:
			return "-"
		}
		return "no"
	}},
}

// advice is what to set for the releases that need it.
type advice struct {
	what  string
	needs func(realvllm.Result) bool
}

var advices = []advice{
	{"Engine: `\"publisher\":\"zmq\"` in `--kv-events-config`; the default publishes nothing.", func(r realvllm.Result) bool { return minor(r.Release) < 12 }},
	{"Agent: `-events tcp://HOST:5557 -replay tcp://HOST:5657`, unless they are at these ports of the engine's host.", func(r realvllm.Result) bool { return !r.Wire.Told && r.Wire.Events != "" }},
	{"Engine: `--enable-scale-out`, so that chats with images and truncated prompts have tokens.", func(r realvllm.Result) bool {
		return r.Wire.Render != http.StatusOK && r.Wire.RenderAsked == http.StatusOK
	}},
	{"Nothing helps: salted prompts get no credit.", func(r realvllm.Result) bool { return !r.Wire.Salted && r.Wire.Events != "" }},
}

func render(list []realvllm.Result) string {
	var b strings.Builder
	b.WriteString(head)
	b.WriteString("## Releases and features\n\n| vLLM |")
	for _, f := range features {
		fmt.Fprintf(&b, " %s |", f.name)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(features)) + "\n")
	for _, r := range list {
		fmt.Fprintf(&b, "| %s |", r.Release)
		for _, f := range features {
			cell := strings.TrimPrefix(f.cell(r), ", ")
			if cell == "" {
				cell = "-"
			}
			fmt.Fprintf(&b, " %s |", cell)
		}
		b.WriteByte('\n')
	}
	b.WriteString("\n`-`: not run with this release. Releases between those of the table speak one of their dialects.\n*Operated*: reset, put to sleep, paused, its adapters and weights replaced, while nobody asked it anything; what was cached before is judged.\n\n## What to set\n\n| releases | setting |\n|---|---|\n")
	for _, a := range advices {
		var who []string
		for _, r := range list {
			if a.needs(r) {
				who = append(who, r.Release)
			}
		}
		if len(who) > 0 {
			fmt.Fprintf(&b, "| %s | %s |\n", strings.Join(who, ", "), a.what)
		}
	}
	if slices.ContainsFunc(list, func(r realvllm.Result) bool { return len(r.Wire.Groups) > 0 }) {
		b.WriteString("\n## Groups of a hybrid model\n\n| vLLM | its events name |\n|---|---|\n")
	}
	for _, r := range list {
		if len(r.Wire.Groups) > 0 {
			fmt.Fprintf(&b, "| %s | %s |\n", r.Release, strings.Join(r.Wire.Groups, "; "))
		}
	}
	b.WriteString("\n## Phases\n\n" + late + phases(list))
	for _, r := range list {
		if has(r, "special") {
			b.WriteString("\n" + special(r))
			break
		}
	}
	return b.String()
}

// late explains a reason that says more of the machine than of the release.
const late = `Where the reason is tokens that the events lack, the machine was too busy: the engine's counters came long before its events, so that kvscout
stopped believing them for a while. Such a run is worth repeating on a quiet machine.

`

func phases(list []realvllm.Result) string {
	var b strings.Builder
	b.WriteString("| vLLM | engine | phase | judged | exact | over | under | trust |\n|---|---|---|---|---|---|---|---|\n")
	for _, r := range list {
		for _, p := range r.Phases {
			if p.Engine == "special" || p.Cannot != "" {
				continue
			}
			trust := p.Trust
			if p.Why != "" {
				trust += ": " + p.Why
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %d | %d | %d | %d | %s |\n", r.Release, p.Engine, p.Name, p.Judged, p.Exact, p.Over, p.Under, trust)
		}
	}
	return b.String()
}

// special is what became of requests that ask for more than the next tokens.
func special(r realvllm.Result) string {
	var b strings.Builder
	fmt.Fprintf(&b, `## Special requests

Each body was sent to vLLM %s twice; the second time it was given to kvscout first. The tokens are those of all its requests together.
Of several prompts in one body kvscout ranks by the first, and the engine counts the last: here both are cached alike.

| request | judged | predicted tokens | the engine's | exact | over | under |
|---|---|---|---|---|---|---|
`, r.Release)
	for _, p := range r.Phases {
		if p.Engine == "special" && p.Judged > 0 {
			fmt.Fprintf(&b, "| %s | %d | %d | %d | %d | %d | %d |\n", p.Name, p.Judged, p.Predicted, p.Cached, p.Exact, p.Over, p.Under)
		}
	}
	b.WriteString(unjudged)
	return b.String()
}

// unjudged are requests that no engine on CPU serves beside a text model.
const unjudged = `
Not judged here: prompts of embeddings have no tokens, so load decides and 0 is predicted; pooling by last token follows the same rule as a completion,
pooling by token (` + "`token_embed`, `token_classify`" + `) and ` + "`skip_reading_prefix_cache`" + ` skip the cache, which callers say by ` + "`skips_prefix_cache`" + `;
multimodal items are part of the keys, with the identifiers and offsets that the render endpoint gives.
`

// counts says how many of some phases' requests were exact; with no names of all
// phases of the engine. Empty: none was judged.
func counts(r realvllm.Result, engine string, names ...string) string {
	var judged, exact, over int
	var cannot string
	for _, p := range r.Phases {
		if p.Engine == engine && (len(names) == 0 || slices.Contains(names, p.Name)) {
			judged, exact, over = judged+p.Judged, exact+p.Exact, over+p.Over
			cannot = p.Cannot
		}
	}
	switch {
	case cannot != "":
		return ", " + cannot
	case judged == 0:
		return ""
	case over > 0:
		return fmt.Sprintf(", **%d of %d over**", over, judged)
	case exact == judged:
		return fmt.Sprintf(", exact (%d)", judged)
	}
	return fmt.Sprintf(", lower bound: %d of %d exact", exact, judged)
}

func has(r realvllm.Result, engine string) bool {
	return slices.ContainsFunc(r.Phases, func(p realvllm.Phase) bool { return p.Engine == engine })
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func sortNewest(list []realvllm.Result) {
	slices.SortFunc(list, func(a, b realvllm.Result) int { return minor(b.Release) - minor(a.Release) })
}

// minor is 28 of 0.28.0.
func minor(release string) int {
	_, rest, _ := strings.Cut(release, ".")
	text, _, _ := strings.Cut(rest, ".")
	n, _ := strconv.Atoi(text)
	return n
}
