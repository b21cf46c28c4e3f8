package pick

import (
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/profile"
)

// ranking is the choice among the candidates: what policies see of them, and
// what came of it. All lists are in the order of the candidates.
type ranking struct {
	round     policy.Round
	scores    []float64
	order     []int32            // the best first; see sorted
	gauges    bool               // load goes by the engines' samples
	admission *Admission         // nil: the request may not wait
	last      fleet.ID           // member of the session's last request
	known     bool               // there is one
	groups    []*profile.Profile // by policy.SLO.Group
	choosing
}

func (k *ranking) release() {
	clear(k.groups) // profiles that were replaced are not to be kept
	k.admission = nil
}

// gather fills the round with what does not change while the fleet is locked.
func (p *Picker) gather(k *ranking, e *eligible, r *Request, random uint64, now time.Time) {
	n, length, view := len(e.list), r.Prompt.length(), e.view
	k.admission, k.round.Random = r.Admission, random
	k.round.Reuse = p.estimates.Caches.Reuse()
	k.round.Moved = false
	k.round.Output, k.round.Length = float64(r.ExpectedOutput), length
	k.round.Candidates = slices.Grow(k.round.Candidates[:0], n)[:n]
	k.round.Costs = slices.Grow(k.round.Costs[:0], n)[:n]
	k.scores = slices.Grow(k.scores[:0], n)[:n]
	k.gauges = true
	fresh, speeds := view.Since(view.FreshSince(now)), p.estimates.Speeds.Fitted()
	held := p.estimates.Caches.Held()
	var busy, known float64
	for i := range e.list {
		c := &e.list[i]
		row, has := c.row, c.has()
		c.speed = speeds.Of(row.ID, row.Hash)
		k.gauges = k.gauges && row.Running >= 0 && row.Sampled >= fresh
		if c.speed.Busy >= 0 {
			busy += c.speed.Busy
			known++
		}
		// In place: a literal would be made elsewhere and copied.
		at := &k.round.Candidates[i]
		at.GPU, at.Host, at.Disk, at.Predicted = has.gpu, has.host, has.disk, has.predicted
		at.Uncached = length - has.cached() - has.predicted
		if length == 0 {
			at.Uncached = int(c.speed.PromptTokens) // a mean request
		}
		at.Speed = c.speed
		at.BlockSize = row.BlockSize
		at.Capacity = row.Blocks * row.BlockSize
		at.Spare = held.Spare(row)
		at.Sent = has.sent
		at.Draw, at.History = 0, nil
	}
	k.round.Rho = busy / known // NaN where nothing is known
}
