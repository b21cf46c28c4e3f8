package buffers

import (
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Whatever lies in a used buffer, the next message is itself.
func TestCodecKeepsMessagesApart(t *testing.T) {
	pool := &pool{}
	c := codec{pool}
	for _, size := range []int{0, 1, 1000, 1024, 1025, 40_000, 300, 1<<largestBuffer + 1, 20} {
		want := &api.PickRequest{Request: &api.Request{Model: "m", Prompt: api.Body(strings.Repeat("x", size))}}
		wire, err := c.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		whole := wire.Materialize()
		half := len(whole) / 2
		wire.Free()
		for _, parts := range []mem.BufferSlice{
			{mem.SliceBuffer(whole)},
			{mem.SliceBuffer(whole[:half]), mem.SliceBuffer(whole[half:])},
		} {
			got := &api.PickRequest{}
			if err := c.Unmarshal(parts, got); err != nil {
				t.Fatalf("%d bytes: %v", size, err)
			}
			// Nothing of the message may lie in a buffer that is used again.
			dirt := pool.Get(len(whole))
			clear(*dirt)
			pool.Put(dirt)
			if !proto.Equal(got, want) {
				t.Errorf("%d bytes in %d parts came out differently", size, len(parts))
			}
		}
	}
}

func TestCodecTakesOnlyMessages(t *testing.T) {
	c := codec{&pool{}}
	if _, err := c.Marshal("text"); err == nil {
		t.Error("text was marshalled")
	}
	if err := c.Unmarshal(nil, new(int)); err == nil {
		t.Error("a number was unmarshalled")
	}
	if err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer{0xff}}, &api.PickRequest{}); err == nil {
		t.Error("nonsense was unmarshalled")
	}
}

func TestBuffersHaveTheLengthAskedFor(t *testing.T) {
	pool := &pool{}
	for _, n := range []int{0, 1, 1023, 1024, 1025, 1 << largestBuffer, 1<<largestBuffer + 1} {
		for range 2 {
			buf := pool.Get(n)
			if len(*buf) != n {
				t.Errorf("asked for %d, got %d", n, len(*buf))
			}
			pool.Put(buf)
		}
	}
	odd := make([]byte, 1500)
	pool.Put(&odd)
	if got := pool.Get(1500); cap(*got) < 1500 {
		t.Error("an odd buffer was kept")
	}
}
