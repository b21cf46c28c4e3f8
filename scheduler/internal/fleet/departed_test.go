package fleet

import (
	"fmt"
	"testing"
	"time"
)

func TestWhatTheLastMemberServedIsRememberedForAMoment(t *testing.T) {
	f := New(Config{})
	now := time.Now()
	id, err := f.Join("ns_p_0", now)
	if err != nil {
		t.Fatal(err)
	}
	f.Receive(id, Info{Name: "ns_p_0", Models: []string{"m"}, Adapters: []Adapter{{Name: "lora"}}}, nil, now)
	if f.Departed("m", now) {
		t.Error("the member is there")
	}
	f.Leave(id)
	for name, want := range map[string]bool{"m": true, "lora": true, "x": false} {
		if f.Departed(name, now.Add(moment)) != want || f.Departed(name, now.Add(moment+1)) {
			t.Errorf("%s: want %v for a moment, and no longer", name, want)
		}
	}
}

func TestDepartedNamesAreBounded(t *testing.T) {
	d, now := departed{}, time.Now()
	for i := range 3 * maxDeparted {
		d.put(fmt.Sprint(i), now)
	}
	if len(d) != maxDeparted {
		t.Errorf("%d names", len(d))
	}
	d.put("new", now.Add(2*moment))
	if len(d) != 1 {
		t.Errorf("%d names, want that the old ones went", len(d))
	}
}
