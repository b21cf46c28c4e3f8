package zmtp

// keptBuffer is the size up to which a buffer is kept for good. A
// bigger one is dropped once messages no longer need it.
const keptBuffer = 1 << 20

// firstGrowth is how much room is made ahead of bytes that have not come yet.
const firstGrowth = 64 << 10

// usualFrames is how many frames a new message has room for at once.
const usualFrames = 4

// Message is one multipart message. The zero value is ready for Recv, and
// using one value again and again reuses its memory.
type Message struct {
	// Frames are valid until the next Recv into the same Message.
	Frames [][]byte

	data []byte // payloads of all frames, one behind the other
	ends []int  // where each frame ends in data
}

func (m *Message) reset() {
	if cap(m.data) > keptBuffer && len(m.data) < cap(m.data)/4 {
		m.data = nil
	}
	m.Frames, m.data, m.ends = m.Frames[:0], m.data[:0], m.ends[:0]
}

// grow makes room for at least one more byte of a message that still lacks
// left bytes and may reach limit. The new size is bounded by twice what has
// arrived plus a constant: a claim alone costs next to nothing.
func (m *Message) grow(left, limit int) {
	have := len(m.data)
	want := max(have+left, 2*cap(m.data), 512)
	size := min(want, 2*have+firstGrowth, limit)
	data := make([]byte, have, size)
	copy(data, m.data)
	m.data = data
}

func (m *Message) endFrame() {
	if m.ends == nil {
		m.ends = make([]int, 0, usualFrames)
	}
	m.ends = append(m.ends, len(m.data))
}

// finish cuts the frames out of data.
func (m *Message) finish() {
	if m.Frames == nil {
		m.Frames = make([][]byte, 0, max(len(m.ends), usualFrames))
	}
	start := 0
	for _, end := range m.ends {
		m.Frames = append(m.Frames, m.data[start:end:end])
		start = end
	}
}
