package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/kvscout/kvscout/e2e/broker"
	"github.com/kvscout/kvscout/e2e/members"
	"github.com/kvscout/kvscout/protocol"
)

const (
	model     = "fake"
	blockSize = 16
	// chain is the number of blocks of one prompt.
	chain = 512
	// connections that the members share.
	connections = 16
)

// serve runs a NATS server and all members until in is closed, and writes the
// server's URL to out when they are there.
func serve(ctx context.Context, o options, in io.Reader, out io.Writer) error {
	s, err := broker.Open()
	if err != nil {
		return err
	}
	defer s.Close()
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	var conns []*nats.Conn
	for range connections {
		conn, err := nats.Connect(s.URL(), nats.ReconnectBufSize(-1))
		if err != nil {
			return err
		}
		defer conn.Close()
		conns = append(conns, conn)
	}
	for i := range o.members {
		m, err := members.New(fmt.Sprintf("pod%d", i), model, blockSize, o.beat, chains(o, i))
		if err != nil {
			return err
		}
		group.Go(func() error { return m.Run(ctx, conns[i%connections], subjects) })
	}
	fmt.Fprintln(out, s.URL())
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	return group.Wait()
}

// chains are what a member holds: the first of them are everybody's.
func chains(o options, i int) (all [][]uint64) {
	for left := o.blocks; left > 0; left -= chain {
		c := len(all)
		owner := uint64(i + 1)
		if float64(c*chain) < o.shared*float64(o.blocks) {
			owner = 0
		}
		r := rand.New(rand.NewPCG(owner, uint64(c)))
		keys := make([]uint64, min(left, chain))
		for k := range keys {
			keys[k] = r.Uint64() | 1
		}
		all = append(all, keys)
	}
	return all
}
