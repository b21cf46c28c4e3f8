// Package await waits in tests for what must come.
package await

import (
	"testing"
	"time"
)

// Patience bounds every wait: a machine may have much else to do, and a test that
// needs it all has failed.
const Patience = time.Minute

// True waits until a condition holds.
func True(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}
