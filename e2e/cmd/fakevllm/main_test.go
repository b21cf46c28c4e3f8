package main

import (
	"bufio"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvscout/kvscout/e2e/await"
	"github.com/kvscout/kvscout/e2e/loopback"
)

// TestMain runs the command itself when the test starts it as a child.
func TestMain(m *testing.M) {
	if os.Getenv("RUN_FAKEVLLM") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func start(t *testing.T, args ...string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "RUN_FAKEVLLM=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		t.Fatal("the engine said nothing")
	}
	return cmd, lines
}

func TestKilledEngineComesBackOnItsPorts(t *testing.T) {
	host := loopback.Host(t)
	for range 3 {
		cmd, lines := start(t, "-host", host, "-port", "28000", "-events-port", "25557", "-replay-port", "25657", "-speedup", "1000")
		url := strings.TrimPrefix(lines.Text(), "http ")
		resp, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"hello, this is more than a block","max_tokens":3}`))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
	}
}

func TestInterruptEndsTheEngine(t *testing.T) {
	cmd, _ := start(t, "-port", "0", "-events-port", "0", "-replay-port", "0")
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(await.Patience):
		t.Error("still running")
	}
}
