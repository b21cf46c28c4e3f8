package scheduler

import (
	"errors"
	"flag"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/await"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

func TestReloadIsAllOrNothing(t *testing.T) {
	s, stop := start(t, Config{Policy: "random"})
	agent(t, "nats://"+s.Addrs().NATS, 3)
	client := api.NewSchedulerClient(dial(t, s))
	policy := func() string {
		t.Helper()
		r, err := client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Model: "m"}})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetRanking().GetPolicy()
	}
	await.True(t, "the member is there", func() bool {
		_, err := client.Score(t.Context(), &api.ScoreRequest{Request: &api.Request{Model: "m"}})
		return err == nil
	})
	next := s.cfg
	next.Policy, next.CallTimeout = "round-robin", 3*time.Second
	if err := s.Reload(next); err != nil {
		t.Fatal(err)
	}
	if p := policy(); p != "round-robin" {
		t.Errorf("policy %s after the reload", p)
	}
	for key, spoil := range map[string]func(*Config){
		"pool":            func(c *Config) { c.Pool = "other" },
		"index-memory":    func(c *Config) { c.IndexBytes *= 2 },
		"grpc-tls-cert":   func(c *Config) { c.GRPCTLS.Cert, c.GRPCTLS.Key = "x", "y" },
		"-shadow-policy":  func(c *Config) { c.ShadowPolicy = "nonsense" },
		"-session-fields": func(c *Config) { c.SessionFields = "a..b" },
		"-queue-wait":     func(c *Config) { c.QueueWait = -1 },
		"-call-timeout":   func(c *Config) { c.CallTimeout = -1 },
	} {
		bad := next
		bad.Policy = "least-tokens"
		spoil(&bad)
		err := s.Reload(bad)
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", key, err)
		}
		if p := policy(); p != "round-robin" {
			t.Fatalf("%s: the refused policy %s is in force", key, p)
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// What is said of a setting is true: all that is live is taken, all else is
// refused as a whole.
func TestLiveSettingsAreThoseSaidToBe(t *testing.T) {
	s, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.flush()
	defer s.intake.Close()
	base := s.cfg
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	base.Flags(fs)
	count := 0
	fs.VisitAll(func(f *flag.Flag) {
		if said := strings.HasSuffix(f.Usage, "; live"); said != Live(f.Name) {
			t.Errorf("-%s: help says live %v, Reload %v", f.Name, said, Live(f.Name))
		}
		next := s.cfg
		other := flag.NewFlagSet("", flag.ContinueOnError)
		next.Flags(other)
		for _, value := range []string{"17", "17s", "true", "random", "127.0.0.1:1"} {
			if other.Set(f.Name, value) == nil && next.Validate() == nil {
				break
			}
		}
		if next.Validate() != nil || next.raw()[f.Name] == base.raw()[f.Name] {
			return // not to be changed alone
		}
		count++
		if err := s.Reload(next); (err == nil) != Live(f.Name) || err != nil && (!errors.Is(err, ErrNotLive) || !strings.Contains(err.Error(), f.Name)) {
			t.Errorf("-%s: %v", f.Name, err)
		}
		if err := s.Reload(s.cfg); err != nil {
			t.Fatal(err)
		}
	})
	if count < 15 {
		t.Errorf("only %d settings were changed", count)
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]string{"1024": "1KiB", "1536KiB": "1536KiB", "2GiB": "2GiB", "0": "0", "77": "77"} {
		var s size
		if err := s.Set(text); err != nil || s.String() != want {
			t.Errorf("%s: %v, %s", text, err, s.String())
		}
	}
}
