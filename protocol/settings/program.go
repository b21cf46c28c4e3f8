package settings

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
)

// Program is what every command has around its own settings: help, version, a
// file, and a log.
type Program struct {
	Name, Intro string
	// Follows: the file is read again while the program runs.
	Follows bool

	File   string // of settings; empty: none
	Level  slog.LevelVar
	Format string
	Log    *slog.Logger // made by Read

	unknown []string
}

// Read adds what every program has to the flags of one, reads them all, and makes
// the log. What was asked for instead of a run (help, version) it writes to
// stdout, and returns flag.ErrHelp.
func (p *Program) Read(fs *flag.FlagSet, args []string, getenv func(string) string, stdout, stderr io.Writer) error {
	followed, live := "", ""
	if p.Follows {
		followed, live = ", and its changes are followed", "; live"
	}
	fs.SetOutput(io.Discard) // the caller reports errors once
	fs.Usage = func() {}
	fs.StringVar(&p.File, FileFlag, "", "`file` in YAML with settings, named like the flags; a flag or a variable wins over it"+followed)
	fs.TextVar(&p.Level, "log-level", &p.Level, "`level`: debug, info, warn or error"+live)
	fs.StringVar(&p.Format, "log-format", "text", "`format` of the log: text or json")
	version := fs.Bool("version", false, "print version, commit, date and Go version, and end")
	if err := Read(fs, args, getenv, "version"); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprint(stdout, p.Intro)
			fs.SetOutput(stdout)
			fs.PrintDefaults()
		}
		return err
	}
	if *version {
		fmt.Fprintln(stdout, p.Name, Built())
		return flag.ErrHelp
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("there is no argument %q; flags begin with -, and -help lists them", fs.Arg(0))
	}
	p.unknown = Unknown(fs, os.Environ(), "version")
	options := &slog.HandlerOptions{Level: &p.Level}
	switch p.Format {
	case "text":
		p.Log = slog.New(slog.NewTextHandler(stderr, options))
	case "json":
		p.Log = slog.New(slog.NewJSONHandler(stderr, options))
	default:
		return Wrong(fs, "log-format", "%q is neither text nor json", p.Format)
	}
	return nil
}

// Start writes the first lines of the log: variables that are none, what the
// program is, and what is in force.
func (p *Program) Start(list []Setting) {
	for _, text := range p.unknown {
		p.Log.Warn("unknown environment variable", "problem", text)
	}
	b := Built()
	attributes := []any{"version", b.Version, "commit", b.Commit, "date", b.Date, "go", b.Go}
	for _, s := range list {
		attributes = append(attributes, s.Name, s.Value)
	}
	p.Log.Info(p.Name+" starts", attributes...)
}
