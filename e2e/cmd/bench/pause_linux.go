package main

import (
	"syscall"
	"time"
)

// pause sleeps to a tenth of a millisecond. time.Sleep wakes up to a millisecond
// late where nothing else is to be done.
func pause(d time.Duration) {
	if d > 0 {
		t := syscall.NsecToTimespec(int64(d))
		_ = syscall.Nanosleep(&t, nil)
	}
}
