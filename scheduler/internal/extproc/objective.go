package extproc

import (
	"fmt"
	"strconv"
	"strings"
)

const (
	// maxPriority of an objective, as of a request of the API.
	maxPriority   = 100
	maxObjectives = 256
)

// ParseObjectives reads a list of objectives separated by commas, with their
// priorities: chat=10,batch=-10.
func ParseObjectives(list string) (map[string]int32, error) {
	if list == "" {
		return nil, nil
	}
	objectives := make(map[string]int32)
	for one := range strings.SplitSeq(list, ",") {
		name, text, ok := strings.Cut(strings.TrimSpace(one), "=")
		priority, err := strconv.ParseInt(text, 10, 32)
		switch _, twice := objectives[name]; {
		case !ok || name == "" || err != nil || priority < -maxPriority || priority > maxPriority:
			return nil, fmt.Errorf("%.100q: want name=priority, from %d to %d", one, -maxPriority, maxPriority)
		case twice:
			return nil, fmt.Errorf("%.100q stands there twice", name)
		case len(objectives) == maxObjectives:
			return nil, fmt.Errorf("more than %d objectives", maxObjectives)
		}
		objectives[name] = int32(priority)
	}
	return objectives, nil
}
