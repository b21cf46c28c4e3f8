package edge

import (
	"strings"
	"testing"
)

func TestNameIsWhatTheAPITakes(t *testing.T) {
	for given, want := range map[string]string{
		"": "", "7f0c": "7f0c",
		strings.Repeat("a", 128): strings.Repeat("a", 128),
		strings.Repeat("a", 129): "",
		"\xff":                   "",
	} {
		if got := Name(map[string]string{"x-request-id": given}); got != want {
			t.Errorf("%.10q: %.10q, want %.10q", given, got, want)
		}
	}
}

func TestBudgetTakesAllOrNothing(t *testing.T) {
	var b Budget
	if !b.Take(MaxBodies-1) || b.Take(2) || b.Held() != MaxBodies-1 || !b.Take(1) {
		t.Fatalf("%d bytes are held", b.Held())
	}
	b.Give(MaxBodies)
	if b.Held() != 0 {
		t.Errorf("%d bytes are held in the end", b.Held())
	}
}
