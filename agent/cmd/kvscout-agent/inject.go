package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/kvscout/kvscout/agent"
	"github.com/kvscout/kvscout/agent/internal/inject"
	"github.com/kvscout/kvscout/agent/internal/manifest"
	"github.com/kvscout/kvscout/protocol/settings"
)

const injectIntro = `kvscout-agent inject reads manifests of Kubernetes, YAML or JSON, and writes them
with an agent beside each vLLM engine in their pods:

  kvscout-agent inject -image REGISTRY/kvscout-agent:TAG -nats-url nats://kvscout-nats.kvscout:4222 \
      -f deployment.yaml | kubectl apply -f -

What it did, and what keeps an engine's cache from being known, it says on
standard error. What holds no engine, has an agent, or is not understood stays as
it is. Labels and annotations that decide are in docs/KUBERNETES.md. Flags can be
variables or lines of a file, as the agent's.

Exit status: 0, 1 if a manifest cannot be read, 2 for wrong usage.

`

// injectFlags declares the settings of all agents that are put into pods.
func injectFlags(fs *flag.FlagSet) *inject.Settings {
	s := &inject.Settings{CPU: "200m", Memory: "512Mi", User: 65532, NATSKeys: []string{"seed"}, Accepts: accepts}
	fs.StringVar(&s.Image, "image", "", "`image` of the agent; required")
	fs.StringVar(&s.PullPolicy, "image-pull-policy", "", "`policy` for -image: Always, IfNotPresent or Never; empty: Kubernetes' default")
	fs.StringVar(&s.NATSURL, "nats-url", "", "`URL` of the NATS server, or several separated by commas, as agents reach it; required")
	fs.StringVar(&s.NATSSecret, "nats-secret", "", "`name` of a Secret in each pod's namespace with what agents need for NATS; empty: none")
	fs.Var((*list)(&s.NATSKeys), "nats-secret-keys", "`keys` of -nats-secret that are used, separated by commas: seed or credentials, ca.crt, tls.crt and tls.key")
	fs.StringVar(&s.Pool, "pool", "", "`name` of the pool of engines; empty: the agent's default")
	fs.StringVar(&s.CPU, "cpu", s.CPU, "`quantity` of processor that an agent requests")
	fs.StringVar(&s.Memory, "memory", s.Memory, "`quantity` of memory that an agent requests and may use")
	fs.Int64Var(&s.User, "run-as-user", s.User, "`id` of the user and group that agents run as; 0: as the namespace gives it, as on OpenShift")
	return s
}

// list is a flag of texts separated by commas.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

func (l *list) Set(text string) error {
	*l = strings.Split(text, ",")
	return nil
}

// accepts tells whether an agent starts with these settings.
func accepts(given map[string]string) error {
	var cfg agent.Config
	var mode string
	known := declare(&cfg, &mode)
	env := make(map[string]string)
	for name, value := range given {
		// A file of -config would be one of this machine.
		if known.Lookup(name) == nil && name != "log-level" && name != "log-format" {
			return fmt.Errorf("there is no setting %.80q of kvscout-agent", name)
		}
		env[settings.Variable(name)] = value
	}
	_, err := parse(new(settings.Program), nil, func(name string) string { return env[name] }, io.Discard, io.Discard)
	return err
}

func runInject(args []string, getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) int {
	program := &settings.Program{Name: "kvscout-agent inject", Intro: injectIntro}
	fs := flag.NewFlagSet(program.Name, flag.ContinueOnError)
	s := injectFlags(fs)
	file := fs.String("f", "-", "`file` of manifests; -: standard input")
	err := program.Read(fs, args, getenv, stdout, stderr)
	if err == nil {
		err = s.Validate()
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "%s: %v\n", program.Name, err)
		return 2
	}
	if err := injectFile(*file, *s, stdin, stdout, stderr); err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", program.Name, err)
		return 1
	}
	return 0
}

// injectFile writes a file with agents, and to report what came of each pod.
func injectFile(name string, s inject.Settings, stdin io.Reader, stdout, report io.Writer) error {
	in := stdin
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return err
		}
		defer file.Close()
		in = file
	}
	var said bytes.Buffer
	err := manifest.Edit(in, stdout, func(t manifest.Template) []inject.Change {
		d := inject.Decide(t.Pod, t.Workload, s)
		if len(d.Engines) > 0 {
			fmt.Fprintf(&said, "%s: agent beside %s\n", t.Where, strings.Join(d.Engines, ", "))
		}
		for _, w := range d.Warnings {
			fmt.Fprintf(&said, "%s: %s\n", t.Where, w)
		}
		return d.Changes
	})
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if said.Len() == 0 {
		fmt.Fprintf(&said, "%s: no pod without an agent starts vLLM\n", name)
	}
	_, err = report.Write(said.Bytes())
	return err
}
