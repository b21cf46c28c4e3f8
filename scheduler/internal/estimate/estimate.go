// Package estimate keeps what decisions go by beyond the fleet's view and the
// index: how fast members are, how full their caches are and how much of them is
// used again, and how long outputs will be. It is fed by load samples, decisions
// and reports; learn does the arithmetic of speeds and lengths.
//
// The package has no clock. A time that is passed in may carry a monotonic
// reading; only differences to other such times count.
package estimate

import (
	"math"
	"sync"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
	"github.com/kvscout/kvscout/scheduler/internal/learn"
)

// Estimates are safe for concurrent use, but for Tick, which has one caller at a
// time.
type Estimates struct {
	Speeds  Speeds
	Caches  Caches
	Outputs Outputs
}

// New knows nothing yet.
func New() *Estimates {
	e := &Estimates{Speeds: Speeds{Prior: learn.Prior()}}
	e.Speeds.fitted.Store(&Fit{prior: &e.Speeds.Prior})
	return e
}

// Tick learns from the load samples and reports that have come. It calls reprice
// for members whose prefills are believed to take so many times as long as before.
func (e *Estimates) Tick(view *fleet.View, x *index.Index, now time.Time, reprice func(id fleet.ID, by float64)) {
	e.Speeds.learn(view, now, reprice)
	e.Caches.count(view, x, now)
	e.Outputs.publish(now)
}

// Outputs learns the lengths of outputs from reports. Predicting takes no lock.
type Outputs struct {
	mu      sync.Mutex // held to observe and to publish
	lengths learn.Outputs
}

// Observe takes the length of the output of a request that ended.
func (o *Outputs) Observe(a *fleet.Asked, output uint64, now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lengths.Observe(a.Model, a.Tenant, a.PromptTokens, int(min(output, math.MaxInt32)), now)
}

func (o *Outputs) publish(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lengths.Publish(now)
}

// Predict draws a length for a request; 0: too little is known.
func (o *Outputs) Predict(model, tenant string, prompt int, random uint64) int {
	return o.lengths.Predict(model, tenant, prompt, random)
}
