//go:build !linux

package main

import "time"

// pause sleeps.
func pause(d time.Duration) { time.Sleep(d) }
