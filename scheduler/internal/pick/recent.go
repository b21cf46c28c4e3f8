package pick

import (
	"sync"
	"time"
)

const (
	// recentFor is how long a beginning of a prompt is remembered at least, and
	// maxRecent how many at most.
	recentFor = 5 * time.Minute
	maxRecent = 1 << 15
)

// recentPrompts remembers the beginnings of the prompts of late, in two generations:
// when the young one is full or old, it becomes the old one.
type recentPrompts struct {
	mu         sync.Mutex
	young, old map[uint64]struct{}
	since      time.Time
}

// longest returns the last of keys that was seen, or the last of all.
func (s *recentPrompts) longest(keys []uint64, now time.Time) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(keys) - 1; i >= 0; i-- {
		if s.has(keys[i], now) {
			return keys[i]
		}
	}
	return keys[len(keys)-1]
}

func (s *recentPrompts) has(key uint64, now time.Time) bool {
	if now.Sub(s.since) >= 2*recentFor {
		return false
	}
	if _, ok := s.young[key]; ok {
		return true
	}
	_, ok := s.old[key]
	return ok
}

func (s *recentPrompts) add(keys []uint64, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range keys {
		if age := now.Sub(s.since); s.young == nil || len(s.young) >= maxRecent || age >= recentFor {
			s.old = s.young
			if age >= 2*recentFor {
				s.old = nil
			}
			s.young, s.since = make(map[uint64]struct{}), now
		}
		s.young[k] = struct{}{}
	}
}
