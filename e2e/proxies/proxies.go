// Package proxies finds the programs that stand in front of engines, and prepares
// each to run with the configuration of deploy/proxies, which it changes no further
// than that it stands elsewhere, before other engines. Who runs them is not its matter.
package proxies

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Proxy is a program, installed or not.
type Proxy struct {
	// Name as people write it.
	Name string
	// Explains tells whether it says, to whoever sends x-kvscout-explain, how many cached
	// tokens were predicted.
	Explains bool
	// variable of the environment that names the program, or else it is usual.
	variable, usual string
	// found looks further: for a program that is not called as usual, or is not
	// enough; nil: it does not.
	found func(path string, err error) (string, error)
	// target of make that installs it.
	target string
	// plan is what is to be changed, and how the program is told.
	plan func(Site, *plan)
}

// All are the proxies that can be prepared, by their names in lower case.
func All() []*Proxy { return []*Proxy{Envoy, Caddy, HAProxy, Nginx} }

// ByName is the proxy of that name, in lower case; nil: there is none.
func ByName(name string) *Proxy {
	for _, p := range All() {
		if strings.ToLower(p.Name) == name {
			return p
		}
	}
	return nil
}

// Find gives the path of the program. The error says how to get it.
func (p *Proxy) Find() (string, error) {
	name := os.Getenv(p.variable)
	if name == "" {
		name = p.usual
	}
	path, err := exec.LookPath(name)
	if p.found != nil {
		path, err = p.found(path, err)
	}
	if err != nil {
		return "", fmt.Errorf("no %s: make %s installs it, or %s names it (%w)", p.Name, p.target, p.variable, err)
	}
	return path, nil
}

// Site is where a proxy stands.
type Site struct {
	// Root is the folder of this repository.
	Root string
	// Host is an address of this machine at which nobody else listens.
	Host string
	// Engines, host:port.
	Engines []string
	// GRPC and HTTP are host:port of the scheduler's API. Pickers are its endpoint
	// picker, or those of several.
	GRPC, HTTP string
	Pickers    []string
	// Plain: without kvscout, by the program's own round robin.
	Plain bool
}

// Edit replaces what stands exactly once in a file of the configuration.
type Edit struct{ File, Old, New string }

// Prepared is a program that is ready to run.
type Prepared struct {
	// Command is asked to end (SIGTERM) when its context does.
	Command *exec.Cmd
	// Address is host:port of HTTP/1.1, HTTP2 that of HTTP/2 by prior knowledge; Admin
	// is that of Envoy's administration.
	Address, HTTP2, Admin string
}

// stopTime is how long a program may take to end when it is asked to.
const stopTime = 5 * time.Second

// Prepare puts the configuration into a folder, which has to be there while the
// program runs. Edits are made after the site's own.
func (p *Proxy) Prepare(ctx context.Context, folder string, s Site, edits ...Edit) (*Prepared, error) {
	path, err := p.Find()
	if err != nil {
		return nil, err
	}
	w := &plan{program: path, folder: folder, address: net.JoinHostPort(s.Host, "28080")}
	w.http2 = w.address
	p.plan(s, w)
	if err := copyEdited(filepath.Join(s.Root, "deploy/proxies", strings.ToLower(p.Name)), folder, w.files, slices.Concat(w.edits, edits)); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, w.args...)
	cmd.Env = append(os.Environ(), w.environment...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTime
	return &Prepared{Command: cmd, Address: w.address, HTTP2: w.http2, Admin: w.admin}, nil
}

// plan is what becomes of a site for one program.
type plan struct {
	program, folder       string
	files                 []string
	edits                 []Edit
	args, environment     []string
	address, http2, admin string
}

// change has an edit made in the file that was named last.
func (w *plan) change(old, now string) {
	w.edits = append(w.edits, Edit{w.files[len(w.files)-1], old, now})
}

// copyEdited takes files from one folder to another. Each edit must find its place.
func copyEdited(from, to string, files []string, edits []Edit) error {
	var errs []error
	for _, e := range edits {
		if !slices.Contains(files, e.File) {
			errs = append(errs, fmt.Errorf("%s is no file of %s", e.File, from))
		}
	}
	for _, name := range files {
		b, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return err
		}
		text := string(b)
		for _, e := range edits {
			if e.File != name {
				continue
			}
			if n := strings.Count(text, e.Old); n != 1 {
				errs = append(errs, fmt.Errorf("%s has %d times what is to be there once: %q", filepath.Join(from, name), n, e.Old))
			}
			text = strings.Replace(text, e.Old, e.New, 1)
		}
		errs = append(errs, os.WriteFile(filepath.Join(to, name), []byte(text), 0o600))
	}
	return errors.Join(errs...)
}
