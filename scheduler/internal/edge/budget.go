package edge

import "sync/atomic"

const (
	// MaxBody bytes of a request can be picked for.
	MaxBody = 32 << 20
	// MaxBodies bounds the memory for requests that have not gone on yet.
	MaxBodies = 512 << 20
)

// Budget of memory for the bodies of all requests of a server.
type Budget struct{ held atomic.Int64 }

// Take reports false, and takes nothing, where there is no more.
func (b *Budget) Take(n int64) bool {
	if b.held.Add(n) <= MaxBodies {
		return true
	}
	b.held.Add(-n)
	return false
}

// Give back what was taken.
func (b *Budget) Give(n int64) { b.held.Add(-n) }

// Held is what is taken.
func (b *Budget) Held() int64 { return b.held.Load() }
