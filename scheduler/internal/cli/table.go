package cli

import (
	"io"
	"strings"
	"unicode"
	"unicode/utf8"
)

// colour of a text on a terminal, as its escape sequence has it; empty: none.
type colour string

const (
	plain  colour = ""
	bold   colour = "1"
	dim    colour = "2"
	red    colour = "31"
	green  colour = "32"
	yellow colour = "33"
	cyan   colour = "36"
)

// paint colours a text if colours are wanted.
func paint(text string, c colour, colours bool) string {
	if !colours || c == plain || text == "" {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}

// clean makes a text of others fit into one line of a terminal: what is not
// printable, such as an escape sequence, does nothing there.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case r == utf8.RuneError || !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, text)
}

// column of a table.
type column struct {
	title string
	right bool // aligned
	// least is the width that it may be cut to; 0: it is not cut. From its middle
	// where ends tell names apart.
	least  int
	middle bool
	// spare columns are left out where there is no room, the largest first; 0: it
	// stays.
	spare int
}

type cell struct {
	text   string
	colour colour
}

func text(s string) cell { return cell{text: s} }

// table has a row of cells for each thing, one for each column.
type table struct {
	columns []column
	rows    [][]cell
}

const gap = "  "

// write writes the table. Where a width is given, other than 0, no line is
// longer: columns are cut, then left out. A column that is empty in all rows
// and has no right to stay is left out anyway.
func (t *table) write(w io.Writer, width int, colours bool) error {
	shown, widths := t.fit(width)
	var out strings.Builder
	line := func(of func(i int) cell) {
		var b strings.Builder
		blank := 0 // columns of nothing that stand at the end so far
		for k, i := range shown {
			c := of(i)
			words := cut(clean(c.text), widths[k], t.columns[i].middle)
			pad := strings.Repeat(" ", widths[k]-utf8.RuneCountInString(words))
			words = paint(words, c.colour, colours)
			if k > 0 {
				blank += len(gap)
			}
			if t.columns[i].right {
				blank, pad = blank+len(pad), ""
			}
			if words != "" {
				b.WriteString(strings.Repeat(" ", blank))
				b.WriteString(words)
				blank = 0
			}
			blank += len(pad)
		}
		out.WriteString(b.String())
		out.WriteByte('\n')
	}
	line(func(i int) cell { return cell{t.columns[i].title, bold} })
	for _, row := range t.rows {
		line(func(i int) cell { return row[i] })
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// fit gives the columns that are shown and how wide they are.
func (t *table) fit(width int) (shown, widths []int) {
	natural := make([]int, len(t.columns))
	for i, c := range t.columns {
		filled := c.spare == 0
		natural[i] = utf8.RuneCountInString(c.title)
		for _, row := range t.rows {
			if row[i].text != "" {
				filled = true
				natural[i] = max(natural[i], utf8.RuneCountInString(clean(row[i].text)))
			}
		}
		if filled {
			shown = append(shown, i)
		}
	}
	least := func(i int) int {
		if c := t.columns[i]; c.least > 0 {
			return min(natural[i], c.least)
		}
		return natural[i]
	}
	sum := func(of func(int) int) int {
		n := -len(gap)
		for _, i := range shown {
			n += of(i) + len(gap)
		}
		return n
	}
	for width > 0 && sum(least) > width {
		drop := -1
		for k, i := range shown {
			if s := t.columns[i].spare; s > 0 && (drop < 0 || s > t.columns[shown[drop]].spare) {
				drop = k
			}
		}
		if drop < 0 {
			break // narrower than anything makes sense
		}
		shown = append(shown[:drop], shown[drop+1:]...)
	}
	excess := 0
	if width > 0 {
		excess = sum(func(i int) int { return natural[i] }) - width
	}
	for excess > 0 {
		widest := -1
		for _, i := range shown {
			if natural[i] > least(i) && t.columns[i].least > 0 && (widest < 0 || natural[i] > natural[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			break
		}
		natural[widest]--
		excess--
	}
	for _, i := range shown {
		widths = append(widths, natural[i])
	}
	return shown, widths
}

// cut shortens a text to a width, in the middle or at the end.
func cut(text string, width int, middle bool) string {
	runes := []rune(text)
	switch {
	case len(runes) <= width:
		return text
	case width <= 1:
		return string(runes[:max(width, 0)])
	case !middle:
		return string(runes[:width-1]) + "…"
	}
	tail := (width - 1) * 2 / 3
	return string(runes[:width-1-tail]) + "…" + string(runes[len(runes)-tail:])
}
