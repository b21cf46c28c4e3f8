package blockhash

import "encoding/binary"

// Opcodes of Python's pickle, protocol 5.
const (
	opProto      = 0x80
	opFrame      = 0x95
	opStop       = '.'
	opMark       = '('
	opTuple      = 't'
	opTuple1     = 0x85 // to 0x87, of three
	opMemoize    = 0x94
	opNone       = 'N'
	opByte       = 'K'
	opTwoBytes   = 'M'
	opInt        = 'J'
	opLong       = 0x8a
	opBytes      = 'C'
	opShortText  = 0x8c
	opLongerText = 'X'
)

const (
	// frameHead is what stands before the body of a frame.
	frameHead = 2 + 1 + 8
	// maxFrame is the body that is written as one frame.
	maxFrame = 1<<16 - 1
)

// opened begins a pickle, frame ends it once all is written.
func opened(b []byte) []byte {
	return append(b, opProto, 5, opFrame, 0, 0, 0, 0, 0, 0, 0, 0)
}

func frame(b []byte) []byte {
	if b[len(b)-1] != opStop {
		b = append(b, opStop)
	}
	binary.LittleEndian.PutUint64(b[frameHead-8:], uint64(len(b)-frameHead))
	return b
}

// appendPickle writes a block in pickle, its frame not yet measured.
func (h *Hasher) appendPickle(b []byte, parent *Digest, tokens []uint32, x *Extras) []byte {
	b = append(opened(b), opBytes, byte(h.size()))
	b = append(append(b, parent[:h.size()]...), opMemoize)
	b = pickleOpen(b, len(tokens))
	for _, t := range tokens {
		b = pickleInt(b, int64(t))
	}
	b = pickleClose(b, len(tokens))
	if n := x.keys(); n == 0 {
		b = append(b, opNone)
	} else {
		b = pickleOpen(b, n)
		if x.Adapter != "" {
			if h.tagged {
				b = pickleText(b, "lora")
			}
			if b = pickleText(b, x.Adapter); h.tagged {
				b = pickleClose(pickleText(b, x.Root), 3)
			}
		}
		for _, item := range x.Items {
			parts := 2
			if h.tagged {
				b, parts = pickleText(b, "mm"), 3
			}
			b = pickleClose(pickleInt(pickleText(b, item.ID), int64(item.Offset)), parts)
		}
		if x.Salt != "" {
			if h.tagged {
				b = pickleText(b, "cache_salt")
			}
			if b = pickleText(b, x.Salt); h.tagged {
				b = pickleClose(b, 2)
			}
		}
		b = pickleClose(b, n)
	}
	return append(b, opTuple1+2, opMemoize, opStop)
}

// pickleOpen begins a tuple of n, pickleClose ends it.
func pickleOpen(b []byte, n int) []byte {
	if n > 3 {
		return append(b, opMark)
	}
	return b
}

func pickleClose(b []byte, n int) []byte {
	switch {
	case n == 0:
		return append(b, ')')
	case n <= 3:
		return append(b, opTuple1+byte(n-1), opMemoize)
	}
	return append(b, opTuple, opMemoize)
}

func pickleInt(b []byte, v int64) []byte {
	switch {
	case v >= 0 && v < 1<<8:
		return append(b, opByte, byte(v))
	case v >= 0 && v < 1<<16:
		return binary.LittleEndian.AppendUint16(append(b, opTwoBytes), uint16(v))
	case v >= -1<<31 && v < 1<<31:
		return binary.LittleEndian.AppendUint32(append(b, opInt), uint32(int32(v)))
	}
	// Two's complement with as few bytes as hold the sign.
	n := 5
	for n < 8 && v>>(8*n-1) != v>>63 {
		n++
	}
	return append(append(b, opLong, byte(n)), binary.LittleEndian.AppendUint64(nil, uint64(v))[:n]...)
}

func pickleText(b []byte, s string) []byte {
	if len(s) < 1<<8 {
		b = append(b, opShortText, byte(len(s)))
	} else {
		b = binary.LittleEndian.AppendUint32(append(b, opLongerText), uint32(len(s)))
	}
	return append(append(b, s...), opMemoize)
}
