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
}

type fleetPicture struct {
	name    string
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

// lines lays the picture out: the fleets beside each other where the width
// allows it, else below each other.
func (p picture) lines(width int) []string {
	out := []string{
		bold + clip(p.title, width) + plain,
		progress(p.at, p.of, min(width-20, 60)) + fmt.Sprintf(" %3.0f s of %.0f s", p.at.Seconds(), p.of.Seconds()),
		dim + clip(p.note, width) + plain,
		"",
	}
	const gap = "   "
	column := width
	beside := width >= 2*columnWidth+len(gap)
	if beside {
		column = (width - len(gap)) / 2
	}
	var blocks [][]string
	for _, f := range p.fleets {
		blocks = append(blocks, f.lines(column))
	}
	if !beside {
		for _, b := range blocks {
			out = append(append(out, b...), "")
		}
		return out
	}
	for i := range blocks[0] {
		var row []string
		for _, b := range blocks {
			row = append(row, pad(b[min(i, len(b)-1)], column))
		}
		out = append(out, strings.Join(row, gap))
	}
	return out
}

// columnWidth is what a fleet needs.
const columnWidth = 58

func (f fleetPicture) lines(width int) []string {
	out := []string{
		bold + cyan + f.name + plain + fmt.Sprintf("  hit rate %s%4.1f %%%s  TTFT p50 %s%s%s p90 %s p99 %s",
			bold, 100*f.sum.hitRate(), plain, bold, seconds(f.ttft.p50), plain, seconds(f.ttft.p90), seconds(f.ttft.p99)),
		fmt.Sprintf("%d sent, %d open, %d done, predictions off by %.2f %%",
			f.sum.sent, f.sum.open, f.sum.done, 100*share(f.sum.error, f.sum.prompt)),
		dim + pad("member", 4) + "  cache      in use     run  wait   hit  trust" + plain,
	}
	const cells = 9
	for _, m := range f.members {
		colour := green
		if m.trust != "EXACT" {
			colour = yellow
		}
		load := green
		if m.used > 0.85 || m.waiting > 0 {
			load = yellow
		}
		out = append(out, fmt.Sprintf("%6s  %s%s%s  %s%s%s  %4d %5d %4.0f%%  %s%s%s", m.name,
			cyan, bar(m.cached, cells), plain, load, bar(m.used, cells), plain,
			m.running, m.waiting, 100*m.hitRate, colour, m.trust, plain))
	}
	for i := range out {
		out[i] = clipStyled(out[i], width)
	}
	return out
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

func clip(s string, width int) string {
	if utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:width])
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
	parts := []string{fmt.Sprintf("%3.0f s", p.at.Seconds())}
	for _, f := range p.fleets {
		running, waiting, exact := 0, 0, 0
		for _, m := range f.members {
			running += m.running
			waiting += m.waiting
			if m.trust == "EXACT" {
				exact++
			}
		}
		parts = append(parts, fmt.Sprintf("%s: %d done, %d running, %d waiting, hit rate %.1f %%, TTFT p50 %s p90 %s, %d of %d exact",
			f.name, f.sum.done, running, waiting, 100*f.sum.hitRate(), seconds(f.ttft.p50), seconds(f.ttft.p90), exact, len(f.members)))
	}
	return strings.Join(parts, " | ")
}
