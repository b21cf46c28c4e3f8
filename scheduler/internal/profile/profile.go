// Package profile holds what was measured of members beforehand: how many
// requests a second of which lengths they serve within which targets, and how
// long these take. It parses and looks up; file.go alone knows that the text comes from files, and
// reads them again.
//
// A number that is missing, zero, negative, infinite or not a number is
// unknown (NaN), and never refuses a file: whoever asks falls back to what was
// learned. A file with a key or a shape that cannot be meant is refused whole.
package profile

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrInvalid says that a text is no profile.
var ErrInvalid = errors.New("invalid profile")

// Key says of which members a profile tells. In a profile an empty field other
// than Model stands for all.
type Key struct {
	// Workload is kind/name, like Deployment/llama.
	Namespace, Workload, Model, GPU string
}

// Profile of one workload and model on one kind of accelerator.
type Profile struct {
	Key Key
	// Outputs and Inputs are the token counts of the rows and columns, rising.
	Outputs, Inputs []float64
	cells           []Cell // by output, then input
	// Targets that the profile was measured for.
	Targets Targets
	// Created in Unix seconds; 0: not said.
	Created int64
}

// Cell is what was measured for one pair of lengths. NaN is unknown.
type Cell struct {
	// RPS is the highest rate of requests at which the targets held.
	RPS float64
	// E2E, TTFT, TPOT are mean seconds at that rate.
	E2E, TTFT, TPOT float64
}

// Targets in seconds; 0: none.
type Targets struct{ TTFT, TPOT, TPAT, E2E float64 }

// Unknown is a cell that says nothing.
func Unknown() Cell { return Cell{math.NaN(), math.NaN(), math.NaN(), math.NaN()} }

// At returns the cell that is nearest in log2, the outermost beyond the table.
func (p *Profile) At(output, input float64) Cell {
	return p.cells[nearest(p.Outputs, output)*len(p.Inputs)+nearest(p.Inputs, input)]
}

func nearest(axis []float64, v float64) int {
	if !(v > axis[0]) {
		return 0
	}
	i, _ := slices.BinarySearch(axis, v)
	switch {
	case i == len(axis):
		return i - 1
	case v*v < axis[i-1]*axis[i]: // nearer in log2 to the lower
		return i - 1
	}
	return i
}

// Set of profiles. It is never changed; nil is empty.
type Set struct{ byModel map[string][]*Profile }

// NewSet refuses two profiles of one key.
func NewSet(list []*Profile) (*Set, error) {
	s := &Set{byModel: make(map[string][]*Profile)}
	seen := make(map[Key]bool)
	for _, p := range list {
		if seen[p.Key] {
			return nil, fmt.Errorf("%s is there twice: %w", p.Key, ErrInvalid)
		}
		seen[p.Key] = true
		s.byModel[p.Key.Model] = append(s.byModel[p.Key.Model], p)
	}
	for _, list := range s.byModel {
		slices.SortStableFunc(list, func(a, b *Profile) int { return b.Key.named() - a.Key.named() })
	}
	return s, nil
}

// Len is the number of profiles.
func (s *Set) Len() int {
	n := 0
	if s != nil {
		for _, list := range s.byModel {
			n += len(list)
		}
	}
	return n
}

// Of returns the profile for a member: the one that names most of what the
// member is and nothing else; nil: there is none.
func (s *Set) Of(member Key) *Profile {
	if s == nil {
		return nil
	}
	for _, p := range s.byModel[member.Model] {
		if p.Key.covers(member) {
			return p
		}
	}
	return nil
}

func (k Key) covers(m Key) bool {
	return (k.Namespace == "" || k.Namespace == m.Namespace) &&
		(k.Workload == "" || k.Workload == m.Workload) && (k.GPU == "" || k.GPU == m.GPU)
}

// named counts what the key names; where two name as much, the namespace
// weighs most and the accelerator least.
func (k Key) named() int {
	n := 0
	for i, field := range []string{k.GPU, k.Workload, k.Namespace} {
		if field != "" {
			n += 8 + 1<<i
		}
	}
	return n
}

func (k Key) String() string {
	name := func(s string) string {
		if s == "" {
			return "*"
		}
		return s
	}
	return fmt.Sprintf("profile %s/%s of %q on %s", name(k.Namespace), name(k.Workload), k.Model, name(k.GPU))
}
