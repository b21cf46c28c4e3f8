package chronicle

import (
	"fmt"
	"strings"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Reason why a member is not believed, or not picked, like the others.
func Reason(m *api.MemberState) string {
	var list []string
	switch m.GetIneligible() {
	case api.Ineligible_INELIGIBLE_UNSPECIFIED:
	case api.Ineligible_INELIGIBLE_SLEEPING:
		list = append(list, "the engine sleeps")
	case api.Ineligible_INELIGIBLE_SILENT:
		list = append(list, "its agent is silent")
	case api.Ineligible_INELIGIBLE_UNREACHABLE:
		list = append(list, "its agent does not reach the engine")
	case api.Ineligible_INELIGIBLE_FAILING:
		list = append(list, "left out for "+Age(m.GetFailingForMs())+": callers reported failures")
	case api.Ineligible_INELIGIBLE_CORDONED:
		list = append(list, "its node is cordoned")
	case api.Ineligible_INELIGIBLE_NOT_READY:
		list = append(list, "its pod is not ready")
	case api.Ineligible_INELIGIBLE_EVICTED:
		list = append(list, "its pod is being evicted")
	case api.Ineligible_INELIGIBLE_DELETING:
		list = append(list, "its pod is being deleted")
	case api.Ineligible_INELIGIBLE_ENDED:
		list = append(list, "its pod has ended")
	default:
		list = append(list, strings.ToLower(strings.TrimPrefix(m.GetIneligible().String(), "INELIGIBLE_")))
	}
	for _, text := range []string{m.GetCacheState().GetExplanation(), m.GetWarning()} {
		if text != "" {
			list = append(list, text)
		}
	}
	return strings.Join(list, "; ")
}

// Trust in a word.
func Trust(t api.Trust) string { return strings.TrimPrefix(t.String(), "TRUST_") }

// Age is a time in ms as people read it.
func Age(ms float64) string {
	switch s := ms / 1000; {
	case s < 10:
		return fmt.Sprintf("%.1fs", s)
	case s < 120:
		return fmt.Sprintf("%.0fs", s)
	case s < 7200:
		return fmt.Sprintf("%.0fm", s/60)
	default:
		return fmt.Sprintf("%.0fh", s/3600)
	}
}
