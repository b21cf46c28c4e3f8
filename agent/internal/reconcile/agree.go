package reconcile

import (
	"math"
	"time"
)

const (
	// A stream that was found to be another's is believed again once it was alike
	// with the counters for agreeFor and agreeTokens tokens; or for alikeFor, and
	// alikeTimes nearer than a stranger's would be.
	agreeFor    = 30 * time.Second
	agreeTokens = 4000
	alikeFor    = 5 * time.Second
	alikeTimes  = 4
)

// alike is a row of polls in which stream and engine had grown by the same, but for
// what each request leaves in a block that is not whole: half of one on average.
type alike struct {
	from   *Counters // at the first of them; nil: there is none
	at     time.Time
	agrees bool
}

// observe holds a poll against the check's origin. The tokens of another engine that
// serves as many requests are off by about those of one times the root of their
// number.
func (l *alike) observe(origin *anchor, o *observation) {
	if !origin.set {
		return
	}
	c := &o.counters
	requests := max(0, c.Requests-origin.counters.Requests)
	computed := c.computed() - origin.counters.computed() - requests*(o.blockSize()+1)/2
	off := o.margin() + (math.Sqrt(requests)+c.Running)*o.blockSize() + o.inFlight(c)
	if origin.busy {
		off += o.inFlight(&origin.counters)
	}
	if o.before.Fresh-origin.fresh > computed+off || o.after.Most-origin.most < computed-off {
		*l = alike{}
		return
	}
	if l.from == nil {
		first := *c
		l.from, l.at = &first, o.at
	}
	off += o.after.Most - o.before.Most + max(0, origin.fresh-origin.most) // while either was late
	n, tokens, lasted := c.Requests-l.from.Requests, c.computed()-l.from.computed(), o.at.Sub(l.at)
	l.agrees = lasted >= agreeFor && tokens >= agreeTokens || lasted >= alikeFor && n > 0 && tokens >= alikeTimes*off*math.Sqrt(n)
}

// Agrees says that stream and engine moved together for so long that they are
// one, also if they were thought not to be.
func (c *Check) Agrees() bool { return c.suspect.polls == 0 && c.alike.agrees }
