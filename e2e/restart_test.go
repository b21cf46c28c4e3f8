package e2e

import (
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/fakevllm"
	"github.com/kvscout/kvscout/e2e/stage"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// The cases in which a late or restarted party commonly leaves an index with
// blocks that no engine holds, or without blocks that one does.

// several are n prompts of three blocks and a bit.
func several(seed uint64, n int) []prompt {
	var list []prompt
	for i := range n {
		list = append(list, random(seed<<32+uint64(i), 3*size+5))
	}
	return list
}

func TestCaseAYoungPodLateAgent(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	before := several(1, 20)
	e.complete(before...)
	e.watched("pod")
	t.Log("true after", e.truth(soon, before...))
	after := several(2, 3)
	e.complete(after...)
	e.truth(soon, append(before, after...)...)
}

func TestCaseBOldPodLateAgent(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{BufferSteps: 8})
	before := several(1, 40)
	e.complete(before...)
	e.watched("pod")
	t.Log("bounded after", e.lower(soon, before...))
	// What the ring still has is known, live events flow at once.
	if got, _ := e.promised(before[39]); got != e.held(before[39]) {
		t.Errorf("the newest prompt: promised %d of %d", got, e.held(before[39]))
	}
	after := several(2, 3)
	e.complete(after...)
	e.until("the new prompts are known", func() bool {
		for _, q := range after {
			if got, _ := e.promised(q); got != e.held(q) {
				return false
			}
		}
		return true
	})
	e.lower(soon, before...)
	// A reset ends the doubt.
	e.act("/reset_prefix_cache", nil)
	e.complete(after...)
	t.Log("true after", e.truth(soon, append(before, after...)...))
}

func TestCaseBOldPodLateScheduler(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{BufferSteps: 8}).watched("pod")
	list := several(1, 40)
	e.complete(list...)
	e.truth(soon, list...)
	if err := p.RestartScheduler(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	e.untilMember(e.id(), "be exact", stage.Exact)
	e.truth(soon, list...)
	t.Log("true after", time.Since(start))
	more := several(2, 3)
	e.complete(more...)
	e.truth(soon, append(list, more...)...)
}

func TestCaseCOldPodLateAgentWithoutReplay(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{NoReplay: true})
	before := several(1, 20)
	e.complete(before...)
	e.watched("pod")
	e.lower(soon, before...)
	after := several(2, 3)
	e.complete(after...)
	e.until("the new prompts are known", func() bool {
		for _, q := range after {
			if got, _ := e.promised(q); got != e.held(q) {
				return false
			}
		}
		return true
	})
	e.lower(soon, before...)
}

func TestCaseDRestartInPlaceWithoutReplay(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{NoReplay: true}).watched("pod")
	list := several(1, 20)
	e.complete(list...)
	e.wait(soon, "follow", list, func(got, want int, _ *api.CacheState) bool { return got == want })
	life := p.member(e.id()).GetCacheState().GetEpoch()
	e.restart()
	took := e.wait(soon, "be empty", list, func(got, want int, _ *api.CacheState) bool { return got == 0 && want == 0 })
	t.Log("no phantom after", took)
	e.untilMember(e.id(), "begin a new epoch", func(m *api.MemberState) bool { return m.GetCacheState().GetEpoch() > life })
	e.untilMember(e.id(), "settle", stage.Settled)
	more := several(2, 3)
	e.complete(more...)
	e.wait(soon, "follow the new life", append(list, more...), func(got, want int, _ *api.CacheState) bool { return got == want })
}

func TestCaseERestartBelowTheOldSequence(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	list := several(1, 20)
	e.complete(list...)
	e.truth(soon, list...)
	e.restart()
	few := several(2, 2)
	e.complete(few...)
	t.Log("true after", e.truth(soon, append(list, few...)...))
	// The same prompts have the same hashes in the new life.
	e.complete(list[:5]...)
	e.truth(soon, append(list, few...)...)
}

func TestCaseFRestartPassesTheOldSequence(t *testing.T) {
	for name, cfg := range map[string]fakevllm.Config{
		"replay":     {},
		"short ring": {BufferSteps: 8},
		"no replay":  {NoReplay: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := open(t, stage.Options{})
			e := p.engine(cfg)
			events, replay := e.behind(t, "pod")
			old := several(1, 20)
			e.complete(old...)
			follows := func(got, want int, _ *api.CacheState) bool { return got == want }
			e.wait(soon, "follow", old, follows)
			events.Refuse(true)
			if replay != nil {
				replay.Refuse(true)
			}
			e.restart()
			young := several(2, 30) // more batches than the old life had
			e.complete(young...)
			events.Refuse(false)
			if replay != nil {
				replay.Refuse(false)
			}
			took := e.wait(soon, "be free of phantoms", append(old, young...), func(got, want int, p *api.CacheState) bool {
				return got <= want && stage.Settled(&api.MemberState{CacheState: p})
			})
			t.Log("no phantom after", took)
			if name == "replay" {
				e.truth(soon, append(old, young...)...)
			}
			newest := several(3, 3)
			e.complete(newest...)
			e.wait(soon, "follow the new life", append(newest, old...), follows)
		})
	}
}

func TestBrokenNetworkIsNoRestart(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{})
	events, _ := e.behind(t, "pod")
	list := several(1, 10)
	e.complete(list...)
	e.truth(soon, list...)
	life := p.member(e.id()).GetCacheState().GetEpoch()
	events.Refuse(true)
	e.untilMember(e.id(), "be in doubt", func(m *api.MemberState) bool { return !stage.Exact(m) })
	more := several(2, 10)
	e.complete(more...)
	events.Refuse(false)
	t.Log("true after", e.truth(soon, append(list, more...)...))
	if now := p.member(e.id()).GetCacheState().GetEpoch(); now != life {
		t.Errorf("the life is another one: %d, was %d", now, life)
	}
}

func TestRestartOfTheAgent(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watched("pod")
	list := several(1, 10)
	e.complete(list...)
	e.truth(soon, list...)
	e.agent.Stop()
	e.untilMember(e.id(), "leave", func(m *api.MemberState) bool { return m == nil })
	more := several(2, 5)
	e.complete(more...)
	e.watched("pod")
	e.truth(soon, append(list, more...)...)
}

func TestDeadEngineIsNotChosen(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	dead := p.engine(fakevllm.Config{}).watched("dead")
	live := p.engine(fakevllm.Config{}).watched("live")
	dead.stop() // its agent lives on
	p.until("only the living one is chosen", func() bool {
		for i := range 20 {
			if p.score(random(uint64(i), 500).request()).GetCandidates()[0].GetMember().GetId() != live.id() {
				return false
			}
		}
		return true
	})
	dead.start()
	p.until("both are chosen again", func() bool {
		first := make(map[string]bool)
		for i := range 20 {
			first[p.score(random(uint64(i), 500).request()).GetCandidates()[0].GetMember().GetId()] = true
		}
		return len(first) == 2
	})
}

// TestEngineKilledAgainAtOnceIsChosen is an engine that is killed a second time
// before it served anything, while callers report what failed: the third one bears
// none of it.
func TestEngineKilledAgainAtOnceIsChosen(t *testing.T) {
	t.Parallel()
	p := open(t, stage.Options{})
	e := p.engine(fakevllm.Config{}).watchedBy(stage.AgentOptions{Pod: "pod", Probe: time.Second})
	e.complete(several(1, 3)...)
	var failed time.Time
	for range 2 {
		e.stop()
		p.untilMember(e.id(), "be suspected", func(m *api.MemberState) bool { return !stage.Exact(m) })
		for range 4 {
			d := p.pick(random(1, 100).request())
			if _, err := p.Client.Report(t.Context(), &api.ReportRequest{Reports: []*api.Report{{DecisionId: d.GetDecisionId(), Outcome: api.Outcome_OUTCOME_FAILED}}}); err != nil {
				t.Fatal(err)
			}
		}
		failed = time.Now()
		e.start()
		p.untilMember(e.id(), "be exact", stage.Exact)
	}
	watch := newStopwatch()
	began := time.Now()
	p.untilMember(e.id(), "be chosen", func(m *api.MemberState) bool { return m.GetIneligible() == 0 })
	const pause = 5 * time.Second // for three failures
	t.Logf("chosen %v after it was exact", time.Since(began).Round(time.Millisecond))
	if time.Since(failed) >= pause && watch.ours() > soon {
		t.Error("left out for what the engines before it failed")
	}
}
