//go:build !linux

package kubernetes

import "syscall"

func orphanless() *syscall.SysProcAttr { return nil }
