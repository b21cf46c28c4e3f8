package settings

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"time"
)

// look is how often the file is looked at.
const look = time.Second

// Watch calls reload when the file has changed, and for every signal, until
// ctx is done. An error of reload is logged, once for a state of the file: what
// was in force stays. Without a file only signals count.
func Watch(ctx context.Context, file string, signals <-chan os.Signal, log *slog.Logger, reload func() error) {
	tick := time.NewTicker(look)
	defer tick.Stop()
	var last []byte
	if file != "" {
		last, _ = readFile(file)
	}
	try := func(why string) {
		if err := reload(); err != nil {
			log.Error("the configuration is not changed, the last good one stays in force", "why", why, "error", err)
			return
		}
		log.Info("configuration read again", "why", why)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-signals:
			if file != "" {
				last, _ = readFile(file)
			}
			try(s.String())
		case <-tick.C:
			if file == "" {
				continue
			}
			// A file that cannot be read is about to be replaced, or gone: what
			// is in force stays.
			text, err := readFile(file)
			if err != nil || bytes.Equal(text, last) {
				continue
			}
			last = text
			try("changed file")
		}
	}
}
