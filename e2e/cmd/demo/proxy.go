package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kvscout/kvscout/e2e/stage"
)

// proxies that can stand before kvscout's fleet.
var proxies = []string{"gateway", "envoy"}

// places are where the scheduler serves proxies, and one of them its clients.
type places struct{ gateway, picker, front, admin string }

func placesOn(host string) places {
	at := func(port string) string { return net.JoinHostPort(host, port) }
	return places{gateway: at("28080"), picker: at("29002"), front: at("28081"), admin: at("29901")}
}

// through starts the proxy before the fleet and waits until it serves.
func (f *fleet) through(ctx context.Context, s *stage.Stage, name string, at places) error {
	f.proxy = at.gateway
	if name == "envoy" {
		f.proxy = at.front
		if err := f.envoy(s, at); err != nil {
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

// envoy runs the real Envoy with the configuration of deploy/proxies/envoy.
func (f *fleet) envoy(s *stage.Stage, at places) error {
	path, err := exec.LookPath("envoy")
	if named := os.Getenv("ENVOY"); named != "" {
		path, err = exec.LookPath(named)
	}
	if err != nil {
		return fmt.Errorf("%w: make test-envoy installs one; name it by ENVOY", err)
	}
	text, err := os.ReadFile("deploy/proxies/envoy/envoy.yaml")
	if err != nil {
		return err
	}
	place := func(address string) string {
		host, port, _ := net.SplitHostPort(address)
		return host + ", port_value: " + port
	}
	config := string(text)
	const endpoint = "        - endpoint: {address: {socket_address: {address: %s}}}\n"
	var engines strings.Builder
	for _, e := range f.engines {
		fmt.Fprintf(&engines, endpoint, place(e.Addr()))
	}
	for _, change := range [][2]string{
		{place("127.0.0.1:9901"), place(at.admin)}, {place("127.0.0.1:8080"), place(at.front)}, {place("127.0.0.1:9002"), place(at.picker)},
		{fmt.Sprintf(endpoint+endpoint, place("127.0.0.1:8000"), place("127.0.0.1:8001")), engines.String()},
	} {
		if strings.Count(config, change[0]) != 1 {
			return fmt.Errorf("deploy/proxies/envoy/envoy.yaml has not exactly one %q", change[0])
		}
		config = strings.Replace(config, change[0], change[1], 1)
	}
	folder, err := os.MkdirTemp("", "kvscout-demo")
	if err != nil {
		return err
	}
	file := filepath.Join(folder, "envoy.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return errors.Join(err, os.RemoveAll(folder))
	}
	s.Go(func(ctx context.Context) error {
		defer os.RemoveAll(folder)
		var said bytes.Buffer
		cmd := exec.CommandContext(ctx, path, "-c", file, "--concurrency", "2", "--log-level", "error", "--use-dynamic-base-id")
		cmd.Stderr = &said
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		cmd.WaitDelay = patience
		if err := cmd.Run(); err != nil && ctx.Err() == nil {
			return fmt.Errorf("envoy: %w: %.1000s", err, said.String())
		}
		return nil
	})
	return nil
}
