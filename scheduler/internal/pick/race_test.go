//go:build race

package pick

const raced = 10 // how much longer things take with the race detector
