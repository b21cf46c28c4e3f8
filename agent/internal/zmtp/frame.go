package zmtp

import (
	"encoding/binary"
	"math"
)

// Frame flags; every other bit is reserved and must be zero.
const (
	flagMore    = 0x01
	flagLong    = 0x02
	flagCommand = 0x04
)

// header reads the next frame's flags and size; begun: of a message that is not
// whole yet.
func (c *Conn) header(begun bool) (flags byte, size uint64, err error) {
	b, err := c.in.Peek(2)
	if err != nil {
		return 0, 0, torn(begun || len(b) > 0, err)
	}
	flags, size = b[0], uint64(b[1])
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, 0, protocolErrorf("frame flags 0x%02x use reserved bits", flags)
	}
	if flags&flagCommand != 0 && flags&flagMore != 0 {
		return 0, 0, protocolErrorf("frame flags 0x%02x: a command has no more frames", flags)
	}
	taken := 2
	if flags&flagLong != 0 {
		if b, err = c.in.Peek(9); err != nil {
			return 0, 0, torn(true, err)
		}
		size, taken = binary.BigEndian.Uint64(b[1:]), 9
		if size > math.MaxInt64 {
			return 0, 0, protocolErrorf("frame size 0x%016x uses the reserved bit", size)
		}
	}
	_, _ = c.in.Discard(taken) // cannot fail: these bytes were peeked
	return flags, size, nil
}

// appendHeader appends the shortest header for a frame.
func appendHeader(dst []byte, flags byte, size int) []byte {
	if size < 256 {
		return append(dst, flags, byte(size))
	}
	dst = append(dst, flags|flagLong)
	return binary.BigEndian.AppendUint64(dst, uint64(size))
}

// appendMessage appends frames as one multipart message.
func appendMessage(dst []byte, frames ...[]byte) []byte {
	for i, frame := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		dst = appendHeader(dst, flags, len(frame))
		dst = append(dst, frame...)
	}
	return dst
}
