package blockhash

import "encoding/binary"

// Major types of CBOR, and its null.
const (
	cborUnsigned = 0 << 5
	cborNegative = 1 << 5
	cborBytes    = 2 << 5
	cborString   = 3 << 5
	cborArray    = 4 << 5
	cborNull     = 0xf6
)

// appendCBOR writes a block in canonical CBOR.
func (h *Hasher) appendCBOR(b []byte, parent *Digest, tokens []uint32, x *Extras) []byte {
	b = cborHead(b, cborArray, 3)
	b = cborHead(b, cborBytes, uint64(h.size()))
	b = append(b, parent[:h.size()]...)
	b = cborHead(b, cborArray, uint64(len(tokens)))
	for _, t := range tokens {
		b = cborHead(b, cborUnsigned, uint64(t))
	}
	n := x.keys()
	if n == 0 {
		return append(b, cborNull)
	}
	b = cborHead(b, cborArray, uint64(n))
	if x.Adapter != "" {
		if h.tagged {
			b = cborText(cborHead(b, cborArray, 3), "lora")
		}
		if b = cborText(b, x.Adapter); h.tagged {
			b = cborText(b, x.Root)
		}
	}
	for _, item := range x.Items {
		if h.tagged {
			b = cborText(cborHead(b, cborArray, 3), "mm")
		} else {
			b = cborHead(b, cborArray, 2)
		}
		b = cborInt(cborText(b, item.ID), item.Offset)
	}
	if x.Salt != "" {
		if h.tagged {
			b = cborText(cborHead(b, cborArray, 2), "cache_salt")
		}
		b = cborText(b, x.Salt)
	}
	return b
}

func cborHead(b []byte, major byte, n uint64) []byte {
	switch {
	case n < 24:
		return append(b, major|byte(n))
	case n < 1<<8:
		return append(b, major|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(n))
	case n < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, major|26), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, major|27), n)
}

func cborInt(b []byte, v int) []byte {
	if v < 0 {
		return cborHead(b, cborNegative, uint64(-1-v))
	}
	return cborHead(b, cborUnsigned, uint64(v))
}

func cborText(b []byte, s string) []byte {
	return append(cborHead(b, cborString, uint64(len(s))), s...)
}
