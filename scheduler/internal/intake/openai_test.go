package intake

import "testing"

// Where the logprobs of the prompt are asked for, the engine computes all of it.
func TestBodiesThatSkipTheCacheSaySo(t *testing.T) {
	const prompt, chat = `"prompt":[1,2,3]`, `"messages":[{"role":"user","content":"x"}]`
	for fields, want := range map[string]bool{
		prompt:                                     false,
		prompt + `,"prompt_logprobs":0`:            true,
		prompt + `,"prompt_logprobs":null`:         false,
		prompt + `,"logprobs":1`:                   false,
		prompt + `,"echo":true`:                    false,
		prompt + `,"echo":true,"logprobs":0`:       true,
		prompt + `,"echo":1,"logprobs":1`:          true,
		prompt + `,"echo":false,"logprobs":1`:      false,
		prompt + `,"echo":null,"logprobs":1`:       false,
		chat:                                       false,
		chat + `,"prompt_logprobs":1`:              true,
		chat + `,"logprobs":true`:                  false,
		chat + `,"echo":false,"top_logprobs":2`:    false,
		chat + `,"logprobs":true,"echo":true`:      true,
		chat + `,"echo":true`:                      true, // top_logprobs is 0, not none
		chat + `,"logprobs":true,"top_logprobs":2`: false,
	} {
		b, err := parseBody([]byte("{" + fields + "}"))
		if err != nil {
			t.Fatalf("%s: %v", fields, err)
		}
		if got := b.skipsCache(); got != want {
			t.Errorf("%s: skips the cache: %v, want %v", fields, got, want)
		}
	}
}
