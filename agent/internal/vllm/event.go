package vllm

import (
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
)

// EventKind says which part of an Event counts.
type EventKind uint8

const (
	Stored EventKind = iota + 1
	Removed
	Cleared // the GPU pool of this rank was emptied
)

// Event is one KV event, normalised.
type Event struct {
	Kind   EventKind
	Store  mirror.Store
	Remove mirror.Remove
}

// Batch is one message of an engine. Its events count in their order. Slices
// belong to the Decoder and live until its next Decode.
type Batch struct {
	Time   float64 // wall clock of the engine in seconds
	Rank   int     // -1: not named
	Events []Event
}

// At is the engine's wall clock as a time; zero where it cannot be one.
func (b *Batch) At() time.Time {
	if !(b.Time > 0 && b.Time < 1<<33) {
		return time.Time{}
	}
	return time.UnixMicro(int64(b.Time * 1e6))
}

// Skips counts what a Decoder has passed over.
type Skips struct {
	UnknownEvents  uint64 // event tags that no known release sends
	UnknownFields  uint64 // of events that are known
	UnknownMediums uint64
	SharedStorage  uint64 // storage that is remote, shared, or might be
	UnknownExtras  uint64 // blocks withheld: extra keys whose content is not known
	NamelessLoRA   uint64 // blocks withheld: adapter id without a name
}
