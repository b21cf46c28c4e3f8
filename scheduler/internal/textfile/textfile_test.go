package textfile

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestLinesNameWhatIsWrong(t *testing.T) {
	var got []string
	err := Lines("# comment\na b # c\n\nbad\n x\nbad", func(_ int, words []string) error {
		if words[0] == "bad" {
			return errors.New("no")
		}
		got = append(got, strings.Join(words, " "))
		return nil
	})
	if err == nil || err.Error() != "line 4: no\nline 6: no" || !slices.Equal(got, []string{"a b", "x"}) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestRefusalsAreToldOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := errors.New("a"), errors.New("b")
		answers := []error{nil, a, a, b, nil, nil, b, b, b}
		ctx, stop := context.WithTimeout(t.Context(), time.Duration(len(answers)+1)*every-time.Millisecond)
		defer stop()
		reads := 0
		var told []error
		Follow(ctx, func() error { reads++; return answers[reads-1] }, func(err error) { told = append(told, err) })
		if reads != len(answers) || !slices.Equal(told, []error{a, b, b}) {
			t.Errorf("%d reads, told %v", reads, told)
		}
	})
}
