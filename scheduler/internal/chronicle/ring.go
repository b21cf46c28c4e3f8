package chronicle

import "iter"

// ring keeps the newest of what is added.
type ring[T any] struct {
	most int
	kept []T
	next int // the oldest, once all places are taken
}

// add gives what it pushed out, which is nothing for a while.
func (r *ring[T]) add(v T) (gone T) {
	if len(r.kept) < r.most {
		r.kept = append(r.kept, v)
		return gone
	}
	gone, r.kept[r.next] = r.kept[r.next], v
	r.next = (r.next + 1) % r.most
	return gone
}

// newest first.
func (r *ring[T]) newest() iter.Seq[T] {
	return func(yield func(T) bool) {
		for i := range r.kept {
			if !yield(r.kept[(r.next+len(r.kept)-1-i)%len(r.kept)]) {
				return
			}
		}
	}
}
