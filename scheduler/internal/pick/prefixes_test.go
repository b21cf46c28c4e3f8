package pick

import (
	"testing"

	"github.com/kvscout/kvscout/scheduler/internal/books"
	"github.com/kvscout/kvscout/scheduler/internal/fleet"
	"github.com/kvscout/kvscout/scheduler/internal/index"
)

// Holders are those that hold the whole and are believed, each with the tiers
// that it lies in.
func TestPrefixesHaveTheirHolders(t *testing.T) {
	b := newBed(t)
	b.books = books.New()
	shared := prompt(1, 1024, 2000) // 64 blocks that all begin with
	gpu, disk, part, syncing := b.join("gpu"), b.join("disk"), b.join("part"), b.join("syncing")
	b.join("none")
	b.gpu(gpu, shared, 100)
	b.gpu(disk, shared, 16)
	b.hold(disk, index.LaneHost, shared, 32)
	b.hold(disk, index.LaneDisk, shared, 64)
	b.gpu(part, shared, 63)
	b.gpu(syncing, shared, 64)
	b.trust(syncing, fleet.Syncing)
	for i := range 4 {
		b.pick(Request{Prompt: tokens(prompt(uint32(2+i), 1024, 2000)), Reserve: true})
	}
	list := b.Prefixes("model", 10, t0)
	if len(list) != 1 || list[0].Tokens() != 1024 || list[0].Hits != 3 || len(list[0].Holders) != 2 {
		t.Fatalf("%+v", list)
	}
	for i, want := range []struct {
		name   string
		cached Cached
	}{{"disk", Cached{GPU: 256, Host: 256, Disk: 512}}, {"gpu", Cached{GPU: 1024}}} {
		if h := list[0].Holders[i]; h.Member.Info.Name != want.name || h.Cached != want.cached {
			t.Errorf("%s has %+v, want %+v", h.Member.Info.Name, h.Cached, want)
		}
	}
}
