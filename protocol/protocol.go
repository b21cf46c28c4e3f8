// Package protocol is the contract between agents and schedulers: who says
// what on which subject, and when a cache state may be believed. It holds the
// rules, the names and the checks of both ends; it opens no connection and
// takes no decision.
//
// # Flow
//
// An agent stands beside one rank of one engine (a member) and owns the truth
// about that rank's KV cache. It publishes every change of that truth, says
// three times a second what the truth must look like, and answers whoever asks for
// the whole of it. Nothing is stored in between: a scheduler that starts, or
// that has lost something, asks.
//
// # Subjects
//
//	kvscout.v1.<pool>.blocks.<member>    Delta            agent -> schedulers
//	kvscout.v1.<pool>.load.<member>      Heartbeat        agent -> schedulers
//	kvscout.v1.<pool>.snapshot.<member>  SnapshotRequest  scheduler -> agent,
//	                                     answered by SnapshotChunk on the reply subject
//	kvscout.v1.<pool>.verdict.<member>   Verdict          scheduler -> agent
//	kvscout.v1.<pool>.picks              Picks            scheduler -> schedulers
//
// A member's name is <namespace>_<pod uid>_<rank>; in a subject its three parts
// are tokens, <namespace>.<pod uid>.<rank>, so that NATS can give rights by
// namespace or pod. Reply subjects begin with kvscout.v1.<pool>.inbox. Deltas and
// heartbeats of a member go over one connection, so that they arrive in the
// order in which they were sent, and are to be taken in that order. Nobody but
// the agent subscribes to its snapshot subject: the server then says at once
// when there is no agent to answer.
//
// # Keys and lanes
//
// A block is named by its 64-bit key (package blockkey): tokens never travel.
// A member's keys are rooted in the first of its model names. There are three
// lanes: GPU; GPU or host; GPU, host or local disk. What is held on a lane is
// held on every later lane too, and each lane is prefix-closed: a block is
// published on a lane only while all its ancestors are. Beside the lanes stand
// the ends: the blocks of the GPU lane at which an engine with other than full
// attention would accept a hit to end.
//
// # Epoch and sequence
//
//   - An epoch is one incarnation of one engine process as its agent saw it: the Unix
//     time in nanoseconds at its start, strictly increasing within an agent.
//   - A new epoch starts with the empty cache state at sequence 0. Its first delta
//     has sequence 1, each later one the next number. A delta is atomic: the
//     cache state exists at a sequence, never between two.
//   - A change too large for one message is sent as several deltas, each with
//     a sequence of its own. Removes come before stores, children are removed
//     before parents, parents stored before children.
//   - The sequence moves on even when a delta cannot be sent, so that whoever
//     missed it sees the gap. Nothing is kept to be sent later.
//
// # Proof
//
// For each lane the agent keeps the count of held keys and their digest, the
// XOR of blockkey.Digest over them. Both are in every heartbeat and in every
// delta (in the last one of a change that was split), and stand for the
// cache state at the message's sequence. A scheduler that computes the same has
// verified its cache state, and a cache state that was not verified is not EXACT: neither
// between the parts of a split change, nor after a lost connection until the
// next heartbeat agrees.
//
// # Snapshot
//
// The agent answers a SnapshotRequest with numbered chunks, all cut at one
// (epoch, sequence); the last one carries the lanes. The scheduler subscribes
// first, asks then, and holds what arrives meanwhile. When the last chunk is
// there and the digest agrees, it replaces what it knew by the snapshot and
// applies the held deltas that come after the cut. Whatever epoch the snapshot
// says is the member's epoch.
//
// # Doubt
//
// A gap, another epoch, a digest that differs, a heartbeat ahead of the deltas,
// a message that contradicts itself: the scheduler forgets the member's blocks
// at once and asks for a snapshot. A delta or heartbeat at or below the known
// sequence of the known epoch is a repetition and is ignored.
//
// # Verdicts
//
// A scheduler tells each agent what it makes of its member: how far it trusts
// the cache state, and why it refuses the member where it does. It does so when
// that changes and every VerdictEvery, always upon something that the member
// said: nothing is said to who is silent. What cannot be a member's name is
// told so on the tokens that it used. An agent changes nothing for it but what
// it shows: one that nobody believes is down, and looks well from inside.
//
// # Schedulers among themselves
//
// A scheduler tells the others on which member it reserved for a request, what will be
// cached there, and what was reported of it, a few milliseconds later and
// several at a time; without news it says once a second that it is there, and
// as long as it hears nobody it tells nothing. Ages, not times, travel: clocks
// may differ. Nothing is repeated, and nobody waits for it.
//
// # Sizes and versions
//
// No message is larger than MaxMessage, nor than the server allows. Every
// message carries Version; any other is refused. Fields may be added within a
// version, and unknown ones are skipped.
//
// So that programs of different versions can say so, some things are the same in
// all versions: the subjects, whose v1 is not this version; the version, member
// and release of a heartbeat; the version, member, sender, scheduler, refused and
// release of a verdict, and how long it holds. A scheduler refuses the heartbeat
// of another version by a verdict of its own version, and an agent takes a
// verdict of another version as a refusal: both can name both.
//
// # Trust in the wire
//
// A message counts only if its header names the member of its subject: rights
// on subjects, given by the NATS server, are what ties a member to its agent.
// Beyond that nothing a message says is believed before it was checked: see
// ReadDelta, ReadHeartbeat, ReadChunk, ReadRequest, ReadVerdict and ReadPicks.
package protocol

import (
	"strings"
	"time"
)

// Version of the protocol, in every message.
const Version = 1

// MaxDropped bounds the blocks that an engine leaves out of a hit: one of the
// largest block size among its KV-cache groups, in blocks of the keys.
const MaxDropped = 4096

// Lanes is the number of lanes of a cache state, and Ends the place of LANE_ENDS
// behind them.
const (
	Lanes = 3
	Ends  = Lanes
)

const (
	// MaxMessage bounds the size of every message in bytes.
	MaxMessage = 256 << 10
	// MaxDepth bounds the length of a chain in blocks.
	MaxDepth = 1 << 24
	// MaxName bounds a pool or member name in bytes.
	MaxName = 200
	// MaxChunks bounds the number of chunks of a snapshot.
	MaxChunks = 1 << 10
	// MaxPicks bounds the reservations, and the ends, of one message between
	// schedulers, MaxMarks the keys of one reservation.
	MaxPicks = 64
	MaxMarks = 256
	// MaxReason bounds a verdict's texts in bytes.
	MaxReason = 512
	// MaxRelease bounds what is repeated of a release's name.
	MaxRelease = 64
	// MaxInfo bounds what a heartbeat says of its member in bytes, and MaxNames
	// the models and adapters that it names.
	MaxInfo  = 64 << 10
	MaxNames = 1 << 10
)

// HeartbeatEvery is the usual time between two heartbeats of a member. A message
// says how long it really is.
const HeartbeatEvery = 300 * time.Millisecond

// VerdictEvery is the time between two verdicts on a member when nothing
// changes. A message says how long it really is.
const VerdictEvery = 10 * time.Second

// Held is what a member holds, lane by lane and last its ends: how many keys,
// and the XOR of their digests.
type Held [Lanes + 1]struct{ Count, Digest uint64 }

// Shorten makes a text fit into a message: at most so many bytes, and valid.
func Shorten(most int, text string) string {
	return strings.ToValidUTF8(text[:min(len(text), most)], "")
}
