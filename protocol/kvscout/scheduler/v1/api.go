// Package api is the scheduler's API: messages and services generated from the
// .proto files beside this one, and short forms for Go.
package api

import "strings"

// TokenIDs is a prompt of token ids.
func TokenIDs(ids []uint32) *Prompt { return &Prompt{Form: &Prompt_Tokens{Tokens: &Tokens{Ids: ids}}} }

// Keys is a prompt of block keys.
func Keys(keys []uint64, blockSize uint32) *Prompt {
	return &Prompt{Form: &Prompt_BlockKeys{BlockKeys: &BlockKeys{Keys: keys, BlockSizeTokens: blockSize}}}
}

// Body is a prompt as the whole body of an OpenAI request.
func Body(json string) *Prompt { return &Prompt{Form: &Prompt_OpenaiBody{OpenaiBody: []byte(json)}} }

// Lacks is what the answer does not stand on, in one sentence; empty: nothing.
func (r *Ranking) Lacks() string {
	texts := make([]string, len(r.GetFallbacks()))
	for i, f := range r.GetFallbacks() {
		texts[i] = f.GetExplanation()
	}
	return strings.Join(texts, "; ")
}
