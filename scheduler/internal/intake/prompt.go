package intake

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Request is what the caller said beside the prompt.
type Request struct {
	// Model as the client names it, Adapter when Model does not name it.
	Model, Adapter, Salt string
	// Items lie in the prompt's token coordinates, sorted by offset.
	Items []blockkey.Item
	// SkipsCache: the engine will not read its prefix cache for this request.
	SkipsCache bool
}

// Prompt is a request whose prompt has keys, or can get them. Either Tokens
// or BlockSize is set, or Fallback says why not. The slices may be the
// caller's or the cache's: they are to be read only.
type Prompt struct {
	Request
	// Tokens are the ids as little-endian uint32.
	Tokens []byte
	// Keys for blocks of BlockSize tokens; there may be none of them when the
	// prompt is shorter than a block.
	Keys      []blockkey.Key
	BlockSize int
	// Length of the prompt in tokens; 0: not known.
	Length int
	// Beginning of a prompt that is text, at least its first 1,000 characters:
	// of a chat that of the JSON of its messages.
	Beginning string
	// Note says what the caller should know of the answer; mostly empty.
	Note string
	// Fallback says why there are neither tokens nor keys.
	Fallback string
}

// lookup is the name by which engines are found.
func (p *Prompt) lookup() string { return cmp.Or(p.Adapter, p.Model) }

// Tokens takes token ids.
func (i *Intake) Tokens(r Request, ids []uint32) (Prompt, error) {
	i.counts.tokens.Add(1)
	p := Prompt{Request: r, Length: len(ids)}
	if err := i.check(&p); err != nil {
		return Prompt{}, err
	}
	p.Tokens = littleEndian(ids)
	return p, nil
}

// Keys takes ready block keys. A length of 0 stands for whole blocks.
func (i *Intake) Keys(r Request, keys []uint64, blockSize uint32, length uint64) (Prompt, error) {
	i.counts.keys.Add(1)
	switch covered := uint64(len(keys)) * uint64(blockSize); {
	case blockSize == 0:
		return Prompt{}, fmt.Errorf("block keys: block size is 0: %w", ErrInvalid)
	case length == 0:
		length = covered
	case length < covered:
		return Prompt{}, fmt.Errorf("block keys: %d keys of %d tokens are more than the prompt's %d: %w",
			len(keys), blockSize, length, ErrInvalid)
	}
	if length > uint64(i.cfg.MaxTokens) {
		return Prompt{}, tooLong(length, i.cfg.MaxTokens)
	}
	p := Prompt{Request: r, BlockSize: int(blockSize), Length: int(length), Keys: blockkey.Keys(keys)}
	if n := slices.Index(keys, 0); n >= 0 {
		return Prompt{}, fmt.Errorf("block keys: key %d is 0, which is never a key: %w", n, ErrInvalid)
	}
	// Items are part of the keys already.
	p.Items = nil
	if err := i.check(&p); err != nil {
		return Prompt{}, err
	}
	return p, nil
}

// None takes a request without a prompt.
func (i *Intake) None(r Request) Prompt {
	i.counts.none.Add(1)
	return Prompt{Request: r, Fallback: "no prompt in the request"}
}

// Body takes a whole body for /v1/completions or /v1/chat/completions. What
// it says of model and salt counts where the request says nothing.
func (i *Intake) Body(ctx context.Context, r Request, body []byte) (Prompt, error) {
	i.counts.bodies.Add(1)
	if err := noItems(r); err != nil {
		return Prompt{}, err
	}
	b, err := parseBody(body)
	if err != nil {
		return Prompt{}, err
	}
	r.Model = cmp.Or(r.Model, b.model)
	r.Salt = cmp.Or(r.Salt, b.salt)
	r.SkipsCache = r.SkipsCache || b.skipsCache()
	p := Prompt{Request: r, Note: b.note, Beginning: b.beginning()}
	switch {
	case b.why != "":
		i.counts.unresolved.Add(1)
		p.Fallback = b.why
		return p, nil
	case b.ids != nil:
		p.Tokens, p.Length = b.ids, len(b.ids)/4
		return p, i.check(&p)
	}
	return i.resolve(ctx, p, b.document(r.Model))
}

// check holds the bounds that all forms share.
func (i *Intake) check(p *Prompt) error {
	if p.Length == 0 {
		return fmt.Errorf("the prompt has 0 tokens: %w", ErrInvalid)
	}
	if p.Length > i.cfg.MaxTokens {
		return tooLong(uint64(p.Length), i.cfg.MaxTokens)
	}
	end := 0
	for n, it := range p.Items {
		switch {
		case it.ID == "":
			return fmt.Errorf("item %d has no hash: %w", n, ErrInvalid)
		case it.Length <= 0 || it.Offset < end || it.Offset > p.Length-it.Length:
			return fmt.Errorf("item %d (offset %d, length %d) overlaps, is out of order or outside the prompt's %d tokens: %w",
				n, it.Offset, it.Length, p.Length, ErrInvalid)
		}
		end = it.Offset + it.Length
	}
	return nil
}

func tooLong(length uint64, limit int) error {
	return fmt.Errorf("the prompt has %d tokens, the limit is %d: %w", length, limit, ErrInvalid)
}

// noItems refuses items beside text: they lie in token coordinates, which
// only the engine knows there.
func noItems(r Request) error {
	if len(r.Items) > 0 {
		return fmt.Errorf("multimodal items go with token ids; for text and chat the engine finds them: %w", ErrInvalid)
	}
	return nil
}

// hostIsLittle: memory holds the wire's order.
var hostIsLittle = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// littleEndian returns the ids as bytes, without copying where the machine
// has them in that order: prompts are long, and this is the hot path.
func littleEndian(ids []uint32) []byte {
	if len(ids) == 0 {
		return nil
	}
	if hostIsLittle {
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(ids))), 4*len(ids))
	}
	le := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		le = binary.LittleEndian.AppendUint32(le, id)
	}
	return le
}
