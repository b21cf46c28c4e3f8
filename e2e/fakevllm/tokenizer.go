package fakevllm

import (
	"strings"
	"unicode/utf8"
)

// The toy tokenizer gives every byte of UTF-8 text one token: id = byte + 3.
// Ids 1 and 2 open and close a chat message, 0 is unknown. It is deterministic,
// reversible, and the tokens of a prefix are a prefix of the tokens.
const (
	tokenUnknown = 0
	tokenOpen    = 1 // <|im_start|>
	tokenClose   = 2 // <|im_end|>
	tokenByte    = 3 // the first byte token

	// vocabulary bounds the ids that a prompt may name.
	vocabulary = 1 << 18
)

func appendText(dst []uint32, text string) []uint32 {
	for i := range len(text) {
		dst = append(dst, tokenByte+uint32(text[i]))
	}
	return dst
}

// message is one message of a chat.
type message struct {
	role, content string
}

// appendChat applies the toy template:
//
//	<|im_start|>ROLE\nCONTENT<|im_end|>\n ... <|im_start|>assistant\n
func appendChat(dst []uint32, messages []message, generate bool) []uint32 {
	for _, m := range messages {
		dst = append(dst, tokenOpen)
		dst = appendText(dst, m.role+"\n"+m.content)
		dst = append(dst, tokenClose)
		dst = appendText(dst, "\n")
	}
	if generate {
		dst = append(dst, tokenOpen)
		dst = appendText(dst, "assistant\n")
	}
	return dst
}

// text is the reverse of the tokenizer. What is not a byte becomes U+FFFD.
func text(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		switch {
		case t == tokenOpen:
			b.WriteString("<|im_start|>")
		case t == tokenClose:
			b.WriteString("<|im_end|>")
		case t >= tokenByte && t < tokenByte+256:
			b.WriteByte(byte(t - tokenByte))
		default:
			b.WriteRune(utf8.RuneError)
		}
	}
	return strings.ToValidUTF8(b.String(), string(utf8.RuneError))
}

// generated is the i-th token that a sequence in the given state generates: a
// letter that depends on the seed and all tokens before.
func generated(seed, state uint64, i int) uint32 {
	x := seed ^ state ^ uint64(i)*0x9e3779b97f4a7c15
	x ^= x >> 31
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 29
	return tokenByte + 'a' + uint32(x%26)
}
