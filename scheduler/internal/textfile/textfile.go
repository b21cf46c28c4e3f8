// Package textfile follows files of people whose content is in force: they may be
// replaced at any time, one that is wrong is refused as a whole, and the last
// good one stays in force. What stands in them is for others to say.
package textfile

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// every is the time between two reads. A mounted ConfigMap takes a minute to
// arrive.
const every = time.Second

// Follow reads again and again until ctx is done. read takes over what changed;
// refused is told once why it could not.
func Follow(ctx context.Context, read func() error, refused func(error)) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := read()
		switch {
		case err == nil:
			said = ""
		case err.Error() != said:
			said = err.Error()
			refused(err)
		}
	}
}

// Lines hands on the words of each line, with its number. Empty lines and what
// follows a '#' count for nothing. It names everything that is wrong.
func Lines(text string, take func(number int, words []string) error) error {
	var errs []error
	number := 0
	for line := range strings.Lines(text) {
		number++
		line, _, _ = strings.Cut(line, "#")
		if words := strings.Fields(line); len(words) > 0 {
			if err := take(number, words); err != nil {
				errs = append(errs, fmt.Errorf("line %d: %w", number, err))
			}
		}
	}
	return errors.Join(errs...)
}
