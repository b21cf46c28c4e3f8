// Package buffers holds the memory in which gRPC writes and reads the messages of
// the API, at both ends: for connections and servers of any protobuf service.
//
// gRPC's own pool goes from 32 KiB to 1 MiB in one step, which is where prompts of
// 8,000 tokens are, and clears the whole buffer for each message.
package buffers

import (
	"fmt"
	"math/bits"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

const (
	// smallestBuffer and largestBuffer that are pooled, as powers of two.
	smallestBuffer, largestBuffer = 10, 24
)

// Client returns the options of a connection that uses these buffers.
func Client() []grpc.DialOption {
	p := &pool{}
	return []grpc.DialOption{experimental.WithBufferPool(p), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(codec{p}))}
}

// Server returns the options of a server that uses these buffers.
func Server() []grpc.ServerOption {
	p := &pool{}
	return []grpc.ServerOption{experimental.BufferPool(p), grpc.ForceServerCodecV2(codec{p})}
}

// pool of message buffers, one size for each power of two. Whoever gets a buffer
// writes all of it before it is read.
type pool struct {
	bySize [largestBuffer - smallestBuffer + 1]sync.Pool // of *[]byte
}

// Get returns a buffer of that length with any content.
func (p *pool) Get(length int) *[]byte {
	if length > 1<<largestBuffer {
		buf := make([]byte, length)
		return &buf
	}
	exponent := max(bits.Len(uint(max(length, 1)-1)), smallestBuffer)
	if buf, ok := p.bySize[exponent-smallestBuffer].Get().(*[]byte); ok {
		*buf = (*buf)[:length]
		return buf
	}
	buf := make([]byte, length, 1<<exponent)
	return &buf
}

// Put takes a buffer back; one of another size is left to the collector.
func (p *pool) Put(buf *[]byte) {
	size := cap(*buf)
	exponent := bits.Len(uint(size)) - 1
	if exponent < smallestBuffer || exponent > largestBuffer || size != 1<<exponent {
		return
	}
	p.bySize[exponent-smallestBuffer].Put(buf)
}

// codec is protobuf as gRPC's own codec writes and reads it, with these
// buffers in place of its global ones.
type codec struct{ buffers *pool }

func (codec) Name() string { return "proto" }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("marshal %T: not a message", v)
	}
	size := proto.Size(m)
	buf := c.buffers.Get(size)
	out, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend((*buf)[:0], m)
	if err != nil {
		c.buffers.Put(buf)
		return nil, err
	}
	if len(out) != size {
		return nil, fmt.Errorf("marshal %T: %d bytes announced, %d written", v, size, len(out))
	}
	return mem.BufferSlice{mem.NewBuffer(buf, c.buffers)}, nil
}

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("unmarshal %T: not a message", v)
	}
	buf := data.MaterializeToBuffer(c.buffers)
	defer buf.Free()
	return proto.Unmarshal(buf.ReadOnlyData(), m)
}
