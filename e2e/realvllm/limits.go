package realvllm

import "regexp"

// limits are what releases cannot do on CPU, whoever watches them.
var limits = []struct {
	releases *regexp.Regexp
	engine   string // as in Engines
	phase    string // empty: nothing is asked of an engine of that kind
	why      string
}{
	{regexp.MustCompile(`^0\.10\.`), "full", "adapters", "vLLM ends at a request for an adapter while it publishes events"},
	{regexp.MustCompile(`^0\.10\.`), "hybrid", "", "not on CPU"},
	{regexp.MustCompile(`^0\.11\.`), "ranks", "", "vLLM drops the rank that a header names"},
	{regexp.MustCompile(`^0\.(1\d|2[0-3])\.`), "offload", "", "not on CPU"},
}

// Limit is why a release cannot do something on CPU; empty: it can.
func Limit(release, engine, phase string) string {
	for _, l := range limits {
		if l.engine == engine && l.phase == phase && l.releases.MatchString(release) {
			return l.why
		}
	}
	return ""
}
