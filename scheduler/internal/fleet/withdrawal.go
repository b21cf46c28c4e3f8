package fleet

import "time"

// Withdrawal says why a member is to be picked only where no other can be: its pod
// is about to go, or does not serve. It is what the cluster says, long before the
// member's own silence.
type Withdrawal uint8

const (
	// InService: nothing is known against it.
	InService Withdrawal = iota
	// Cordoned: its node takes no more pods, and is probably to be emptied.
	Cordoned
	// NotReady: the pod does not serve, by its readiness probes.
	NotReady
	// Evicted: the pod is about to be removed from its node.
	Evicted
	// Deleting: the pod was told to end.
	Deleting
	// Ended: all containers of the pod have.
	Ended

	// Withdrawals are so many.
	Withdrawals = iota
)

func (w Withdrawal) String() string {
	return [...]string{"in service", "its node is cordoned", "its pod is not ready", "its pod is being evicted", "its pod is being deleted", "its pod has ended"}[w]
}

// Label is the withdrawal in a word, for metrics.
func (w Withdrawal) Label() string {
	return [...]string{"in_service", "cordoned", "not_ready", "evicted", "deleting", "ended"}[w]
}

// Withdraw says whether the member is withdrawn, and why.
func (f *Fleet) Withdraw(id ID, w Withdrawal) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.slotLocked(id)
	if s == nil || s.member.Withdrawn == w {
		return
	}
	m := *s.member
	m.Withdrawn = w
	f.replaceLocked(s, &m)
}

// Barred tells whether the member is not to be picked where another can be, by what
// is known of itself and not by what callers reported of it.
func (v *View) Barred(r *Row, now time.Time) bool {
	return r.Unreachable || r.Sleeping || r.Withdrawn != InService || v.Silent(r.Member, now)
}
