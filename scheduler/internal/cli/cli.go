// Package cli is the command kvscout: what people ask a scheduler, and how the
// answers are shown. It asks over the API, with the rights of whoever calls it;
// only doctor looks elsewhere, too. What is served and decided is others'.
package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/term"

	"github.com/kvscout/kvscout/protocol/settings"
)

const intro = `kvscout asks a scheduler who is there, how far each member is believed, and why a
request goes where it goes:

  kvscout members
  kvscout explain body.json

`

const outro = `
kvscout COMMAND -help lists the flags of a command. Those that say whom to ask
have environment variables too: KVSCOUT_SCHEDULER, KVSCOUT_TLS_CA and so on.
NO_COLOR leaves colours out.

Exit status: 0, 1 on failure or when doctor finds what must be mended, 2 for
wrong usage.
`

// IO is where a command reads and writes.
type IO struct {
	In       io.Reader
	Out, Err io.Writer
	// Asks: In is a terminal, from which nothing comes by itself.
	Asks bool
	// Size of the terminal that Out is; nil: it is none, and nothing is cut to fit.
	Size func() (width, height int)
}

// Terminal is the IO of a process.
func Terminal(in, out, err *os.File) IO {
	o := IO{In: in, Out: out, Err: err, Asks: term.IsTerminal(int(in.Fd()))}
	if fd := int(out.Fd()); term.IsTerminal(fd) {
		o.Size = func() (int, int) {
			width, height, err := term.GetSize(fd)
			if err != nil || width <= 0 || height <= 0 {
				return 80, 24
			}
			return width, height
		}
	}
	return o
}

// width of the terminal; 0: there is none.
func (o *IO) width() int {
	if o.Size == nil {
		return 0
	}
	w, _ := o.Size()
	return w
}

// command is one of the things that can be asked.
type command struct {
	name, does string
	// operand is the word for the one argument behind the flags; empty: none.
	operand string
	// more is what -help says before the flags.
	more string
	// offline: no scheduler is asked.
	offline bool
	// bind defines the command's own flags, and gives what runs it.
	bind func(*flag.FlagSet) func(context.Context, *session) error
}

// commands in the order in which -help lists them.
func commands() []command {
	return []command{members, top, watch, explain, score, prefixes, doctor, completion()}
}

// errMend says that doctor found what must be mended. It has said all of it.
var errMend = errors.New("something must be mended")

// wrongUsage is an error of the arguments.
type wrongUsage struct{ error }

// Unwrap gives what was wrong.
func (w wrongUsage) Unwrap() error { return w.error }

func misused(format string, v ...any) error { return wrongUsage{fmt.Errorf(format, v...)} }

// Run runs the command that the arguments name and gives the exit status. What
// went wrong is one line.
func Run(ctx context.Context, args []string, getenv func(string) string, o IO) int {
	err := dispatch(ctx, args, getenv, o)
	var usage wrongUsage
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case ctx.Err() != nil:
		return 1 // whoever ended it knows
	case errors.Is(err, errMend):
		return 1
	case errors.As(err, &usage):
		fmt.Fprintf(o.Err, "kvscout: %s\n", clean(err.Error()))
		return 2
	}
	fmt.Fprintf(o.Err, "kvscout: %s\n", clean(err.Error()))
	return 1
}

func dispatch(ctx context.Context, args []string, getenv func(string) string, o IO) error {
	name := "-help"
	if len(args) > 0 {
		name, args = args[0], args[1:]
	}
	switch name {
	case "-h", "-help", "--help", "help":
		fmt.Fprint(o.Out, intro)
		for _, c := range commands() {
			fmt.Fprintf(o.Out, "  %-11s %s\n", c.name, c.does)
		}
		fmt.Fprint(o.Out, outro)
		return nil
	case "-version", "--version", "version":
		fmt.Fprintln(o.Out, "kvscout", settings.Built())
		return nil
	}
	all := commands()
	i := slices.IndexFunc(all, func(c command) bool { return c.name == name })
	switch {
	case i >= 0:
		return all[i].start(ctx, args, getenv, o)
	case strings.HasPrefix(name, "-"):
		return misused("flags stand behind the command, as in: kvscout members %s; kvscout -help lists commands", name)
	}
	return misused("there is no command %q; kvscout -help lists them", name)
}

// start reads the flags of a command and runs it.
func (c *command) start(ctx context.Context, args []string, getenv func(string) string, o IO) error {
	s := &session{IO: o}
	fs, run := c.flags(&s.options)
	fs.Usage = func() {
		fmt.Fprintf(o.Out, "kvscout %s", c.name)
		fmt.Fprintf(o.Out, " [flags]%s: %s\n%s\n", strings.TrimRight(" "+c.operand, " "), c.does, c.more)
		fs.SetOutput(o.Out)
		fs.PrintDefaults()
	}
	if err := settings.Read(fs, args, getenv, c.own()...); err != nil {
		return wrongFlag(err)
	}
	s.args = fs.Args()
	most := 0
	if c.operand != "" {
		most = 1
	}
	if len(s.args) > most {
		return misused("there is no argument %q; flags stand before anything else, and kvscout %s -help lists them", s.args[most], c.name)
	}
	s.colours = o.Size != nil && getenv("NO_COLOR") == "" && getenv("TERM") != "dumb"
	if c.offline {
		return run(ctx, s)
	}
	if err := s.validate(fs); err != nil {
		return wrongFlag(err)
	}
	if err := s.dial(); err != nil {
		return err
	}
	defer s.conn.Close()
	return s.explained(ctx, run(ctx, s))
}

// flags of a command, its own and those that all have.
func (c *command) flags(o *options) (*flag.FlagSet, func(context.Context, *session) error) {
	fs := flag.NewFlagSet("kvscout "+c.name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	if !c.offline {
		o.bind(fs)
	}
	return fs, c.bind(fs)
}

// own are the flags that have no environment variable: those that do not say
// whom to ask, and how.
func (c *command) own() []string {
	list := []string{"o"}
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	c.bind(fs)
	fs.VisitAll(func(f *flag.Flag) {
		if !strings.HasPrefix(f.Name, "nats-") {
			list = append(list, f.Name)
		}
	})
	return list
}

// wrongFlag is what is wrong with a flag, in one line.
func wrongFlag(err error) error {
	var wrong *settings.Error
	if errors.Is(err, flag.ErrHelp) || !errors.As(err, &wrong) {
		return wrongUsage{err}
	}
	text := "-" + wrong.Name + ": " + wrong.Why
	if wrong.Example != "" {
		text += "; for example " + wrong.Example
	}
	return misused("%s", text)
}
