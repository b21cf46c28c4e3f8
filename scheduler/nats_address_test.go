package scheduler

import (
	"strings"
	"testing"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/journal"
)

// What was asked for is what is said, with the port that it became.
func TestNATSAddressIsLoggedAsItIs(t *testing.T) {
	for _, host := range []string{"0.0.0.0", "127.0.0.1", "localhost"} {
		var log journal.Journal
		s, stop := start(t, Config{NATSAddress: host + ":0", Insecure: true, Log: log.Logger()})
		at := s.Addrs().NATS
		if !strings.HasPrefix(at, host+":") || strings.HasSuffix(at, ":0") {
			t.Errorf("%s is said to be %s", host, at)
		}
		await.True(t, "the log says nats="+at, func() bool { return strings.Contains(log.String(), "nats="+at) })
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
}
