// Package vllm is all that the agent knows about vLLM: the wire format of its
// KV events in every release since 0.9, the event stream with its replay, the
// names of its metrics and its HTTP answers. What leaves the package is plain:
// events in order and in the words of the mirror, the incarnations of the engine,
// load samples. What the events add up to is left to the mirror, and who is told
// is left to publish.
package vllm
