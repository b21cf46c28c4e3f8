package profile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvscout/kvscout/scheduler/internal/textfile"
)

// maxBytes bounds all files of a folder together.
const maxBytes = 8 << 20

// Files are profiles in a file, or in the .yaml, .yml and .json files of a
// folder, such as a mounted ConfigMap, which are read again when they change. What
// is wrong is refused whole: the last good ones stay.
type Files struct {
	path string
	use  func(*Set)
	log  *slog.Logger

	text            []byte // as read last, good or not
	count           atomic.Int64
	loads, refusals atomic.Uint64
}

// Open reads the profiles at a path and hands them to use; no path: there are
// none.
func Open(path string, use func(*Set), log *slog.Logger) (*Files, error) {
	f := &Files{path: path, use: use, log: log}
	if path == "" {
		return f, nil
	}
	return f, f.load()
}

// Stats counts the profiles in use, and how often new ones were loaded and
// refused.
type Stats struct {
	Profiles        int64
	Loaded, Refused uint64
}

// Stats so far.
func (f *Files) Stats() Stats {
	return Stats{Profiles: f.count.Load(), Loaded: f.loads.Load(), Refused: f.refusals.Load()}
}

// Follow loads the profiles again when they change, until ctx is done.
func (f *Files) Follow(ctx context.Context) {
	if f.path == "" {
		return
	}
	textfile.Follow(ctx, f.load, func(err error) {
		f.refusals.Add(1)
		f.log.Error("profiles refused: the last good ones stay", "error", err)
	})
}

// load reads the profiles and uses them if they changed.
func (f *Files) load() error {
	texts, text, err := readFiles(f.path)
	if err != nil {
		f.text = nil
		return err
	}
	if f.text != nil && bytes.Equal(text, f.text) {
		return nil
	}
	f.text = text
	var list []*Profile
	for _, t := range texts {
		found, err := Parse(t.name, t.text)
		if err != nil {
			return err
		}
		list = append(list, found...)
	}
	set, err := NewSet(list)
	if err != nil {
		return fmt.Errorf("%s: %w", f.path, err)
	}
	f.use(set)
	f.count.Store(int64(set.Len()))
	f.loads.Add(1)
	f.log.Info("profiles loaded", "profiles", set.Len(), "files", len(texts))
	return nil
}

// named is the text of a file.
type named struct {
	name string
	text []byte
}

// readFiles reads a file, or the files of a folder by name; all is what they
// say together. Hidden files are passed over: a ConfigMap's own links are such.
func readFiles(path string) (files []named, all []byte, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, fmt.Errorf("profiles: %w", err)
	}
	names := []string{path}
	if info.IsDir() {
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, nil, fmt.Errorf("profiles: %w", err)
		}
		names = names[:0]
		for _, e := range entries {
			ext := strings.ToLower(filepath.Ext(e.Name()))
			if !strings.HasPrefix(e.Name(), ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, ext) {
				names = append(names, filepath.Join(path, e.Name()))
			}
		}
	}
	all = []byte{}
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return nil, nil, fmt.Errorf("profiles: %w", err)
		}
		text, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, nil, fmt.Errorf("profiles: %w", err)
		}
		files = append(files, named{name, text})
		all = append(append(append(all, name...), 0), text...)
		if len(all) > maxBytes {
			return nil, nil, fmt.Errorf("profiles: %s is more than %d bytes", path, maxBytes)
		}
	}
	return files, all, nil
}
