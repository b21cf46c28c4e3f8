package fakevllm

import (
	"crypto/sha256"
	"encoding/binary"
)

// scope is what besides tokens goes into a block's hash.
type scope struct {
	adapter string
	path    string
	salt    string
}

// hashSeed starts every chain. It is fixed, so a restarted engine computes the
// same hashes again.
const hashSeed = 0x9e3779b97f4a7c15

// appendHashes extends dst, the hashes of the leading whole blocks of tokens,
// to all whole blocks. A hash is the tail of a digest over the parent, the
// tokens, the adapter and, in the first block, the salt.
func (s scope) appendHashes(dst []uint64, tokens []uint32, blockSize int) []uint64 {
	var scratch [512]byte
	for i := len(dst); (i+1)*blockSize <= len(tokens); i++ {
		parent := uint64(hashSeed)
		if i > 0 {
			parent = dst[i-1]
		}
		b := binary.BigEndian.AppendUint64(scratch[:0], parent)
		for _, t := range tokens[i*blockSize : (i+1)*blockSize] {
			b = binary.LittleEndian.AppendUint32(b, t)
		}
		if s.adapter != "" {
			b = append(b, "\x00lora\x00"...)
			b = append(b, s.adapter...)
			b = append(b, 0)
			b = append(b, s.path...)
		}
		if i == 0 && s.salt != "" {
			b = append(b, "\x00salt\x00"...)
			b = append(b, s.salt...)
		}
		sum := sha256.Sum256(b)
		dst = append(dst, binary.BigEndian.Uint64(sum[len(sum)-8:]))
	}
	return dst
}
