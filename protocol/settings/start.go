package settings

import (
	"log/slog"
	"runtime/debug"
)

// Build names what was built: the module's version, and the commit with a plus
// behind it when more had changed. What is not known is "unknown".
func Build() (version, commit string) {
	version, commit = "unknown", "unknown"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return version, commit
	}
	if info.Main.Version != "" {
		version = info.Main.Version
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			commit = s.Value
		}
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.modified" && s.Value == "true" {
			commit += "+"
		}
	}
	return version, commit
}

// Start writes the first line of a program's log: what it is, and what is in
// force.
func Start(log *slog.Logger, program string, list []Setting) {
	version, commit := Build()
	attributes := []any{"version", version, "commit", commit}
	for _, s := range list {
		attributes = append(attributes, s.Name, s.Value)
	}
	log.Info(program+" starts", attributes...)
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
