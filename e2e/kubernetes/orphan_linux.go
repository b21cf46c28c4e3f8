package kubernetes

import "syscall"

// orphanless ends a process with the test that started it, however that ends.
func orphanless() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
