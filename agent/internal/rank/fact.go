package rank

import (
	"slices"
	"strconv"

	"github.com/kvscout/kvscout/agent/internal/mirror"
)

// Fact is what no event says of how an engine's hits end, and who said it: a
// page or a label of the engine, an option, or its events by what they imply.
type Fact struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Source string `json:"source"`
}

// factsLocked are those that the cache state stands on.
func (r *Rank) factsLocked() []Fact {
	facts := []Fact{{"dropped blocks", strconv.Itoa(r.mirror.Dropped()), r.hits.dropSource}}
	if r.hits.Chunk > 0 {
		facts = append(facts, Fact{"attention chunk", strconv.Itoa(r.hits.Chunk), r.hits.chunkSource})
	}
	if r.hits.Groups != (mirror.Groups{}) {
		facts = append(facts, Fact{"kinds of groups that events do not tell", formatGroups(r.hits.Groups), "-groups"})
	}
	if unit := r.blockSizeLocked(); unit > 0 && r.mirror.Kinds() > 1 {
		source := "block sizes in events"
		if unit == r.hits.Unit {
			source = "label prefix_match_unit"
		}
		facts = append(facts, Fact{"hash unit", strconv.Itoa(unit), source})
	}
	if algorithm, seed, proved := r.mirror.Hashing(); proved {
		source := "hashes in events"
		if r.hits.Algorithm != "" {
			source = "label prefix_caching_hash_algo, and hashes in events"
		}
		facts = append(facts, Fact{"hash algorithm", algorithm, source})
		known, source := "one of those that are tried", "hashes in events"
		if r.hits.Seed != "" && seed == r.hits.Seed {
			known, source = "as said", "-hash-seed, and hashes in events"
		}
		facts = append(facts, Fact{"hash seed", known, source})
	}
	return facts
}

// logFacts says what is new among the facts.
func (r *Rank) logFacts() {
	r.mu.Lock()
	defer r.mu.Unlock()
	facts := r.factsLocked()
	for _, f := range facts {
		if !slices.Contains(r.facts, f) {
			r.log.Info("known of the engine", "fact", f.Name, "value", f.Value, "source", f.Source)
		}
	}
	r.facts = facts
}
