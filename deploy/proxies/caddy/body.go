package kvscout

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync/atomic"
)

const (
	// maxBody bytes of a request are shown to the scheduler, whose messages have at
	// most 16 MiB. What is longer goes where the fallback policy says.
	maxBody = 15 << 20
	// maxBodies bounds the memory for the bodies of requests under way.
	maxBodies = 512 << 20
	// step by which a body grows at least.
	step = 16 << 10
)

// budget of memory for bodies.
type budget struct{ held atomic.Int64 }

// take reports false, and takes nothing, where there is no more.
func (b *budget) take(n int) bool {
	if b.held.Add(int64(n)) <= maxBodies {
		return true
	}
	b.held.Add(-int64(n))
	return false
}

// body of a request, in memory.
type body struct {
	of    *budget
	held  int
	bytes []byte
}

// read takes the whole body. Where it is too long, or there is no memory for it, it
// reports false, and the request has the body that it had.
func (b *body) read(r *http.Request) (whole bool, err error) {
	if r.Body == nil || r.ContentLength == 0 || r.ContentLength > maxBody {
		return false, nil
	}
	rest := r.Body
	for {
		if len(b.bytes) == cap(b.bytes) && !b.grow(r.ContentLength) {
			break
		}
		n, err := rest.Read(b.bytes[len(b.bytes):cap(b.bytes)])
		b.bytes = b.bytes[:len(b.bytes)+n]
		if errors.Is(err, io.EOF) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(b.bytes), rest), rest}
	return false, nil
}

// grow makes room, up to the length that is announced where there is one: a client
// that announces much and sends little takes little.
func (b *body) grow(announced int64) bool {
	more := max(step, len(b.bytes))
	if announced > 0 { // one more shows the end
		more = min(more, max(1, int(announced)+1-len(b.bytes)))
	}
	if len(b.bytes)+more > maxBody+step || !b.of.take(more) {
		return false
	}
	before := cap(b.bytes)
	b.bytes = slices.Grow(b.bytes, more)
	b.of.held.Add(int64(cap(b.bytes) - before - more)) // it rounds up
	b.held = cap(b.bytes)
	return true
}

func (b *body) release() { b.of.held.Add(-int64(b.held)) }
