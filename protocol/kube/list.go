package kube

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

const (
	// pageSize is how many objects the server sends at a time: what of them is not
	// read is garbage by the next page.
	pageSize = 250
	// maxEvent bounds one event of a watch, in bytes: servers take no object of that size.
	maxEvent = 8 << 20
	// watchFor is how long a watch lasts at least, and at most twice that.
	watchFor = 4 * time.Minute
	// backoff after the first failure doubles up to maxBackoff, also of a list that may not
	// be seen: a server that starts refuses everything until it has read the rights.
	backoff, maxBackoff = 100 * time.Millisecond, 5 * time.Second
	// shortWatch is one that ended so soon that the next has to wait.
	shortWatch = time.Second
)

// List is a list of objects that is followed: listed once, then watched from where
// the list was made. When the server has forgotten that place, it is listed again.
// T is what is read of an object, by its JSON.
type List[T any] struct {
	Client *Client
	// Path like /api/v1/pods, and a selector like labelSelector=a%3Db, which may be nil.
	Path     string
	Selector url.Values
	// All has every object, and those that it had before and are not among them are
	// gone. Put has one that came or changed, Gone one that was deleted, as it was last.
	// They are called one at a time.
	All  func([]T)
	Put  func(T)
	Gone func(T)
	// Lost is told why the list is not followed at present, as often as that is found;
	// what was said last stands. All or Followed end it.
	Lost     func(error)
	Followed func()
}

// errGone says that the server does not know the place any more.
var errGone = errors.New("too old a resource version")

// Run follows the list until ctx is done.
func (l *List[T]) Run(ctx context.Context) {
	version, failures := "", 0
	for ctx.Err() == nil {
		var err error
		began := time.Now()
		if version == "" {
			version, err = l.list(ctx)
		}
		if err == nil {
			var seen string
			seen, err = l.watch(ctx, version, func() { failures = 0 })
			version = seen
		}
		if IsCode(err, http.StatusGone) || errors.Is(err, errGone) {
			version = ""
		}
		if err == nil && time.Since(began) < shortWatch {
			err = fmt.Errorf("watch %s: over at once", l.Path)
		}
		if err == nil || ctx.Err() != nil {
			continue // the watch was over
		}
		l.Lost(err)
		wait := min(backoff<<min(failures, 10), maxBackoff)
		var e *Error
		if errors.As(err, &e) {
			wait = max(wait, e.After)
		}
		failures++
		select {
		case <-ctx.Done():
		case <-time.After(wait/2 + rand.N(wait/2)):
		}
	}
}

func (l *List[T]) query(more ...string) string {
	q := make(url.Values)
	for k, v := range l.Selector {
		q[k] = v
	}
	for i := 0; i < len(more); i += 2 {
		if more[i+1] != "" {
			q.Set(more[i], more[i+1])
		}
	}
	return l.Path + "?" + q.Encode()
}

// list reads all objects, and returns the place in the server's history.
func (l *List[T]) list(ctx context.Context) (version string, err error) {
	var all []T
	for token := ""; ; {
		var page struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
				Continue        string `json:"continue"`
			} `json:"metadata"`
			Items []T `json:"items"`
		}
		if err := l.Client.Do(ctx, http.MethodGet, l.query("limit", strconv.Itoa(pageSize), "continue", token), "", nil, &page); err != nil {
			return "", err
		}
		all = append(all, page.Items...)
		if token = page.Metadata.Continue; token == "" {
			if page.Metadata.ResourceVersion == "" {
				return "", fmt.Errorf("GET %s: a list without a resource version", l.Path)
			}
			l.All(all)
			return page.Metadata.ResourceVersion, nil
		}
	}
}

// watch tells of changes from a place on, and returns how far it came. No error: the
// server ended it in good order.
func (l *List[T]) watch(ctx context.Context, version string, began func()) (string, error) {
	lasts := watchFor + rand.N(watchFor)
	ctx, cancel := context.WithTimeout(ctx, lasts+askWithin)
	defer cancel()
	resp, err := l.Client.send(ctx, http.MethodGet, l.query("watch", "true", "allowWatchBookmarks", "true",
		"resourceVersion", version, "timeoutSeconds", strconv.Itoa(int(lasts.Seconds()))), "", nil)
	if err != nil {
		return version, err
	}
	defer resp.Body.Close()
	began()
	l.Followed()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEvent)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		next, err := l.event(lines.Bytes())
		if err != nil {
			return version, err
		}
		version = next
	}
	if err := lines.Err(); err != nil {
		return version, fmt.Errorf("watch %s: %w", l.Path, err)
	}
	return version, nil
}

// event is one line of a watch; it returns the place behind it.
func (l *List[T]) event(line []byte) (version string, err error) {
	var e struct {
		Type   string          `json:"type"`
		Object json.RawMessage `json:"object"`
	}
	var of struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	var object T
	if err = json.Unmarshal(line, &e); err == nil {
		err = json.Unmarshal(e.Object, &of)
	}
	if err == nil && (e.Type == "ADDED" || e.Type == "MODIFIED" || e.Type == "DELETED") {
		err = json.Unmarshal(e.Object, &object)
	}
	switch {
	case err != nil:
		return "", fmt.Errorf("watch %s: %w", l.Path, err)
	case e.Type == "ERROR" && of.Code == http.StatusGone:
		return "", errGone
	case e.Type == "ERROR":
		return "", fmt.Errorf("watch %s: %s", l.Path, shorten(of.Message))
	case of.Metadata.ResourceVersion == "":
		return "", fmt.Errorf("watch %s: an event without a resource version", l.Path)
	case e.Type == "ADDED" || e.Type == "MODIFIED":
		l.Put(object)
	case e.Type == "DELETED":
		l.Gone(object)
	}
	return of.Metadata.ResourceVersion, nil
}
