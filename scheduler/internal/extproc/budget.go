package extproc

import "sync/atomic"

// maxBodies bounds the memory for requests that have not gone on yet.
const maxBodies = 512 << 20

// budget of memory for the bodies of all exchanges.
type budget struct{ held atomic.Int64 }

// take reports false, and takes nothing, where there is no more.
func (b *budget) take(n int64) bool {
	if b.held.Add(n) <= maxBodies {
		return true
	}
	b.held.Add(-n)
	return false
}

func (b *budget) give(n int64) { b.held.Add(-n) }
