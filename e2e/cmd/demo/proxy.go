package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/kvscout/kvscout/e2e/proxies"
	"github.com/kvscout/kvscout/e2e/stage"
)

// gateway is the scheduler's own proxy, which needs nothing installed.
const gateway = "gateway"

// proxyNames are those that can stand before kvscout's fleet.
func proxyNames() []string {
	list := []string{gateway}
	for _, p := range proxies.All() {
		list = append(list, strings.ToLower(p.Name))
	}
	return list
}

// places are where the scheduler serves proxies, on an address of which a proxy has
// the other ports.
type places struct{ host, gateway, picker string }

func placesOn(host string) places {
	return places{host: host, gateway: net.JoinHostPort(host, "29001"), picker: net.JoinHostPort(host, "29002")}
}

// through starts the proxy before the fleet and waits until it serves.
func (f *fleet) through(ctx context.Context, s *stage.Stage, name string, at places) error {
	f.proxy = at.gateway
	if name != gateway {
		if err := f.install(s, proxies.ByName(name), at); err != nil {
			return err
		}
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		answer, err := client.Get("http://" + f.proxy + "/v1/models")
		if err == nil {
			answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return nil
			}
			err = errors.New(answer.Status)
		}
		if ctx.Err() != nil || s.Err() != nil || time.Now().After(end) {
			return errors.Join(fmt.Errorf("the proxy %s does not serve: %w", name, err), ctx.Err(), s.Err())
		}
	}
}

// install runs the real program with its configuration in deploy/proxies.
func (f *fleet) install(s *stage.Stage, p *proxies.Proxy, at places) error {
	folder, err := os.MkdirTemp("", "kvscout-demo")
	if err != nil {
		return err
	}
	site := proxies.Site{Root: ".", Host: at.host, GRPC: s.GRPC, HTTP: s.HTTP, Pickers: []string{at.picker}}
	for _, e := range f.engines {
		site.Engines = append(site.Engines, e.Addr())
	}
	ctx, stop := context.WithCancel(context.Background())
	x, err := p.Prepare(ctx, folder, site)
	if err != nil {
		stop()
		return errors.Join(err, os.RemoveAll(folder))
	}
	f.proxy, f.silent = x.Address, !p.Explains
	s.Go(func(stage context.Context) error {
		defer os.RemoveAll(folder)
		defer stop()
		defer context.AfterFunc(stage, stop)()
		var said bytes.Buffer
		x.Command.Stderr = &said
		if err := x.Command.Run(); stage.Err() == nil {
			return fmt.Errorf("%s ended (%w): %.1000s", p.Name, err, said.String())
		}
		return nil
	})
	return nil
}
