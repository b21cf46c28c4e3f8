package main

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// The page on the simulator names every field of a result and every engine.
func TestThePageNamesEveryFieldAndEngine(t *testing.T) {
	text, err := os.ReadFile("../../../docs/SIMULATOR.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(text)
	for _, kind := range []reflect.Type{reflect.TypeFor[sim.Result](), reflect.TypeFor[sim.Stage](), reflect.TypeFor[sim.Profile]()} {
		for i := range kind.NumField() {
			name, _, _ := strings.Cut(kind.Field(i).Tag.Get("json"), ",")
			if !strings.Contains(page, "`"+name+"`") && !strings.Contains(page, "| "+name+" |") {
				t.Errorf("%s is not on the page", name)
			}
		}
	}
	for _, name := range sim.Engines() {
		e, err := sim.Engine(name)
		if err != nil || !strings.Contains(page, "| `"+name+"` | ") || e.Validate() != nil {
			t.Errorf("engine %s is not on the page, or wrong: %v", name, err)
		}
	}
}
