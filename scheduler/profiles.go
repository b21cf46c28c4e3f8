package scheduler

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
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/profile"
)

const (
	// profilesEvery is how often the profiles are read again. A mounted
	// ConfigMap takes a minute to arrive.
	profilesEvery = 2 * time.Second
	// maxProfiles bounds all files together in bytes.
	maxProfiles = 8 << 20
)

// profiles are read from a file, or from the .yaml, .yml and .json files of a
// folder, such as a mounted ConfigMap, and read again when these change. What
// is wrong is refused whole: the last good ones stay.
type profiles struct {
	path string
	use  func(*profile.Set)
	log  *slog.Logger

	text            []byte // as read last, good or not
	count           atomic.Int64
	loads, refusals atomic.Uint64
}

// load reads the profiles and uses them if they changed.
func (p *profiles) load() error {
	files, text, err := readProfiles(p.path)
	if err != nil {
		p.text = nil
		return err
	}
	if p.text != nil && bytes.Equal(text, p.text) {
		return nil
	}
	p.text = text
	var list []*profile.Profile
	for _, f := range files {
		found, err := profile.Parse(f.name, f.text)
		if err != nil {
			return err
		}
		list = append(list, found...)
	}
	set, err := profile.NewSet(list)
	if err != nil {
		return fmt.Errorf("%s: %w", p.path, err)
	}
	p.use(set)
	p.count.Store(int64(set.Len()))
	p.loads.Add(1)
	p.log.Info("profiles loaded", "profiles", set.Len(), "files", len(files))
	return nil
}

// follow loads the profiles again and again until ctx is done. What cannot be
// read is logged once, and what is wrong once for each change.
func (p *profiles) follow(ctx context.Context) {
	tick := time.NewTicker(profilesEvery)
	defer tick.Stop()
	last := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := p.load()
		if err == nil {
			last = ""
			continue
		}
		if err.Error() != last {
			last = err.Error()
			p.refusals.Add(1)
			p.log.Error("profiles refused: the last good ones stay", "error", err)
		}
	}
}

type profileFile struct {
	name string
	text []byte
}

// readProfiles reads a file, or the files of a folder by name; all is what they
// say together. Hidden files are passed over: a ConfigMap's own links are such.
func readProfiles(path string) (files []profileFile, all []byte, err error) {
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
		text, err := io.ReadAll(io.LimitReader(f, maxProfiles+1))
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, nil, fmt.Errorf("profiles: %w", err)
		}
		files = append(files, profileFile{name, text})
		all = append(append(append(all, name...), 0), text...)
		if len(all) > maxProfiles {
			return nil, nil, fmt.Errorf("profiles: %s is more than %d bytes", path, maxProfiles)
		}
	}
	return files, all, nil
}
