package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// picture is what a person sees of the run at one moment.
type picture struct {
	title  string
	at, of time.Duration
	note   string
	fleets []fleetPicture
	// decision of kvscout, one of late; empty: there is none to show.
	decision string
}

type fleetPicture struct {
	name    string
	silent  bool // of what was predicted
	sum     sum
	ttft    quantiles // in the engines' own time
	members []memberPicture
}

type memberPicture struct {
	name             string
	cached, used     float64 // share of blocks: cached at all, in use by requests
	running, waiting int
	hitRate          float64
	trust            string
}

// screen draws pictures over each other, in colour, and leaves the terminal as
// it was.
type screen struct {
	file  *os.File
	lines int
}

// newScreen is nil if f is no terminal.
func newScreen(f *os.File) *screen {
	if !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	fmt.Fprint(f, "\x1b[?25l")
	return &screen{file: f}
}

func (s *screen) draw(p picture) {
	width, height, err := term.GetSize(int(s.file.Fd()))
	if err != nil || width < 40 {
		width, height = 80, 24
	}
	lines := p.lines(width)
	if len(lines) >= height {
		lines = lines[:height-1]
	}
	var b strings.Builder
	if s.lines > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", s.lines)
	}
	for _, l := range lines {
		b.WriteString("\r" + l + "\x1b[0m\x1b[K\n")
	}
	b.WriteString("\x1b[J")
	s.lines = len(lines)
	_, _ = io.WriteString(s.file, b.String())
}

// close shows the cursor again, below the last picture.
func (s *screen) close() { fmt.Fprint(s.file, "\x1b[0m\x1b[?25h\n") }

const (
	bold   = "\x1b[1m"
	dim    = "\x1b[2m"
	plain  = "\x1b[0m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	cyan   = "\x1b[36m"
)

// lines lays the picture out, the fleets below each other.
func (p picture) lines(width int) []string {
	out := []string{
		bold + p.title + plain,
		progress(p.at, p.of, min(width-20, 50)) + fmt.Sprintf(" %3.0f s of %.0f s", p.at.Seconds(), p.of.Seconds()),
		dim + p.note + plain,
		"",
	}
	for _, f := range p.fleets {
		out = append(append(out, f.lines()...), "")
	}
	if p.decision != "" {
		out = append(out, dim+"A decision of kvscout:"+plain)
		out = append(out, wrapped(p.decision, width)...)
	}
	for i := range out {
		out[i] = clipStyled(out[i], width)
	}
	return out
}

func (f fleetPicture) lines() []string {
	var cached, used strings.Builder
	running, waiting, exact := 0, 0, 0
	for _, m := range f.members {
		cached.WriteRune(column(m.cached))
		used.WriteRune(column(m.used))
		running, waiting = running+m.running, waiting+m.waiting
		if m.trust == "EXACT" {
			exact++
		}
	}
	off := fmt.Sprintf("; predicted tokens off by %.2f %%", 100*share(f.sum.error, f.sum.prompt))
	if f.silent {
		off = ""
	}
	colour := green
	if exact < len(f.members) {
		colour = yellow
	}
	return []string{
		bold + cyan + pad(f.name, 15) + plain + fmt.Sprintf(" hit rate %s%4.1f %%%s  TTFT mean %s%s%s, p50 %s, p99 %s",
			bold, 100*f.sum.hitRate(), plain, bold, seconds(f.ttft.mean), plain, seconds(f.ttft.p50), seconds(f.ttft.p99)),
		fmt.Sprintf("  engines: cache %s%s%s in use %s%s%s  %d run, %d wait, %s%d of %d exact%s",
			cyan, cached.String(), plain, green, used.String(), plain, running, waiting, colour, exact, len(f.members), plain),
		fmt.Sprintf("  %d sent, %d open, %d done%s", f.sum.sent, f.sum.open, f.sum.done, off),
	}
}

// wrapped is a text in lines of at most that width.
func wrapped(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return append(lines, line)
}

// column is a share as a bar that stands.
func column(share float64) rune {
	return []rune("▁▂▃▄▅▆▇█")[int(max(0, min(1, share))*7+0.5)]
}

func progress(at, of time.Duration, cells int) string {
	return green + bar(min(1, at.Seconds()/of.Seconds()), cells) + plain
}

var eighths = []rune(" ▏▎▍▌▋▊▉")

func bar(share float64, cells int) string {
	n := int(max(0, min(1, share))*float64(cells)*8 + 0.5)
	s := strings.Repeat("█", n/8)
	if n%8 > 0 {
		s += string(eighths[n%8])
	}
	return s + strings.Repeat("·", cells-utf8.RuneCountInString(s))
}

func seconds(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1000)
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// visible counts the columns of a styled string.
func visible(s string) int {
	n, escape := 0, false
	for _, r := range s {
		switch {
		case r == '\x1b':
			escape = true
		case escape:
			escape = r != 'm'
		default:
			n++
		}
	}
	return n
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-visible(s)))
}

// clipStyled cuts to the visible width and keeps the escapes whole.
func clipStyled(s string, width int) string {
	n, escape := 0, false
	for i, r := range s {
		switch {
		case r == '\x1b':
			escape = true
		case escape:
			escape = r != 'm'
		default:
			if n++; n > width {
				return s[:i] + plain
			}
		}
	}
	return s
}

// line is the picture for those who have no terminal.
func (p picture) line() string {
	lines := []string{fmt.Sprintf("%3.0f s  %s", p.at.Seconds(), p.note)}
	for _, f := range p.fleets {
		lines = append(lines, fmt.Sprintf("  %-15s %4d done, hit rate %4.1f %%, TTFT mean %s p99 %s",
			f.name, f.sum.done, 100*f.sum.hitRate(), seconds(f.ttft.mean), seconds(f.ttft.p99)))
	}
	if p.decision != "" {
		for _, l := range wrapped(p.decision, 78) {
			lines = append(lines, "  "+l)
		}
	}
	return strings.Join(lines, "\n")
}
