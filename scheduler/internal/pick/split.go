package pick

import (
	"errors"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

var prefillOnly, decodeOnly = fleet.Prefill, fleet.Decode

// split decides where members have roles. The member that is to decode comes
// first, among those that are not for prefill only. If it would have to compute
// enough, another one is to prefill, if there is one that is not for decoding
// only: two members then serve the request. Where nobody is there to decode,
// roles are no reason to refuse.
func (p *Picker) split(r *Request, attempt func(*Request) (d, other *Decision, err error)) (d, other *Decision, err error) {
	preview := *r
	preview.not, preview.Reserve, preview.Admission, preview.Top = &prefillOnly, false, nil, 1
	decode, _, err := attempt(&preview)
	r.ExpectedOutput = preview.ExpectedOutput
	switch {
	case errors.Is(err, ErrNoCandidate):
		return attempt(r)
	case err != nil:
		return nil, nil, err
	}
	whole := *r
	whole.not = &prefillOnly
	least, first := p.usual.Load().Disaggregate, &decode.Candidates[0]
	if least <= 0 || first.Uncached < least {
		return attempt(&whole)
	}
	prefill := *r
	prefill.not, prefill.decode = &decodeOnly, first.Member
	d, other, err = attempt(&prefill)
	if errors.Is(err, ErrNoCandidate) {
		return attempt(&whole)
	}
	if d != nil && d.Candidates[0].Member.ID != first.Member.ID {
		d.Decode = first
		d.Reason += "; " + first.Member.Info.Name + " decodes"
	}
	return d, other, err
}

// Pull is a peer that has more of the prompt than a candidate.
type Pull struct {
	Member *fleet.Member
	// Tokens beyond the candidate's own.
	Tokens int
	// TransferMS and PrefillMS are what pulling and computing them take.
	TransferMS, PrefillMS float64
}

// pulls finds for the candidates of an answer whether the one that holds most
// of the prompt in its memory gives it quicker than they compute it.
func (m *draft) pulls(d *Decision, tokenMS float64) {
	if !(tokenMS > 0) {
		return
	}
	for i := range d.Candidates {
		a := &d.Candidates[i]
		c := m.eligible.of(a.Member.ID)
		if c == nil || c.scope < 0 {
			continue
		}
		own := c.cached() + c.has().predicted
		var from *candidate
		most := own
		for j := range m.eligible.list {
			if o := &m.eligible.list[j]; o.prefix != nil && o.scope == c.scope && o.prefix.gpu+o.prefix.host > most {
				from, most = o, o.prefix.gpu+o.prefix.host
			}
		}
		if from == nil {
			continue
		}
		tokens := most - own
		pull := Pull{
			Member: from.member, Tokens: tokens,
			TransferMS: tokenMS * float64(tokens),
			PrefillMS:  c.speed.Prefill(float64(tokens), float64(own)),
		}
		if pull.TransferMS < pull.PrefillMS {
			a.Pull = pull
		}
	}
}
