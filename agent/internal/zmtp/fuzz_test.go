package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"testing"
	"testing/iotest"
)

// Small limits let the fuzzer reach them.
var fuzzOptions = Options{Type: SUB, MaxMessage: 4 << 20, MaxFrames: 8}

// listenToTape receives until the end and copies what came. It checks what must
// hold for any bytes: an error of a promised kind, and memory in proportion to
// what arrived.
func listenToTape(t *testing.T, said []byte, r io.Reader) [][][]byte {
	t.Helper()
	c, tp := playTape(t, r, fuzzOptions)
	var got [][][]byte
	var m Message
	for {
		err := c.Recv(&m)
		// The buffer may be twice what has come, and a bit.
		if held, most := cap(m.data), 2*len(said)+firstGrowth; held > most {
			t.Fatalf("%d bytes made us hold %d, more than %d", len(said), held, most)
		}
		if err != nil {
			if !expected(err) {
				t.Fatalf("unexpected kind of error: %v", err)
			}
			if again := c.Recv(&m); !errors.Is(again, err) {
				t.Fatalf("error %v became %v", err, again)
			}
			break
		}
		if len(m.Frames) == 0 || len(m.Frames) > fuzzOptions.MaxFrames {
			t.Fatalf("message of %d frames", len(m.Frames))
		}
		var copied [][]byte
		for _, f := range m.Frames {
			copied = append(copied, bytes.Clone(f))
		}
		got = append(got, copied)
	}
	if n := tp.said.Len(); n > 1000+9*len(said) {
		t.Fatalf("%d bytes made us say %d", len(said), n)
	}
	if c.out != nil && cap(c.out) > keptBuffer {
		t.Fatalf("write buffer of %d bytes", cap(c.out))
	}
	return got
}

func same(a, b [][][]byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if len(a[i]) != len(b[i]) {
			return false
		}
		for j := range a[i] {
			if !bytes.Equal(a[i][j], b[i][j]) {
				return false
			}
		}
	}
	return true
}

// FuzzConn takes all that a peer says, from the first byte on.
func FuzzConn(f *testing.F) {
	f.Fuzz(func(t *testing.T, said []byte) {
		got := listenToTape(t, said, bytes.NewReader(said))
		again := listenToTape(t, said, iotest.HalfReader(bytes.NewReader(said)))
		if !same(got, again) {
			t.Fatalf("messages depend on how they arrive: %d, %d", len(got), len(again))
		}
	})
}

// FuzzFrames takes what a peer says after a good handshake, and holds the
// result against a reader that has everything in one slice.
func FuzzFrames(f *testing.F) {
	f.Fuzz(func(t *testing.T, said []byte) {
		stream := join(hello("PUB"), said)
		got := listenToTape(t, stream, iotest.OneByteReader(bytes.NewReader(stream)))
		if want := readSlice(said); !same(got, want) {
			t.Fatalf("got %q, want %q", got, want)
		}
	})
}

// readSlice is the slow, plain reading of the specification.
func readSlice(b []byte) (messages [][][]byte) {
	var message [][]byte
	total := 0
	for len(b) >= 2 {
		flags := b[0]
		if flags > 7 || flags&5 == 5 {
			return messages
		}
		size := uint64(b[1])
		if flags&2 != 0 {
			if len(b) < 9 {
				return messages
			}
			size, b = binary.BigEndian.Uint64(b[1:]), b[9:]
		} else {
			b = b[2:]
		}
		if size > math.MaxInt64 {
			return messages
		}
		if flags&4 != 0 {
			if size > maxCommand || size > uint64(len(b)) || !goodCommand(b[:size]) {
				return messages
			}
			b = b[size:]
			continue
		}
		if len(message) == fuzzOptions.MaxFrames || size+uint64(total) > uint64(fuzzOptions.MaxMessage) || size > uint64(len(b)) {
			return messages
		}
		message, b = append(message, b[:size]), b[size:]
		total += int(size)
		if flags&1 == 0 {
			messages, message, total = append(messages, message), nil, 0
		}
	}
	return messages
}

func goodCommand(b []byte) bool {
	if len(b) < 2 || b[0] == 0 || int(b[0]) >= len(b) {
		return false
	}
	name, body := string(b[1:1+b[0]]), len(b)-1-int(b[0])
	return name != "ERROR" && (name != "PING" || body >= 2 && body <= 18)
}

// FuzzParseEndpoint: what is accepted comes back as it was.
func FuzzParseEndpoint(f *testing.F) {
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseEndpoint(s)
		if err != nil {
			return
		}
		if again, err := ParseEndpoint(e.String()); err != nil || again != e {
			t.Fatalf("%q is %+v, then %+v, %v", s, e, again, err)
		}
	})
}

func TestExpectedErrorsAreReported(t *testing.T) {
	if expected(errors.New("other")) {
		t.Error("any error counts as expected: the fuzz tests verify nothing")
	}
}
