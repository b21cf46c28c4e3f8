package report

import (
	"fmt"
	"slices"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// outcome of the default in one cell.
type outcome int

const (
	wins outcome = iota
	even
	loses
)

func (o outcome) String() string { return [...]string{"wins", "even", "loses"}[o] }

// Verdict is what the rows of one cell say of the default.
type Verdict struct {
	Outcome outcome
	Best    Row     // of the other policies
	By      float64 // share by which the default's mean TTFT is above the best's
	Noise   float64 // share that two means may differ by without meaning
	// Gain is the share of least tokens' mean TTFT that the capacity oracle
	// takes off: how much routing can matter here; Bound says that it is
	// little.
	Gain  float64
	Bound bool
	Why   string // of a loss
}

// Below these a difference of means has no meaning, and a gain no worth.
const (
	leastNoise = .02
	leastGain  = .10
)

// find gives the row of a policy.
func find(rows []Row, name string) (Row, bool) {
	i := slices.IndexFunc(rows, func(r Row) bool { return r.Policy == name })
	if i < 0 {
		return Row{}, false
	}
	return rows[i], true
}

// Judge compares the default with the best of the others. It says false where
// either is missing.
func Judge(rows []Row) (Verdict, bool) {
	d, ok := find(rows, policy.Default)
	var v Verdict
	found := false
	for _, r := range rows {
		if r.Policy == policy.Default || sim.Bound(r.Policy) {
			continue
		}
		if !found || r.TTFTMean < v.Best.TTFTMean {
			v.Best, found = r, true
		}
	}
	if !ok || !found || v.Best.TTFTMean <= 0 {
		return v, false
	}
	v.By = d.TTFTMean/v.Best.TTFTMean - 1
	v.Noise = max(leastNoise, (d.High-d.Low)/d.TTFTMean/2, (v.Best.High-v.Best.Low)/v.Best.TTFTMean/2)
	switch {
	case v.By > v.Noise:
		v.Outcome, v.Why = loses, why(d, v.Best)
	case v.By < -v.Noise:
		v.Outcome = wins
	default:
		v.Outcome = even
	}
	least, ok1 := find(rows, sim.LeastTokens)
	limit, ok2 := find(rows, sim.CapacityOracle)
	if ok1 && ok2 && least.TTFTMean > 0 {
		v.Gain = 1 - limit.TTFTMean/least.TTFTMean
		v.Bound = v.Gain < leastGain
	}
	return v, true
}

// why says by what a better policy is better. Both have the same engines and
// requests, so time to the first token is either computing or waiting.
func why(d, best Row) string {
	hits := fmt.Sprintf("%.3f of the prompt tokens cached against %.3f", best.TokenHit, d.TokenHit)
	switch more := best.TokenHit - d.TokenHit; {
	case more > .01:
		return fmt.Sprintf("it finds more: %s", hits)
	case more < -.01:
		return fmt.Sprintf("it computes more (%s) and still answers earlier, so what the default loses is waiting", hits)
	case best.TTFTP99 < d.TTFTP99 && d.TTFTP50 <= best.TTFTP50*1.02:
		return fmt.Sprintf("at equal hits its slow requests are faster: p99 %s s against %s s", number(best.TTFTP99), number(d.TTFTP99))
	}
	return fmt.Sprintf("at equal hits its requests wait less: p50 %s s against %s s, p90 %s s against %s s",
		number(best.TTFTP50), number(d.TTFTP50), number(best.TTFTP90), number(d.TTFTP90))
}

// Target is a mean TTFT of the default that one set of parameters shall reach.
type Target struct {
	Cell  string
	Most  float64 // s; zero: LeastTokensTimes counts
	Times float64 // of least tokens' mean TTFT
}

// Targets are what the project set out to reach.
func Targets() []Target {
	return []Target{
		{Cell: "conversation-2x-c1", Most: .66}, {Cell: "conversation-2x-c4", Most: .54}, {Cell: "conversation-2x-c12", Most: .50},
		{Cell: "conversation-3x-c4", Most: .76}, {Cell: "synthetic-2x-c1", Most: .83}, {Cell: "unshared", Times: 1.02},
	}
}

// reached compares the default with a target: what it has, what it may have.
func (t Target) reached(rows []Row) (has, may float64, ok bool) {
	d, ok1 := find(rows, policy.Default)
	least, ok2 := find(rows, sim.LeastTokens)
	may = t.Most
	if t.Times > 0 {
		may = t.Times * least.TTFTMean
	}
	return d.TTFTMean, may, ok1 && ok2
}

// Broken lists the promises that the short plan's results break: the default
// is never slower than least tokens beyond noise, and where prefixes are
// shared and memory is there, it is faster and nearer to the oracle's hits.
func Broken(cell string, rows []Row) []string {
	d, ok1 := find(rows, policy.Default)
	least, ok2 := find(rows, sim.LeastTokens)
	if !ok1 || !ok2 {
		return []string{cell + ": default or least tokens did not run"}
	}
	var list []string
	bad := func(broken bool, format string, args ...any) {
		if broken {
			list = append(list, cell+": "+fmt.Sprintf(format, args...))
		}
	}
	bad(d.Requests != least.Requests || d.Rejects > least.Rejects, "default ended %d requests and refused %d, least tokens %d and %d", d.Requests, d.Rejects, least.Requests, least.Rejects)
	bad(d.TTFTMean > least.TTFTMean*(1+leastNoise), "default needs %.3f s on average to the first token, least tokens %.3f s", d.TTFTMean, least.TTFTMean)
	if d.TokenHitCeiling > .2 && d.Settings.Capacity >= 4 {
		bad(d.TTFTMean > .95*least.TTFTMean, "default needs %.3f s on average to the first token, which is not 5 %% below least tokens' %.3f s", d.TTFTMean, least.TTFTMean)
		bad(d.TokenHit < d.TokenHitCeiling/2, "default hits %.3f, less than half of the ceiling of %.3f", d.TokenHit, d.TokenHitCeiling)
	}
	return list
}
