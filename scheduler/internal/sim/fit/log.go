package fit

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// maxLine bounds a line of a log.
const maxLine = 1 << 20

// ReadLog reads a log of requests, one JSON object a line: prompt, cached and
// output in tokens, ttft and e2e in s. With at, the moment of its arrival in s,
// and pod, where more than one engine wrote the log, requests that ran at the
// same time are told apart from those that ran alone; without at, every
// request is taken to have run alone.
func ReadLog(r io.Reader) (list []sim.Served, timed bool, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var q struct {
			sim.Served
			At *float64 `json:"at"`
		}
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			return nil, false, fmt.Errorf("line %d: %w; want JSON lines with at, prompt, cached, output, ttft, e2e", n, err)
		}
		s := q.Served
		if s.Prompt < 1 || s.Cached < 0 || s.Cached >= s.Prompt || s.Output < 1 || !(s.TTFT > 0) || !(s.E2E >= s.TTFT) || s.E2E > 1e6 || s.Prompt > 1<<26 || s.Output > 1<<26 {
			return nil, false, fmt.Errorf("line %d: prompt %d, cached %d, output %d, ttft %v, e2e %v: want cached < prompt, output >= 1 and 0 < ttft <= e2e", n, s.Prompt, s.Cached, s.Output, s.TTFT, s.E2E)
		}
		if first := len(list) == 0; first {
			timed = q.At != nil
		} else if timed != (q.At != nil) {
			return nil, false, fmt.Errorf("line %d: at is given on some lines only", n)
		}
		if timed {
			if math.IsNaN(*q.At) || math.Abs(*q.At) > 1e12 {
				return nil, false, fmt.Errorf("line %d: at %v: want s", n, *q.At)
			}
			s.At = *q.At
		}
		list = append(list, s)
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return nil, false, fmt.Errorf("a line is longer than %d bytes", maxLine)
	}
	return list, timed, lines.Err()
}

// observed is a request among those of its pod.
type observed struct {
	sim.Served
	first, end     float64 // s
	alone          bool    // nobody else's prefill overlapped with its own
	batch, context float64 // mean while it decoded: requests, and their tokens together
	before         float64 // requests that decoded while it was in prefill
	beforeContext  float64
	stalls         []stall // others' prefills while it decoded
}

// stall is another's prefill, and the share of it that fell into the decode.
type stall struct {
	of    *observed
	share float64
}

// FromLog fits an engine to requests. What the log says nothing of stays as it
// is in base.
func FromLog(list []sim.Served, timed bool, base sim.Profile) (Fit, error) {
	if len(list) < minRows {
		return Fit{}, fmt.Errorf("%d requests: want at least %d", len(list), minRows)
	}
	all := make([]*observed, len(list))
	for i, q := range list {
		all[i] = &observed{Served: q, first: q.At + q.TTFT, end: q.At + q.E2E, alone: true, batch: 1, context: float64(q.Prompt) + float64(q.Output)/2}
	}
	if timed {
		for _, pod := range byPod(all) {
			overlap(pod)
		}
	}
	f := Fit{Engine: base}
	if timed {
		f.begin(all)
	}
	// Each side corrects for the other's constants: a few rounds settle it.
	for range 6 {
		if err := f.prefill(all); err != nil {
			return Fit{}, err
		}
		if err := f.decode(all); err != nil {
			return Fit{}, err
		}
	}
	if !timed {
		f.Notes = append(f.Notes, "the log has no at: every request was taken to have run alone, and the cost of a batch is that of the base engine")
	}
	return f, f.Engine.Validate()
}

const minRows = 20

// begin guesses the constants from the requests that were disturbed least, so
// that the fit does not depend on the base.
func (f *Fit) begin(all []*observed) {
	var steps, tokens []float64
	for _, q := range all {
		if q.Output >= 8 {
			steps = append(steps, 1000*(q.E2E-q.TTFT)/float64(q.Output-1))
		}
		if q.alone {
			tokens = append(tokens, 1000*q.TTFT/q.fresh())
		}
	}
	if len(steps) > 0 && len(tokens) > 0 {
		slices.Sort(steps)
		slices.Sort(tokens)
		f.Engine.StepMS, f.Engine.TokenMS = steps[len(steps)/20], tokens[len(tokens)/20]
		f.Engine.SequenceMS, f.Engine.ContextMS = 0, 0
	}
}

func byPod(all []*observed) [][]*observed {
	pods := make(map[string][]*observed)
	for _, q := range all {
		pods[q.Pod] = append(pods[q.Pod], q)
	}
	var list [][]*observed
	for _, pod := range pods {
		slices.SortFunc(pod, func(a, b *observed) int { return cmp.Compare(a.At, b.At) })
		list = append(list, pod)
	}
	return list
}

// overlap says of the requests of one engine, in order of arrival, what ran
// beside each.
func overlap(pod []*observed) {
	longest := 0.0
	for _, q := range pod {
		longest = max(longest, q.E2E)
	}
	from := 0
	for i, q := range pod {
		for pod[from].At+longest < q.At {
			from++
		}
		q.batch, q.context = 0, 0
		span := max(q.end-q.first, 1e-9)
		for j := from; j < len(pod) && pod[j].At < q.end; j++ {
			o := pod[j]
			if j != i && o.At < q.first && o.first > q.At {
				q.alone = false
			}
			batch, context := o.within(q.first, q.end)
			q.batch, q.context = q.batch+batch/span, q.context+context/span
			if j == i {
				continue
			}
			batch, context = o.within(q.At, q.first)
			q.before, q.beforeContext = q.before+batch/q.TTFT, q.beforeContext+context/q.TTFT
			if during := min(o.first, q.end) - max(o.At, q.first); during > 0 {
				q.stalls = append(q.stalls, stall{o, during / o.TTFT})
			}
		}
	}
}

// within integrates, over a stretch of time, the request's presence in the
// batch and its context.
func (q *observed) within(from, to float64) (batch, context float64) {
	from, to = max(from, q.first), min(to, q.end)
	if to <= from {
		return 0, 0
	}
	grown := float64(q.Output) * ((from+to)/2 - q.first) / max(q.end-q.first, 1e-9)
	return to - from, (to - from) * (float64(q.Prompt) + grown)
}

func (q *observed) fresh() float64 { return float64(q.Prompt - q.Cached) }
func (q *observed) pairs() float64 { return q.fresh() * (float64(q.Cached) + q.fresh()/2) }

// computing is the time of the steps that compute the request's prompt.
func (q *observed) computing(e sim.Profile) float64 {
	return max(e.StepMS, e.TokenMS*q.fresh()) + e.PairMS*q.pairs()
}

// steps that compute the request's prompt.
func (q *observed) steps(e sim.Profile) float64 {
	return math.Ceil(q.fresh() / float64(cmp.Or(e.StepTokens, 8192)))
}

// prefill fits overhead, TokenMS and PairMS to requests whose prefill ran
// alone and took longer than the least step.
func (f *Fit) prefill(all []*observed) error {
	e := &f.Engine
	var rows, quiet []row // quiet: with nothing decoding beside
	low, high := math.Inf(1), 0.0
	for _, q := range all {
		if !q.alone || e.TokenMS*q.fresh() < 1.5*e.StepMS {
			continue
		}
		ms := 1000 * q.TTFT
		if q.before > 0 {
			// The decoding requests' share of its steps, and of the half step
			// under way when it came.
			batch := e.SequenceMS*q.before + e.ContextMS*q.beforeContext
			ms -= q.steps(*e)*batch + min(1, q.before)*(e.StepMS+batch)/2
		}
		if ms <= 0 {
			continue
		}
		r := row{[]float64{1, q.fresh(), q.pairs()}, ms}
		if rows = append(rows, r); q.before == 0 {
			quiet = append(quiet, r)
		}
		low, high = min(low, q.fresh()), max(high, q.fresh())
	}
	if len(quiet) >= 2*minRows {
		rows = quiet
	}
	if len(rows) < minRows {
		return fmt.Errorf("only %d requests computed more tokens than a step's least time covers (about %.0f) with no other prefill beside: want at least %d", len(rows), 1.5*e.StepMS/e.TokenMS, minRows)
	}
	v, r, ok := robust(rows)
	if !ok || v[1] == 0 || high < 2*low {
		return errors.New("the time to the first token does not follow the prompts' lengths: want prompts of different lengths in the log")
	}
	f.OverheadMS, e.TokenMS, e.PairMS, f.Prefill = v[0], v[1], v[2], r
	return nil
}

// decode fits StepMS, SequenceMS and ContextMS to the mean time between
// tokens, less the time that others' prefills took.
func (f *Fit) decode(all []*observed) error {
	e := &f.Engine
	var rows []row
	low, high := math.Inf(1), 0.0
	for _, q := range all {
		if q.Output < 8 {
			continue
		}
		ms := 1000 * (q.E2E - q.TTFT)
		steps := float64(q.Output - 1)
		for _, s := range q.stalls {
			ms -= s.share * (s.of.computing(*e) - s.of.steps(*e)*e.StepMS)
		}
		if ms /= steps; ms > 0 {
			rows = append(rows, row{[]float64{1, q.batch, q.context}, ms})
			low, high = min(low, q.batch), max(high, q.batch)
		}
	}
	if len(rows) < minRows {
		return fmt.Errorf("only %d requests generated 8 tokens or more: want at least %d", len(rows), minRows)
	}
	if high < 1.2*low { // the cost of a request in the batch cannot be told
		for i := range rows {
			r := &rows[i]
			*r = row{[]float64{1, r.x[2]}, r.y - e.SequenceMS*r.x[1]}
		}
		rows = slices.DeleteFunc(rows, func(r row) bool { return r.y <= 0 })
		v, r, ok := robust(rows)
		if !ok || v[0] == 0 {
			return errNoSteps
		}
		e.StepMS, e.ContextMS, f.Decode = v[0], v[1], r
		return nil
	}
	v, r, ok := robust(rows)
	if !ok || v[0] == 0 {
		return errNoSteps
	}
	e.StepMS, e.SequenceMS, e.ContextMS, f.Decode = v[0], v[1], v[2], r
	return nil
}

var errNoSteps = errors.New("the time between tokens does not follow from the batch: want requests of several loads in the log")
