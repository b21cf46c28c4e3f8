//go:build !race

package pick

const raced = 1
