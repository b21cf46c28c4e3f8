package settings

import (
	"cmp"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
)

// Build is what a program was built of. What is not known is "unknown".
type Build struct {
	Version string // of the module, as Go's tools name it: v0.1.0, or a pseudo-version
	Commit  string // with a plus behind it when more had changed
	Date    string // of the commit
	Go      string
}

// Built is the build of this program.
func Built() Build {
	b := Build{Version: "unknown", Commit: "unknown", Date: "unknown", Go: runtime.Version()}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Version = cmp.Or(info.Main.Version, b.Version)
	changed := ""
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.time":
			b.Date = s.Value
		case "vcs.modified":
			if s.Value == "true" {
				changed = "+"
			}
		}
	}
	b.Commit += changed
	return b
}

// String is what -version says behind the program's name.
func (b Build) String() string {
	return fmt.Sprintf("%s (commit %s, %s, %s)", b.Version, b.Commit, b.Date, b.Go)
}

// Changes are the attributes of a line about settings that differ: of each the
// old and the new value.
func Changes(was, is []Setting) (attributes []any) {
	old := make(map[string]string, len(was))
	for _, s := range was {
		old[s.Name] = s.Value
	}
	for _, s := range is {
		if o := old[s.Name]; o != s.Value {
			attributes = append(attributes, slog.Group(s.Name, "old", o, "new", s.Value))
		}
	}
	return attributes
}
