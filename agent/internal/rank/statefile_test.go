package rank

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/agent/internal/mirror"
	"github.com/kvscout/kvscout/agent/internal/vllm"
	"github.com/kvscout/kvscout/protocol/pb"
)

var (
	stateIdentity = Identity{Model: "m", Reported: 2, Blocks: 1000}
	stateCounts   = Emptied{Known: true, Resets: 1}
)

// kept is a rank with a cache state in a file.
func kept(t *testing.T) (*Rank, *saver) {
	t.Helper()
	r := testRank(t, stateIdentity)
	r.Describe(&pb.MemberInfo{EngineVersion: "0.32.0", Adapters: []*pb.Adapter{{Name: "sql", Root: "/a"}, {Name: "law", Root: "/l"}}}, "")
	r.State(vllm.Exact, "")
	r.Apply(vllm.Mark{Sequence: 6, Digest: 66, Whole: true}, chain(3))
	for k, name := range []string{"sql", "law"} {
		b := chain(2)
		first := uint64(100 * (k + 1))
		b.Events[0].Store.Hashes, b.Events[0].Store.Adapter = []uint64{first, first + 1}, name
		r.Apply(vllm.Mark{Sequence: 7, Digest: 77, Whole: true}, b)
	}
	r.counted(stateCounts, r.Position())
	r.Drain(nil)
	k := newSaver(t.TempDir(), r)
	k.save()
	if n := k.stats.written.Load(); n != 1 {
		t.Fatalf("%d files written", n)
	}
	return r, k
}

// after is a rank of the next process, with the file of the one before.
func after(t *testing.T, file string, adapters ...*pb.Adapter) (*Rank, *saver) {
	t.Helper()
	r := testRank(t, stateIdentity)
	r.Describe(&pb.MemberInfo{EngineVersion: "0.32.0", Adapters: adapters}, "")
	k := newSaver(filepath.Dir(file), r)
	return r, k
}

func TestSavedCacheStateCountsOnceItIsVerified(t *testing.T) {
	r, k := kept(t)
	_, want := r.Drain(nil)
	other, loader := after(t, k.path, &pb.Adapter{Name: "sql", Root: "/a"}, &pb.Adapter{Name: "law", Root: "/l"})
	mark := loader.load(stateCounts)
	if mark == nil || *mark != (vllm.Mark{Sequence: 7, Digest: 77, Whole: true}) {
		t.Fatalf("mark %+v", mark)
	}
	if ops, st := other.Drain(nil); len(ops) != 0 || st.Lanes != (publishLanes{}) || st.Trust != pb.Trust_TRUST_SYNCING {
		t.Errorf("before the proof: %v, %+v", ops, st)
	}
	if loader.save(); loader.stats.written.Load() != 0 {
		t.Error("a cache state that is not verified was saved")
	}
	other.Resume()
	other.State(vllm.Exact, "")
	ops, st := other.Drain(nil)
	if st.Lanes != want.Lanes || st.Epoch <= want.Epoch || st.Trust != pb.Trust_TRUST_EXACT || st.EngineBatches != 8 || len(ops) == 0 {
		t.Errorf("%v, %+v, want %+v", ops, st, want)
	}
	if loader.save(); loader.stats.written.Load() != 1 {
		t.Error("the cache state is not saved again")
	}
	// Not the engine's: nothing of it is ever seen.
	other, loader = after(t, k.path)
	loader.load(stateCounts)
	other.NewIncarnation("another engine")
	other.Resume()
	if ops, st := other.Drain(nil); len(ops) != 0 || st.Lanes != (publishLanes{}) || loader.stats.disproved.Load() != 1 {
		t.Errorf("%v, %+v", ops, st)
	}
}

func TestAdaptersThatChangedMeanwhileArePurged(t *testing.T) {
	_, k := kept(t)
	for name, c := range map[string]struct {
		adapters []*pb.Adapter
		held     uint64
	}{
		"as before": {[]*pb.Adapter{{Name: "sql", Root: "/a"}, {Name: "law", Root: "/l"}}, 7},
		"reloaded":  {[]*pb.Adapter{{Name: "sql", Root: "/b"}, {Name: "law", Root: "/l"}}, 5},
		"gone":      {nil, 3},
	} {
		other, loader := after(t, k.path, c.adapters...)
		loader.load(stateCounts)
		other.Resume()
		if _, st := other.Drain(nil); st.Lanes[mirror.LaneGPU].Count != c.held {
			t.Errorf("%s: %d blocks, want %d", name, st.Lanes[0].Count, c.held)
		}
	}
}

func TestSuspicionsAreSaved(t *testing.T) {
	r, k := kept(t)
	r.mu.Lock()
	r.clearLocked("perhaps reset")
	r.mu.Unlock()
	r.Apply(vllm.Mark{Sequence: 8, Whole: true}, chain(1))
	k.save()
	other, loader := after(t, k.path)
	loader.load(stateCounts)
	other.Resume()
	other.State(vllm.Exact, "")
	if _, st := other.Drain(nil); st.Trust != pb.Trust_TRUST_APPROXIMATE || st.Reason != "perhaps reset" {
		t.Errorf("%+v", st)
	}
}

func TestForeignStateFilesAreRefused(t *testing.T) {
	_, k := kept(t)
	for _, c := range []struct {
		name  string
		setup func(*Rank)
		now   Emptied
		want  string
	}{
		{"another pod", func(r *Rank) { r.member = "default_y_0" }, stateCounts, "another member"},
		{"another model", func(r *Rank) { r.id.Model = "n" }, stateCounts, "another member or engine"},
		{"another block size", func(r *Rank) { r.id.Reported = 4 }, stateCounts, "another member or engine"},
		{"another configured block size", func(r *Rank) { r.id.BlockSize = 2 }, stateCounts, "another member or engine"},
		{"another capacity", func(r *Rank) { r.id.Blocks = 999 }, stateCounts, "another member or engine"},
		{"another engine version", func(r *Rank) { r.info.EngineVersion = "0.33.0" }, stateCounts, "0.33.0"},
		{"reset meanwhile", func(*Rank) {}, Emptied{Known: true, Resets: 2}, "emptied"},
		{"slept meanwhile", func(*Rank) {}, Emptied{Known: true, Resets: 1, Sleeps: 1}, "emptied"},
		{"counters unknown", func(*Rank) {}, Emptied{}, "emptied"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			r, loader := after(t, k.path)
			c.setup(r)
			loader.log = slog.New(slog.NewTextHandler(&log, nil))
			if mark := loader.load(c.now); mark != nil || loader.stats.refused.Load() != 1 || !strings.Contains(log.String(), c.want) {
				t.Errorf("mark %v, log %s", mark, log.String())
			}
		})
	}
}

func TestTornStateFilesAreRefused(t *testing.T) {
	_, k := kept(t)
	whole, err := os.ReadFile(k.path)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := parseState(whole); err != nil {
		t.Fatal(err)
	}
	for n := range len(whole) {
		if _, _, err := parseState(whole[:n]); err == nil {
			t.Fatalf("%d of %d bytes were taken", n, len(whole))
		}
		flipped := slices.Clone(whole)
		flipped[n] ^= 1
		if _, _, err := parseState(flipped); err == nil {
			t.Fatalf("byte %d was changed and the file taken", n)
		}
	}
	// A sum that is right does not make a file right.
	for name, change := range map[string]func(*stateHead, []byte) []byte{
		"mirror cut":      func(_ *stateHead, state []byte) []byte { return state[:len(state)-1] },
		"another order":   func(_ *stateHead, state []byte) []byte { slices.Reverse(state); return state },
		"far future":      func(h *stateHead, state []byte) []byte { h.Epoch = ^uint64(0); return state },
		"beyond the last": func(h *stateHead, state []byte) []byte { h.Mark.Sequence = ^uint64(0); return state },
		"tomorrow's number": func(h *stateHead, state []byte) []byte {
			h.Epoch = uint64(time.Now().Add(48 * time.Hour).UnixNano())
			return state
		},
	} {
		head, state, err := parseState(slices.Clone(whole))
		if err != nil {
			t.Fatal(err)
		}
		state = change(head, state)
		file, err := beginState(nil, head)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(k.path, endState(append(file, state...)), 0o600); err != nil {
			t.Fatal(err)
		}
		r, loader := after(t, k.path)
		epoch := r.epoch
		if loader.load(stateCounts) != nil || loader.stats.refused.Load() != 1 || r.epoch != epoch || r.waiting != nil {
			t.Errorf("%s was taken", name)
		}
	}
	newer := slices.Clone(whole)
	newer[len(stateMagic)]++
	if _, _, err := parseState(newer); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("form %d", stateForm+1)) {
		t.Errorf("a later form: %v", err)
	}
}

func TestNothingIsSavedWhileAResetIsOpen(t *testing.T) {
	r, k := kept(t)
	r.Purge("sql")
	r.mu.Lock()
	r.incarnation.reset.pending = true
	r.mu.Unlock()
	k.save()
	if n := k.stats.written.Load(); n != 1 {
		t.Errorf("%d files", n)
	}
	r.mu.Lock()
	r.incarnation.reset.pending = false
	r.mu.Unlock()
	k.save()
	k.save() // without changes
	if n := k.stats.written.Load(); n != 2 {
		t.Errorf("%d files", n)
	}
}

func TestAgentGoesOnWithoutADisk(t *testing.T) {
	r, k := kept(t)
	var log bytes.Buffer
	k.log = slog.New(slog.NewTextHandler(&log, nil))
	k.path = filepath.Join(filepath.Dir(k.path), "not", "there")
	for range 3 {
		r.Purge("sql")
		k.save()
	}
	if n := k.stats.failed.Load(); n != 3 || strings.Count(log.String(), "cannot be saved") != 1 {
		t.Errorf("%d failures, log %s", n, log.String())
	}
	// A disk that is full leaves the old file, and nothing beside it.
	k.path = filepath.Join(t.TempDir(), "x.state")
	if err := writeState(k.path, []byte("old")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/dev/full"); err == nil {
		if err := os.Symlink("/dev/full", k.path+".tmp"); err != nil {
			t.Fatal(err)
		}
		k.save()
		text, err := os.ReadFile(k.path)
		if err != nil || string(text) != "old" || k.stats.failed.Load() != 4 {
			t.Errorf("%q, %v", text, err)
		}
		if _, err := os.Lstat(k.path + ".tmp"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("leftover: %v", err)
		}
	}
	if k.save(); !strings.Contains(log.String(), "can be saved again") {
		t.Errorf("log %s", log.String())
	}
}

// TestSlowDiskHoldsNobodyUp: while a write hangs, events are applied and
// published, and the next file holds them all.
func TestSlowDiskHoldsNobodyUp(t *testing.T) {
	r, k := kept(t)
	r.Purge("sql")
	entered, release := make(chan struct{}), make(chan struct{})
	k.every = time.Millisecond
	k.write = func(path string, file []byte) error {
		select {
		case entered <- struct{}{}:
			<-release
		case <-release:
		}
		return writeState(path, file)
	}
	rest, done := make(chan struct{}), make(chan struct{})
	go func() { defer close(done); k.run(rest) }()
	<-entered
	for n := range uint64(100) {
		b := chain(1)
		b.Events[0].Store.Hashes[0], b.Events[0].Store.Tokens[0] = 1000+n, 1000+uint32(n)
		r.Apply(vllm.Mark{Sequence: 8 + n, Digest: n, Whole: true}, b)
		if _, st := r.Drain(nil); st.Lanes[0].Count != 6+n {
			t.Fatalf("%d blocks", st.Lanes[0].Count)
		}
	}
	close(release)
	close(rest)
	<-done
	other, loader := after(t, k.path)
	if mark := loader.load(stateCounts); mark == nil || mark.Sequence != 107 {
		t.Errorf("mark %+v", mark)
	}
	other.Resume()
	if _, st := other.Drain(nil); st.Lanes[0].Count != 103 { // without the adapters
		t.Errorf("%d blocks", st.Lanes[0].Count)
	}
}

func FuzzParseState(f *testing.F) {
	head := stateHead{Member: "default_x_0", Model: "m", Mark: vllm.Mark{Sequence: 1}}
	file, err := beginState(nil, &head)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(endState(append(file, mirror.New(mirror.Config{}).Append(nil)...)))
	f.Add([]byte(stateMagic))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, file := range [][]byte{body, endState(slices.Clone(body))} {
			head, state, err := parseState(file)
			if err != nil {
				continue
			}
			_ = head.check("default_x_0", "", Identity{Model: "m"}, Emptied{}, time.Now())
			_ = mirror.New(mirror.Config{Model: "m", MaxNodes: 64}).Restore(state)
		}
	})
}

func BenchmarkCapture(b *testing.B) {
	r := newRank(Config{Member: "default_x_0", Identity: Identity{Model: "m"}, Log: quiet})
	for n := range uint32(200) {
		s := mirror.Store{BlockSize: 16, Kind: mirror.Full, Physical: true}
		for k := range uint32(500) {
			s.Hashes = append(s.Hashes, uint64(n*500+k+1)*0x9E3779B97F4A7C15)
			for range 16 {
				s.Tokens = append(s.Tokens, n*500+k)
			}
		}
		r.Apply(vllm.Mark{Sequence: uint64(n)}, vllm.Batch{Events: []vllm.Event{{Kind: vllm.Stored, Store: s}}})
	}
	r.counted(stateCounts, r.Position())
	r.Drain(nil)
	var buffer []byte
	path := filepath.Join(b.TempDir(), "x.state")
	b.Run("locked", func(b *testing.B) {
		for b.Loop() {
			buffer, _, _ = r.capture(buffer[:0], 0)
		}
		b.ReportMetric(float64(len(buffer)), "bytes")
	})
	b.Run("written", func(b *testing.B) {
		for b.Loop() {
			file, _, err := r.capture(buffer[:0], 0)
			if err == nil {
				err = writeState(path, endState(file))
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
}
