//go:build !race

package admission

// slower is how much the race detector may cost.
const slower = 1
