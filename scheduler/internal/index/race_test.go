//go:build race

package index

const raceEnabled = true // sync.Pool drops at random
