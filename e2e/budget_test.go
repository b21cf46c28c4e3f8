package e2e

import (
	"testing"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/scheduler"
)

// TestIndexBeyondItsBudget lets two engines hold a tenth more than the index may
// take. It sheds the deep ends of prompts, says so, and stays right with what it
// keeps; an engine that starts anew is exact again.
func TestIndexBeyondItsBudget(t *testing.T) {
	t.Parallel()
	const budget = 4 << 20
	p := open(t, stage.Options{Change: func(c *scheduler.Config) { c.IndexBytes = budget }})
	// Blocks of one token, so that few requests make many of them.
	cfg := fakevllm.Config{BlockSize: 1, Blocks: 1 << 20, MaxBatchedTokens: 1 << 16, MaxModelLen: 1 << 16, Speedup: 1e6}
	engines := []*engine{p.engine(cfg).watched("one"), p.engine(cfg).watched("two")}
	const shared = 200
	head := random(1, shared)
	shed := func() float64 { return p.counted(p.Admin, "kvscout_scheduler_index_entries_shed_total", "") }
	bytes := func() float64 { return p.counted(p.Admin, "kvscout_scheduler_index_memory_bytes", "") }

	served := make([][]prompt, len(engines))
	stored := 0
	// store has an engine compute a prompt, and waits until the scheduler heard of it.
	store := func(i int) {
		e, q := engines[i%len(engines)], head.branch(shared, uint64(100+i), 6000)
		e.complete(q)
		served[i%len(engines)] = append(served[i%len(engines)], q)
		stored += len(q.tokens) - shared
		e.untilMember(e.id(), "be in step", stage.Settled)
		if got := bytes(); got > budget {
			t.Fatalf("%v bytes of %d after %d blocks", got, budget, stored)
		}
	}
	n := 0
	for ; shed() == 0; n++ {
		if n > 1000 {
			t.Fatalf("never came to the budget: %v bytes after %d blocks", bytes(), stored)
		}
		store(n)
	}
	full := stored
	for ; stored < full+full/10; n++ {
		store(n)
	}
	t.Logf("%d blocks fill it, %d are held; %v blocks shed, %v of %d bytes", full, stored, shed(), bytes(), budget)

	for i, e := range engines {
		e.untilMember(e.id(), "admit it", func(m *api.MemberState) bool {
			return m.GetCacheState().GetTrust() == api.Trust_TRUST_APPROXIMATE && m.GetCacheState().GetExplanation() == "the index is full"
		})
		kept, held := 0, 0
		for _, q := range served[i] {
			got, state := e.promised(q)
			there := e.held(q)
			if got < shared || got > there {
				t.Errorf("engine %d: promised %d, held %d, shared by all %d; %v", i, got, there, shared, state)
			}
			kept, held = kept+got, held+there
		}
		t.Logf("engine %d: %d of %d cached tokens are known", i, kept, held)
		if kept < held/2 {
			t.Errorf("engine %d: %d of %d cached tokens are left", i, kept, held)
		}
	}

	// What an engine holds from now on is followed as ever, beside the other's.
	for i, e := range engines {
		e.act("/reset_prefix_cache", nil)
		e.complete(head)
		e.truth(patience, append(served[i], head)...)
	}
}
