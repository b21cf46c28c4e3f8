package settings

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
)

// Error is what is wrong with one setting, in a line.
type Error struct {
	Name string // of the flag
	Why  string // quotes no value that may be a secret
	// Example is a right value; empty: there is none to give.
	Example string
}

// Error names every place where the setting can stand.
func (e *Error) Error() string {
	text := fmt.Sprintf("-%s, %s or %q in the file: %s", e.Name, Variable(e.Name), e.Name, e.Why)
	if e.Example != "" {
		text += "; for example " + e.Example
	}
	return text
}

// Wrong is an Error of a setting with an example of a right value, which is
// the default, if there is one.
func Wrong(fs *flag.FlagSet, name, format string, args ...any) error {
	return &Error{Name: name, Why: fmt.Sprintf(format, args...), Example: example(fs.Lookup(name))}
}

// examples of what flags take, by the word for it in their usage.
var examples = map[string]string{
	"URL": "nats://nats:4222", "host:port": "10.0.0.7:8000", "address": "10.0.0.7", "endpoint": "tcp://127.0.0.1:5557",
	"file": "/etc/kvscout/file", "folder": "/var/lib/kvscout", "time": "1s", "duration": "1s", "bytes": "64MiB", "number": "16", "tokens": "16", "int": "16",
	"key=value": "kvscout.gpu=H100",
}

func example(f *flag.Flag) string {
	if f == nil {
		return ""
	}
	switch f.DefValue {
	case "", "0", "0s", "false":
	default:
		return f.DefValue
	}
	word, _ := flag.UnquoteUsage(f)
	if b, ok := f.Value.(interface{ IsBoolFlag() bool }); ok && b.IsBoolFlag() {
		return "true"
	}
	return examples[word]
}

// unreadable is why a value was not taken. It does not quote it: it may be a
// secret.
func unreadable(err error) string {
	const why = "the value cannot be read"
	if text := err.Error(); text != "parse error" {
		return why + ": " + text
	}
	return why
}

// like is the flag that a name, which none has, was perhaps meant to be.
func like(fs *flag.FlagSet, name string) string {
	best, least := "", 2+min(2, len(name)/4)
	fs.VisitAll(func(f *flag.Flag) {
		d := distance(name, f.Name)
		if strings.HasPrefix(f.Name, name+"-") {
			d = min(d, 1)
		}
		if d < least {
			best, least = f.Name, d
		}
	})
	return best
}

// suggest is what an error about an unknown name ends with.
func suggest(fs *flag.FlagSet, name string, shown func(string) string) string {
	if meant := like(fs, name); meant != "" {
		return "; did you mean " + shown(meant) + "?"
	}
	return "; -help lists them"
}

// distance is how many letters have to be put in, taken out or changed to make
// b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := before
			if a[i] != b[j] {
				change++
			}
			before = row[j+1]
			row[j+1] = min(change, before+1, row[j]+1)
		}
	}
	return row[len(b)]
}

// parse parses the arguments. It prints nothing but what -help asks for: what
// is wrong with an argument is an Error, or names what was perhaps meant.
func parse(fs *flag.FlagSet, args []string) error {
	usage, output := fs.Usage, fs.Output()
	fs.Usage = func() {}
	fs.SetOutput(io.Discard)
	err := fs.Parse(args)
	fs.Usage = usage
	fs.SetOutput(output)
	if errors.Is(err, flag.ErrHelp) && usage != nil {
		usage()
	}
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return err
	}
	if name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -"); unknown {
		return fmt.Errorf("there is no flag -%s%s", name, suggest(fs, name, func(s string) string { return "-" + s }))
	}
	if name, lacks := strings.CutPrefix(err.Error(), "flag needs an argument: -"); lacks {
		return Wrong(fs, name, "the flag needs a value")
	}
	return why(fs, args, err)
}

// zeros refuses the value 0 where it has no meaning, which the usage of a flag
// gives it otherwise: a program would take its default for it.
func zeros(fs *flag.FlagSet) error {
	zero := func(s string) bool { return s == "0" || s == "0s" }
	var errs []error
	fs.VisitAll(func(f *flag.Flag) {
		if zero(f.Value.String()) && !zero(f.DefValue) && f.DefValue != "" && !strings.Contains(f.Usage, "0:") {
			errs = append(errs, Wrong(fs, f.Name, "0 means nothing here"))
		}
	})
	return errors.Join(errs...)
}

// why finds the flag that did not take its value, which the package's own
// error quotes.
func why(fs *flag.FlagSet, args []string, err error) error {
	again := flag.NewFlagSet("", flag.ContinueOnError)
	again.SetOutput(io.Discard)
	again.Usage = func() {}
	fs.VisitAll(func(f *flag.Flag) {
		again.Var(noting{f.Value, func(why error) { err = Wrong(fs, f.Name, "%s", unreadable(why)) }}, f.Name, "")
	})
	_ = again.Parse(args)
	return err
}

// noting is a flag's value that notes why it did not take something.
type noting struct {
	flag.Value
	note func(error)
}

func (n noting) Set(text string) error {
	err := n.Value.Set(text)
	if err != nil {
		n.note(err)
	}
	return err
}

func (n noting) IsBoolFlag() bool {
	b, ok := n.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}
