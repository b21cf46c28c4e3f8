// Command kvscout asks schedulers and shows people what they answer. What it can
// be asked is in package cli.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/kvscout/kvscout/scheduler/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Run(ctx, os.Args[1:], os.Getenv, cli.Terminal(os.Stdin, os.Stdout, os.Stderr))
	stop()
	os.Exit(code)
}
