package vllm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvscout/kvscout/agent/internal/mirror"
)

// Bounds of what one batch may hold. A token list has maxList of its own.
const (
	maxEvents    = 200_000
	maxGroup     = 1023
	maxBlockSize = 1 << 20
	maxNames     = 1024 // adapter names kept for reuse
)

// ErrShape says that a payload is well-formed, and that no known release sends
// such a one.
var ErrShape = errors.New("no known release sends this")

// Decoder reads batches of KV events of every release: positional arrays up
// to 0.23, maps since 0.24. Events and fields that are not known are passed over
// and counted; one that is known must have the form that it has in some release.
// A Decoder reuses its buffers and is not safe for concurrent use.
type Decoder struct {
	Skips Skips

	c      cursor
	events []Event
	hashes []uint64
	tokens []uint32
	names  map[string]string
}

// Decode reads one payload. An error means that nothing of the batch can be
// used; it is an ErrShape where the payload itself is sound. The result lives
// until the next call.
func (d *Decoder) Decode(payload []byte) (Batch, error) {
	b, err := d.decode(payload)
	if err != nil {
		if c := (cursor{b: payload}); c.skip(1) == nil && c.left() == 0 {
			err = fmt.Errorf("%w: %w", ErrShape, err)
		}
	}
	return b, err
}

func (d *Decoder) decode(payload []byte) (Batch, error) {
	d.reset(payload)
	b := Batch{Rank: -1}
	code, err := d.c.peek()
	if err != nil {
		return Batch{}, err
	}
	if isMap(code) {
		err = d.mapBatch(&b)
	} else {
		err = d.arrayBatch(&b)
	}
	if err != nil {
		return Batch{}, err
	}
	if d.c.left() > 0 {
		return Batch{}, fmt.Errorf("%d bytes after the batch", d.c.left())
	}
	b.Events = d.events
	return b, nil
}

// reset empties the buffers, and drops those that one large batch has grown.
func (d *Decoder) reset(payload []byte) {
	const keep = 1 << 16
	if cap(d.events) > keep/16 {
		d.events = nil
	}
	if cap(d.hashes) > keep {
		d.hashes = nil
	}
	if cap(d.tokens) > 16*keep {
		d.tokens = nil
	}
	clear(d.events)
	d.events, d.hashes, d.tokens = d.events[:0], d.hashes[:0], d.tokens[:0]
	d.c = cursor{b: payload}
}

func (d *Decoder) arrayBatch(b *Batch) error {
	n, err := d.c.array()
	if err != nil {
		return err
	}
	if n < 2 {
		return fmt.Errorf("batch of %d elements", n)
	}
	if err := d.time(b); err != nil {
		return err
	}
	if err := d.list(); err != nil {
		return err
	}
	if n == 2 {
		return nil
	}
	if err := d.rank(b); err != nil {
		return err
	}
	return d.c.skip(n - 3)
}

func (d *Decoder) mapBatch(b *Batch) error {
	n, err := d.c.mapping()
	if err != nil {
		return err
	}
	seen := false
	for range n {
		key, err := d.c.bytes()
		if err != nil {
			return err
		}
		switch string(key) {
		case "ts":
			err = d.time(b)
		case "events":
			if seen {
				return errors.New("batch names its events twice")
			}
			seen = true
			err = d.list()
		case "data_parallel_rank":
			err = d.rank(b)
		default:
			err = d.c.skip(1)
		}
		if err != nil {
			return err
		}
	}
	if !seen {
		return errors.New("batch without events")
	}
	return nil
}

func (d *Decoder) time(b *Batch) (err error) {
	if d.c.isNil() {
		return nil
	}
	b.Time, err = d.c.number()
	return err
}

func (d *Decoder) rank(b *Batch) error {
	if d.c.isNil() {
		return nil
	}
	v, negative, err := d.c.integer()
	if err != nil {
		return err
	}
	if !negative && v <= maxList {
		b.Rank = int(v)
	}
	return nil
}

func (d *Decoder) list() error {
	n, err := d.c.array()
	if err != nil {
		return err
	}
	if n > maxEvents {
		return fmt.Errorf("batch of %d events", n)
	}
	for i := range n {
		if err := d.event(); err != nil {
			return fmt.Errorf("event %d: %w", i, err)
		}
	}
	return nil
}

func (d *Decoder) event() error {
	code, err := d.c.peek()
	if err != nil {
		return err
	}
	if isMap(code) {
		return d.mapEvent()
	}
	n, err := d.c.array()
	if err != nil {
		return err
	}
	if n == 0 {
		return errors.New("event without a tag")
	}
	tag, err := d.c.bytes()
	if err != nil {
		return err
	}
	n--
	form, known := forms[string(tag)]
	if !known {
		d.Skips.UnknownEvents++
		return d.c.skip(n)
	}
	if !slices.Contains(form.lengths, n) {
		return fmt.Errorf("%s of %d fields", tag, n)
	}
	r := raw{array: true, noExtras: n < extraKeysLength-1}
	for _, f := range form.fields[:n] {
		if err := d.read(&r, f); err != nil {
			return fmt.Errorf("%s: %w", tag, err)
		}
	}
	return d.finish(tag, &r)
}

// mapEvent reads the tag first, wherever it stands: in an event that is not
// known the other names may mean anything.
func (d *Decoder) mapEvent() error {
	n, err := d.c.mapping()
	if err != nil {
		return err
	}
	tag, err := d.tag(n)
	if err != nil {
		return err
	}
	form, known := forms[string(tag)]
	if !known {
		d.Skips.UnknownEvents++
		return d.c.skip(2 * n)
	}
	var r raw
	for range n {
		key, err := d.c.bytes()
		if err != nil {
			return err
		}
		f := fieldOf(key)
		switch f {
		case fieldUnknown:
			d.Skips.UnknownFields++
			err = d.c.skip(1)
		case fieldIgnored:
			err = d.c.skip(1)
		default:
			err = d.read(&r, f)
		}
		if err != nil {
			return fmt.Errorf("%s: %s: %w", tag, key, err)
		}
		r.has |= 1 << f
	}
	for _, f := range form.fields[:form.needed] {
		if r.has&(1<<f) == 0 {
			return fmt.Errorf("%s without its %s", tag, fieldNames[f])
		}
	}
	return d.finish(tag, &r)
}

// tag finds the type among n pairs, where it mostly comes first.
func (d *Decoder) tag(n int) ([]byte, error) {
	c := d.c
	for range n {
		key, err := c.bytes()
		if err != nil {
			return nil, err
		}
		if string(key) == "type" {
			return c.bytes()
		}
		if err := c.skip(1); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("event without a type")
}

// finish turns the fields into events, or counts why it does not.
func (d *Decoder) finish(tag []byte, r *raw) error {
	switch string(tag) {
	case "BlockStored":
		tier, ok := d.tier(r, r.local)
		if !ok {
			return nil
		}
		return d.stored(tier, r)
	case "BlockRemoved":
		// Storage that a store could have brought in goes out under any name.
		tier, ok := d.tier(r, true)
		if ok && len(r.hashes) > 0 {
			d.events = append(d.events, Event{Kind: Removed, Remove: mirror.Remove{
				Tier: tier, Group: r.group, HasGroup: r.hasGroup, Hashes: r.hashes,
			}})
		}
	case "AllBlocksCleared":
		d.events = append(d.events, Event{Kind: Cleared})
	}
	return nil
}

func (d *Decoder) tier(r *raw, local bool) (mirror.Tier, bool) {
	switch {
	case r.medium == mediumUnknown:
		d.Skips.UnknownMediums++
		return 0, false
	case r.remote || r.medium == mediumShared && !local:
		d.Skips.SharedStorage++
		return 0, false
	case r.medium == mediumGPU:
		return mirror.GPU, true
	case r.medium == mediumHost:
		return mirror.Host, true
	}
	return mirror.Disk, true
}

func (d *Decoder) stored(tier mirror.Tier, r *raw) error {
	s := mirror.Store{
		Tier: tier, Group: r.group, Kind: r.kind, Window: r.window,
		Hashes: r.hashes, Parent: r.parent, HasParent: r.hasParent,
		Tokens: r.tokens, BlockSize: r.blockSize,
		Adapter: d.name(r.loraName),
		// Offloading connectors send no extra keys, whatever the block's are.
		HidesExtras: r.noExtras || tier != mirror.GPU && r.extras == 0,
		// Hit reports came with 0.26, after the last arrays.
		Physical: r.array,
	}
	n := len(s.Hashes)
	clean := n
	if r.extras != 0 {
		x, err := d.extraKeys(r, n)
		if err != nil {
			return fmt.Errorf("extra keys: %w", err)
		}
		s.Salt, s.Refs, clean = x.salt, x.refs, x.clean
		d.Skips.UnknownExtras += uint64(n - clean)
	}
	if r.loraID && len(r.loraName) == 0 {
		d.Skips.NamelessLoRA += uint64(n)
		clean = 0
	}
	if clean == n {
		d.events = append(d.events, Event{Kind: Stored, Store: s})
		return nil
	}
	rest := s
	rest.Withhold, rest.Salt, rest.Refs = true, "", nil
	if clean > 0 && len(s.Tokens) == n*s.BlockSize {
		cut := clean * s.BlockSize
		s.Hashes, s.Tokens = s.Hashes[:clean], s.Tokens[:cut]
		if s.Refs != nil {
			s.Refs = s.Refs[:clean]
		}
		d.events = append(d.events, Event{Kind: Stored, Store: s})
		rest.Hashes, rest.Tokens = rest.Hashes[clean:], rest.Tokens[cut:]
		rest.Parent, rest.HasParent = s.Hashes[clean-1], true
	}
	d.events = append(d.events, Event{Kind: Stored, Store: rest})
	return nil
}

// name returns the text, the same string for the same name.
func (d *Decoder) name(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	if s, ok := d.names[string(b)]; ok {
		return s
	}
	if d.names == nil || len(d.names) >= maxNames {
		d.names = make(map[string]string)
	}
	s := string(b)
	d.names[s] = s
	return s
}
