package vllm

// medium is what an event's medium and locality come to.
type medium uint8

const (
	mediumGPU medium = iota
	mediumHost
	mediumDisk   // local by its nature
	mediumShared // may be shared: local only when the event says so
	mediumUnknown
)

// mediums lists the names of vLLM, of its connectors and of engines with the
// same events, in upper case. A missing medium is the GPU pool.
var mediums = map[string]medium{
	"GPU":        mediumGPU,
	"CPU":        mediumHost,
	"CPU_PINNED": mediumHost,
	"CPU_TIER1":  mediumHost,
	"CPU_TIER2":  mediumDisk,
	"DISK":       mediumDisk,
	"NVME":       mediumDisk,
	"FS":         mediumShared,
	"OBJ":        mediumShared,
	"STORAGE":    mediumShared,
}

// mediumOf is indifferent to case and does not allocate.
func mediumOf(name []byte) medium {
	var buf [16]byte
	if len(name) > len(buf) {
		return mediumUnknown
	}
	for i, c := range name {
		if 'a' <= c && c <= 'z' {
			c -= 'a' - 'A'
		}
		buf[i] = c
	}
	m, ok := mediums[string(buf[:len(name)])]
	if !ok {
		return mediumUnknown
	}
	return m
}
