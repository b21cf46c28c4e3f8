package vllm

import "github.com/kvscout/kvscout/protocol/blockkey"

// Tier is where an engine keeps blocks.
type Tier uint8

const (
	GPU Tier = iota
	Host
	Disk // local to the pod; shared and remote storage has no tier
)

// GroupKind is the kind of attention of a KV-cache group.
type GroupKind uint8

const (
	Unspecified GroupKind = iota // the engine names no kinds
	Full
	Sliding
	State
	Chunked
	Other
)

// Store says that consecutive blocks of one chain became cached.
type Store struct {
	Tier      Tier
	Group     int
	Kind      GroupKind
	Window    int // tokens, for Sliding
	Hashes    []uint64
	Parent    uint64 // engine hash of the block before, when HasParent
	HasParent bool
	// Tokens of the blocks. Empty in placeholders of an offloading connector;
	// in sparse groups there are more than Hashes account for.
	Tokens    []uint32
	BlockSize int
	Adapter   string
	Salt      string           // only when !HasParent
	Refs      [][]blockkey.Ref // aligned with Hashes, or nil
	// Withhold: the event does not show what the hash covers, so the blocks,
	// and all that follow them, must never be published.
	Withhold bool
	// HidesExtras: this publisher sends no extra keys, so a salt or an image
	// would be invisible.
	HidesExtras bool
	// Physical: the engine's era has no hit reports, so every store is a copy.
	Physical bool
}

// Remove says that blocks are no longer cached.
type Remove struct {
	Tier     Tier
	Group    int
	HasGroup bool
	Hashes   []uint64
}

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
	Store  Store
	Remove Remove
}

// Batch is one message of an engine. Its events count in their order. Slices
// belong to the Decoder and live until its next Decode.
type Batch struct {
	Time   float64 // wall clock of the engine in seconds
	Rank   int     // -1: not named
	Events []Event
}

// Skips counts what a Decoder has passed over.
type Skips struct {
	UnknownEvents  uint64 // event tags that no known release sends
	UnknownMediums uint64
	SharedStorage  uint64 // storage that is remote, shared, or might be
	UnknownExtras  uint64 // blocks withheld: extra keys whose content is not known
	NamelessLoRA   uint64 // blocks withheld: adapter id without a name
}
