// Package settings reads what a command is told: a flag wins over its
// environment variable, that over the same name in a YAML file, and that over
// the default. The table of settings is the flag set; there is no other.
//
// A file names settings as the flags do, one a line:
//
//	policy: default
//	call-timeout: 2s
//
// A name that no flag has, or has twice, and a value that the flag does not
// take are refused with the name and the line. Every error says in one line
// where the setting can stand and what a right value looks like. The package
// also says what is in force, without secrets, and notices when the file
// changes.
package settings

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	// FileFlag names the file. It cannot stand in one.
	FileFlag = "config"
	// maxFile bounds the file in bytes.
	maxFile = 1 << 20
)

// Read fills the variables behind the flags: first from the file that FileFlag
// or its variable names, then from the environment, then from the arguments.
// Names in never are asked for by flag alone. flag.ErrHelp comes back as it is.
func Read(fs *flag.FlagSet, args []string, getenv func(string) string, never ...string) error {
	skip := map[string]bool{FileFlag: true}
	for _, name := range never {
		skip[name] = true
	}
	if file := fileOf(fs, args, getenv); file != "" {
		text, err := readFile(file)
		if err == nil {
			err = fromFile(fs, text, skip)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	delete(skip, FileFlag)
	var errs []error
	fs.VisitAll(func(f *flag.Flag) {
		name := Variable(f.Name)
		if v := getenv(name); v != "" && !skip[f.Name] {
			if err := fs.Set(f.Name, v); err != nil {
				errs = append(errs, Wrong(fs, f.Name, "%s", unreadable(err)))
			}
		}
	})
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := parse(fs, args); err != nil {
		return err
	}
	return zeros(fs)
}

// Variable is the environment variable of a flag.
func Variable(flag string) string {
	return prefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fileOf finds the file's name without setting anything.
func fileOf(fs *flag.FlagSet, args []string, getenv func(string) string) string {
	if fs.Lookup(FileFlag) == nil {
		return ""
	}
	file := getenv(Variable(FileFlag))
	look := flag.NewFlagSet("", flag.ContinueOnError)
	look.SetOutput(io.Discard)
	look.Usage = func() {}
	fs.VisitAll(func(f *flag.Flag) {
		if f.Name == FileFlag {
			look.StringVar(&file, f.Name, file, "")
			return
		}
		b, ok := f.Value.(interface{ IsBoolFlag() bool })
		look.Var(ignored{ok && b.IsBoolFlag()}, f.Name, "")
	})
	_ = look.Parse(args) // what is wrong shows when it is parsed in earnest
	return file
}

// ignored is a flag whose value is passed over.
type ignored struct{ isBool bool }

func (ignored) String() string     { return "" }
func (ignored) Set(string) error   { return nil }
func (i ignored) IsBoolFlag() bool { return i.isBool }

func readFile(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("more than %d bytes", maxFile)
	}
	return text, err
}

func fromFile(fs *flag.FlagSet, text []byte, skip map[string]bool) error {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	if err := decoder.Decode(&doc); errors.Is(err, io.EOF) {
		return nil
	} else if err != nil {
		return err
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return errors.New("more than one YAML document")
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil
	}
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: want lines like \"name: value\"", root.Line)
	}
	var errs []error
	lines := make(map[string]int)
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		name := key.Value
		if err := set(fs, name, value, skip, lines); err != nil {
			errs = append(errs, fmt.Errorf("line %d: %.80q: %w", key.Line, name, err))
		}
		lines[name] = key.Line
	}
	return errors.Join(errs...)
}

func set(fs *flag.FlagSet, name string, value *yaml.Node, skip map[string]bool, lines map[string]int) error {
	switch {
	case fs.Lookup(name) == nil || skip[name]:
		return errors.New("there is no such setting" + suggest(fs, name, func(s string) string { return s }))
	case lines[name] != 0:
		return fmt.Errorf("stands in line %d too", lines[name])
	case value.Kind != yaml.ScalarNode:
		return errors.New("want one value")
	}
	text := value.Value
	if value.Tag == "!!null" {
		text = ""
	}
	if err := fs.Set(name, text); err != nil {
		return Wrong(fs, name, "%s", unreadable(err))
	}
	return nil
}

// Setting is one name with what is in force.
type Setting struct{ Name, Value string }

// Effective lists what is in force, by name. hide shows a value that is, or
// may hold, a secret; it returns others as they are.
func Effective(fs *flag.FlagSet, hide func(name, value string) string) []Setting {
	var list []Setting
	fs.VisitAll(func(f *flag.Flag) {
		list = append(list, Setting{f.Name, hide(f.Name, f.Value.String())})
	})
	return list
}

// Text writes settings as a file has them.
func Text(list []Setting) ([]byte, error) {
	root := yaml.Node{Kind: yaml.MappingNode}
	for _, s := range list {
		root.Content = append(root.Content,
			&yaml.Node{Kind: yaml.ScalarNode, Value: s.Name}, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s.Value})
	}
	return yaml.Marshal(&root)
}

// Secret stands for a value that is not shown; nothing stands for none.
func Secret(value string) string {
	if value == "" {
		return ""
	}
	return "REDACTED"
}

// RedactURLs is a list of URLs separated by commas, without users and
// passwords. What is no URL is left out.
func RedactURLs(urls string) string {
	var out []string
	for part := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(part))
		if err != nil {
			continue
		}
		u.User = nil
		out = append(out, u.String())
	}
	return strings.Join(out, ",")
}
