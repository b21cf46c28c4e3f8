package pick

import (
	"fmt"
	"testing"

	"github.com/kvscout/kvscout/protocol/blockkey"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
)

// BenchmarkPick: 8,192 token ids, 64 members, half of the prompt held by each
// of the first eight. "hash" is the hashing alone.
func BenchmarkPick(b *testing.B) {
	bed := newBed(b)
	le := prompt(1, 0, 8192)
	for i := range 64 {
		id := bed.join(fmt.Sprintf("m%02d", i))
		if i < 8 {
			bed.gpu(id, le, 32*(i+1))
		}
		bed.load(id, i%5, 0, t0)
	}
	run := func(name string, r Request) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				d := bed.pick(r)
				if r.Reserve {
					bed.Report(Report{Decision: d.ID, Outcome: fleet.Finished}, t0)
				}
			}
		})
	}
	run("score", Request{Prompt: tokens(le)})
	run("score/top1", Request{Prompt: tokens(le), Top: 1})
	run("pick", Request{Prompt: tokens(le), Reserve: true})
	run("pick/top1", Request{Prompt: tokens(le), Reserve: true, Top: 1})
	run("pick/cold/top1", Request{Prompt: tokens(prompt(2, 0, 8192)), Reserve: true, Top: 1})
	keys, _ := blockkey.AppendBytes(nil, blockkey.Scope{Model: "model", BlockSize: 16}.Root(), le, 16, nil)
	run("pick/keys/top1", Request{Prompt: Prompt{Keys: keys, BlockSize: 16, Length: 8192}, Reserve: true, Top: 1})
	run("pick/none/top1", Request{Reserve: true, Top: 1})
	b.Run("hash", func(b *testing.B) {
		root := blockkey.Scope{Model: "model", BlockSize: 16}.Root()
		for b.Loop() {
			keys, _ = blockkey.AppendBytes(keys[:0], root, le, 16, nil)
		}
	})
}
