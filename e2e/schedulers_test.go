package e2e

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// twins are two schedulers of one pool, with the engines beside the first.
func twins(t *testing.T, engines int) (both [2]*play, list []*engine) {
	t.Helper()
	s := broker.New(t, nil)
	for i := range both {
		both[i] = open(t, stage.Options{NATS: s.URL()})
	}
	for i := range engines {
		list = append(list, both[0].engine(small).watched(fmt.Sprint("pod", i)))
	}
	for _, e := range list {
		both[1].untilMember(e.id(), "be known to the other", stage.Exact)
	}
	return both, list
}

// ranked is an answer without what is each scheduler's own: ages, and the order,
// which goes by speeds that each learned from the samples as it heard them.
func ranked(r *api.Ranking) (list []string) {
	for _, c := range r.GetCandidates() {
		list = append(list, fmt.Sprintf("%s %v %d %v", c.GetMember().GetId(), c.GetCachedTokens(), c.GetUncachedTokens(), c.GetCacheState().GetTrust()))
	}
	slices.Sort(list)
	return list
}

func TestTwoSchedulersGiveTheSameAnswer(t *testing.T) {
	t.Parallel()
	both, engines := twins(t, 3)
	var list []prompt
	for i, e := range engines {
		mine := several(uint64(i+1), 10)
		e.complete(mine...)
		list = append(list, mine...)
	}
	list = append(list, several(9, 5)...) // which nobody holds
	for _, p := range both {
		for _, e := range engines {
			other := *e
			other.play = p
			other.truth(soon, list...)
		}
	}
	// Loads are heard at the same time, give or take a message.
	both[0].until("both have the same samples", func() bool {
		for _, q := range list {
			if !cmp.Equal(ranked(both[0].score(q.request())), ranked(both[1].score(q.request()))) {
				return false
			}
		}
		return true
	})
}

// A caller that asks the other scheduler when one fails loses nothing, and the
// one that starts again knows all that it must know before it calls itself ready.
func TestEitherOfTwoSchedulersMayDie(t *testing.T) {
	t.Parallel()
	both, engines := twins(t, 2)
	list := several(1, 40)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var group sync.WaitGroup
	var served, retried, lost atomic.Int64
	for caller := range 4 {
		group.Go(func() {
			for i := caller; ctx.Err() == nil; i++ {
				q := list[i%len(list)].request()
				answered := false
				for n := 0; n < 2 && !answered; n++ {
					try, stop := context.WithTimeout(context.Background(), patience)
					answer, err := both[(i+n)%2].Client.Pick(try, &api.PickRequest{Request: q})
					stop()
					if answered = err == nil && len(answer.GetRanking().GetCandidates()) > 0; !answered {
						retried.Add(1)
					}
				}
				if answered {
					served.Add(1)
				} else if ctx.Err() == nil {
					lost.Add(1)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	for round := range 4 {
		i := round % 2
		before := served.Load()
		start := time.Now()
		if err := both[i].RestartScheduler(); err != nil {
			t.Fatal(err)
		}
		for _, e := range engines {
			both[i].untilMember(e.id(), "be exact again", stage.Exact)
		}
		took := time.Since(start)
		both[i].until("requests were served meanwhile", func() bool { return served.Load() > before+100 })
		t.Logf("scheduler %d ended and was back with all exact after %v", i, took.Round(time.Millisecond))
	}
	cancel()
	group.Wait()
	t.Logf("%d requests, %d asked again, %d lost", served.Load(), retried.Load(), lost.Load())
	if lost.Load() > 0 {
		t.Errorf("%d requests were lost", lost.Load())
	}
	engines[0].complete(list...)
	for _, p := range both {
		other := *engines[0]
		other.play = p
		other.truth(soon, list...)
	}
}
