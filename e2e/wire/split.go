package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// maxMessage bounds a message that is split off.
const maxMessage = 64 << 20

// pieces are whatever has arrived; none is a message.
func pieces(r *bufio.Reader) (piece []byte, message bool, err error) { //nolint:unparam // a Split
	if _, err := r.Peek(1); err != nil {
		return nil, false, err
	}
	piece = make([]byte, r.Buffered())
	_, err = io.ReadFull(r, piece)
	return piece, false, err
}

// NATS splits what a NATS client sends. What it publishes is free.
func NATS() Split {
	return func(r *bufio.Reader) ([]byte, bool, error) {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return nil, false, err
		}
		if !bytes.HasPrefix(line, []byte("PUB ")) && !bytes.HasPrefix(line, []byte("HPUB ")) {
			return line, false, nil
		}
		fields := bytes.Fields(line)
		n, err := strconv.Atoi(string(fields[len(fields)-1]))
		if err != nil || n < 0 || n > maxMessage {
			return nil, false, fmt.Errorf("size in %.80q", line)
		}
		head := len(line)
		line = append(line, make([]byte, n+2)...)
		_, err = io.ReadFull(r, line[head:])
		return line, true, err
	}
}

// Payload is what a message that NATS split off carries.
func Payload(message []byte) []byte {
	i := bytes.IndexByte(message, '\n')
	return message[i+1 : len(message)-2]
}

// WithPayload is the same PUB with another payload.
func WithPayload(message, payload []byte) []byte {
	line, _, _ := bytes.Cut(message, []byte("\r\n"))
	out := append([]byte{}, line[:bytes.LastIndexByte(line, ' ')+1]...)
	out = strconv.AppendInt(out, int64(len(payload)), 10)
	out = append(out, "\r\n"...)
	out = append(out, payload...)
	return append(out, "\r\n"...)
}

// ZMTP splits what a ZeroMQ peer sends. Its messages are free.
func ZMTP() Split {
	greeted := false
	return func(r *bufio.Reader) ([]byte, bool, error) {
		if !greeted {
			greeted = true
			b := make([]byte, 64)
			_, err := io.ReadFull(r, b)
			return b, false, err
		}
		var message []byte
		for {
			flags, err := r.ReadByte()
			if err != nil {
				return nil, false, err
			}
			message = append(message, flags)
			var size uint64
			if flags&2 != 0 {
				var long [8]byte
				if _, err := io.ReadFull(r, long[:]); err != nil {
					return nil, false, err
				}
				size = binary.BigEndian.Uint64(long[:])
				message = append(message, long[:]...)
			} else {
				short, err := r.ReadByte()
				if err != nil {
					return nil, false, err
				}
				size = uint64(short)
				message = append(message, short)
			}
			if size > maxMessage {
				return nil, false, errors.New("frame is too large")
			}
			head := len(message)
			message = append(message, make([]byte, size)...)
			if _, err := io.ReadFull(r, message[head:]); err != nil {
				return nil, false, err
			}
			if flags&4 != 0 {
				return message, false, nil // a command
			}
			if flags&1 == 0 {
				return message, true, nil
			}
		}
	}
}
