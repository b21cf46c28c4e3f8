package report

import (
	"cmp"
	"errors"
	"image/color"
	"io"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/kvscout/kvscout/scheduler/internal/policy"
	"github.com/kvscout/kvscout/scheduler/internal/sim"
)

// Colours that people who see colours differently can tell apart.
var (
	black  = color.RGBA{A: 255}
	grey   = color.RGBA{R: 0x8c, G: 0x8c, B: 0x8c, A: 255}
	pale   = color.RGBA{R: 0xdd, G: 0xdd, B: 0xdd, A: 255}
	ours   = color.RGBA{R: 0xd5, G: 0x5e, A: 255}
	limits = color.RGBA{G: 0x9e, B: 0x73, A: 255}
	others = []color.Color{
		color.RGBA{G: 0x72, B: 0xb2, A: 255}, color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 255}, color.RGBA{R: 0xe6, G: 0x9f, A: 255},
		color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 255}, color.RGBA{R: 0x7a, G: 0x52, B: 0x2e, A: 255}, color.RGBA{R: 0x5b, G: 0x3f, B: 0x9d, A: 255},
	}
	dashes = [][]vg.Length{nil, {vg.Points(6), vg.Points(3)}, {vg.Points(2), vg.Points(2)}, {vg.Points(6), vg.Points(2), vg.Points(1), vg.Points(2)}}
)

// Picture draws what each policy came to: times to the first token, hits
// against the ceiling and how evenly the pods were used; of load in stages also the
// curves over its rates.
func Picture(w io.Writer, title string, results []sim.Result) error {
	if len(results) == 0 {
		return errors.New("no results to draw")
	}
	rows := Rows(results)
	slices.Reverse(rows) // the first stands on top
	high := vg.Points(24*float64(len(rows)) + 70)
	top := vg.Points(50)
	var curves []*plot.Plot
	var lines []Line
	if len(rows[0].Stages) > 1 {
		lines = stageLines(rows)
		curves = []*plot.Plot{curve(Panel{Title: "TTFT p90, s", X: "requests a second", Log: true, Lines: lines}), curve(Panel{Title: "output tokens a second", X: "requests a second", Lines: throughput(lines, rows)})}
	}
	total := high + top
	if curves != nil {
		total += stagesHeight
	}
	page := newPage(1000, total, title)
	c := draw.Crop(page.Canvas, 0, 0, total-high-top, -top)
	firstTokens, hits, load := ttftPlot(rows), hitPlot(rows), loadPlot(rows)
	width := c.Max.X - c.Min.X
	firstTokens.Draw(draw.Crop(c, 0, -width*.46, 0, 0))
	hits.Draw(draw.Crop(c, width*.55, -width*.23, 0, 0))
	load.Draw(draw.Crop(c, width*.78, 0, 0, 0))
	if curves != nil {
		drawPanels(draw.Crop(page.Canvas, 0, 0, 0, -high-top), curves, lines)
	}
	return page.write(w)
}

const stagesHeight = vg.Length(330)

// blank is a plot in a font without serifs.
func blank() *plot.Plot {
	p := plot.New()
	for _, style := range []*draw.TextStyle{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		style.Font.Variant = "Sans"
	}
	p.Title.TextStyle.Font.Size = font.Points(11)
	return p
}

// page is a white canvas with a title.
type page struct {
	draw.Canvas
	svg *vgsvg.Canvas
}

func newPage(wide, high vg.Length, title string) page {
	svg := vgsvg.New(wide, high)
	p := page{Canvas: draw.New(svg), svg: svg}
	p.SetColor(color.White)
	p.Fill(p.Path())
	style := blank().Title.TextStyle
	style.Font.Size = font.Points(14)
	style.XAlign, style.YAlign = draw.XCenter, draw.YTop
	p.FillText(style, vg.Point{X: wide / 2, Y: high - vg.Points(10)}, title)
	p.Canvas = draw.Crop(p.Canvas, vg.Points(10), -vg.Points(10), vg.Points(8), 0)
	return p
}

func (p page) write(w io.Writer) error {
	_, err := p.svg.WriteTo(w)
	return err
}

func labels(rows []Row) []string {
	names := make([]string, len(rows))
	for i, r := range rows {
		names[i] = Label(r.Policy)
	}
	return names
}

func colourOf(name string) color.Color {
	switch {
	case name == policy.Default:
		return ours
	case sim.Bound(name):
		return limits
	}
	return grey
}

// floor keeps what is drawn on a logarithmic axis above nothing.
func floor(v float64) float64 { return max(v, 1e-3) }

func ttftPlot(rows []Row) *plot.Plot {
	p := blank()
	p.Title.Text = "TTFT, s:  | p50   ◆ mean   ● p90   ▲ p99"
	logX(p)
	low, high := math.Inf(1), 0.0
	for i, r := range rows {
		y := float64(i)
		whole := must(plotter.NewLine(plotter.XYs{{X: floor(r.TTFTP50), Y: y}, {X: floor(r.TTFTP99), Y: y}}))
		whole.Color, whole.Width = pale, vg.Points(5)
		p.Add(whole)
		for _, mark := range []struct {
			v     float64
			shape draw.GlyphDrawer
		}{{r.TTFTP50, barGlyph{}}, {r.TTFTP90, draw.CircleGlyph{}}, {r.TTFTP99, draw.PyramidGlyph{}}, {r.TTFTMean, diamondGlyph{}}} {
			s := must(plotter.NewScatter(plotter.XYs{{X: floor(mark.v), Y: y}}))
			s.Color, s.Shape, s.Radius = colourOf(r.Policy), mark.shape, vg.Points(4)
			p.Add(s)
			low, high = min(low, floor(mark.v)), max(high, floor(mark.v))
		}
	}
	p.X.Min, p.X.Max = decades(low, high)
	p.NominalY(labels(rows)...)
	p.Y.Min, p.Y.Max = -.6, float64(len(rows))-.4
	return p
}

// decades is the range of a logarithmic axis that holds all from low to high,
// in halves of decades.
func decades(low, high float64) (from, to float64) {
	first, last := math.Floor(2*math.Log10(low)), math.Ceil(2*math.Log10(high))
	return math.Pow(10, first/2), math.Pow(10, max(last, first+1)/2)
}

func hitPlot(rows []Row) *plot.Plot {
	p := blank()
	p.Title.Text = "token hit, ceiling dashed"
	ceiling := 0.0
	for i, r := range rows {
		bar(p, i, r.TokenHit, colourOf(r.Policy))
		ceiling = max(ceiling, r.TokenHitCeiling)
	}
	l := must(plotter.NewLine(plotter.XYs{{X: ceiling, Y: -.6}, {X: ceiling, Y: float64(len(rows)) - .4}}))
	l.Color, l.Dashes = limits, dashes[1]
	p.Add(l)
	bare(p, rows)
	p.X.Min, p.X.Max = 0, max(.05, ceiling*1.2)
	return p
}

func loadPlot(rows []Row) *plot.Plot {
	p := blank()
	p.Title.Text = "load CV of the pods"
	most := .05
	for i, r := range rows {
		bar(p, i, r.LoadCV, colourOf(r.Policy))
		most = max(most, r.LoadCV)
	}
	bare(p, rows)
	p.X.Min, p.X.Max = 0, most*1.25
	return p
}

// bar adds one bar in row i with its value beside it.
func bar(p *plot.Plot, i int, v float64, c color.Color) {
	b := must(plotter.NewBarChart(plotter.Values{v}, vg.Points(13)))
	b.Horizontal, b.XMin, b.Color = true, float64(i), c
	b.LineStyle.Width = 0
	value := must(plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{{X: v, Y: float64(i)}}, Labels: []string{number(v)}}))
	value.TextStyle[0].YAlign = draw.YCenter
	value.TextStyle[0].Font.Variant = "Sans"
	value.TextStyle[0].Font.Size = font.Points(9)
	value.Offset.X = vg.Points(3)
	p.Add(b, value)
}

// bare hides the names, which stand at the first plot of the row.
func bare(p *plot.Plot, rows []Row) {
	p.NominalY(make([]string, len(rows))...)
	p.Y.Min, p.Y.Max = -.6, float64(len(rows))-.4
}

func logX(p *plot.Plot) {
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, ticks{}
}

// ticks of a logarithmic axis: 1, 2 and 5 of each decade.
type ticks struct{}

// Ticks between low and high.
func (ticks) Ticks(low, high float64) []plot.Tick {
	var list []plot.Tick
	for e := math.Floor(math.Log10(low)); e <= math.Ceil(math.Log10(high)); e++ {
		for _, m := range []float64{1, 2, 5} {
			if v := m * math.Pow(10, e); v >= low*.999 && v <= high*1.001 {
				list = append(list, plot.Tick{Value: v, Label: number(v)})
			}
		}
	}
	return list
}

// Panel is one plot of lines.
type Panel struct {
	Title, X string
	Log      bool // the y axis
	Lines    []Line
}

// Line of one policy.
type Line struct {
	Policy string
	X, Y   []float64
}

// Curves draws panels side by side with one legend.
func Curves(w io.Writer, title string, panels ...Panel) error {
	page := newPage(vg.Length(320*len(panels)+190), stagesHeight+40, title)
	var plots []*plot.Plot
	for _, p := range panels {
		plots = append(plots, curve(p))
	}
	drawPanels(draw.Crop(page.Canvas, 0, 0, 0, -36), plots, panels[0].Lines)
	return page.write(w)
}

// drawPanels puts plots side by side and a legend to their right.
func drawPanels(c draw.Canvas, plots []*plot.Plot, lines []Line) {
	const legendWidth = 170
	width := (c.Max.X - c.Min.X - legendWidth) / vg.Length(len(plots))
	for i, p := range plots {
		left := width * vg.Length(i)
		p.Draw(draw.Crop(c, left, -(c.Max.X - c.Min.X - left - width + 12), 0, 0))
	}
	legend := blank().Legend
	legend.Top, legend.Left = true, true
	legend.ThumbnailWidth = vg.Points(26)
	legend.Padding = vg.Points(3)
	for i, l := range lines {
		line, marks := style(l, i)
		legend.Add(Label(l.Policy), line, marks)
	}
	legend.Draw(draw.Crop(c, c.Max.X-c.Min.X-legendWidth+8, 0, 0, -vg.Points(24)))
}

func curve(p Panel) *plot.Plot {
	out := blank()
	out.Title.Text, out.X.Label.Text = p.Title, p.X
	low, high := math.Inf(1), 0.0
	for i, l := range p.Lines {
		line, marks := style(l, i)
		out.Add(line, marks)
		for _, v := range l.Y {
			low, high = min(low, floor(v)), max(high, v)
		}
	}
	out.Y.Min, out.Y.Max = 0, high*1.05
	if p.Log && high > 0 {
		out.Y.Scale, out.Y.Tick.Marker = plot.LogScale{}, ticks{}
		out.Y.Min, out.Y.Max = decades(low, high)
	}
	return out
}

// style is how the i-th line looks: the default and the bounds are the same
// everywhere.
func style(l Line, i int) (*plotter.Line, *plotter.Scatter) {
	points := make(plotter.XYs, len(l.X))
	for j := range l.X {
		points[j] = plotter.XY{X: l.X[j], Y: floor(l.Y[j])}
	}
	slices.SortFunc(points, func(a, b plotter.XY) int { return cmp.Compare(a.X, b.X) })
	line, marks := must(plotter.NewLine(points)), must(plotter.NewScatter(points))
	line.Width, marks.Radius = vg.Points(1.3), vg.Points(2.5)
	shapes := []draw.GlyphDrawer{draw.CircleGlyph{}, draw.SquareGlyph{}, draw.TriangleGlyph{}, draw.PlusGlyph{}}
	line.Color, line.Dashes, marks.Shape = others[i%len(others)], dashes[i/len(others)%len(dashes)], shapes[i%len(shapes)]
	switch {
	case l.Policy == policy.Default:
		line.Color, line.Width, line.Dashes, marks.Shape = ours, vg.Points(2.8), nil, diamondGlyph{}
	case sim.Bound(l.Policy):
		line.Color, line.Dashes, marks.Shape = limits, dashes[1], draw.CircleGlyph{}
		switch l.Policy {
		case sim.CapacityOracle:
			line.Dashes = dashes[2]
		case sim.PooledLRU:
			line.Dashes = dashes[3]
		}
	case l.Policy == sim.LeastTokens:
		line.Color, line.Dashes, line.Width = black, nil, vg.Points(1.8)
	}
	marks.Color = line.Color
	return line, marks
}

func stageLines(rows []Row) []Line {
	var lines []Line
	for _, r := range slices.Backward(rows) {
		l := Line{Policy: r.Policy}
		for _, s := range merge(r.Stages) {
			l.X, l.Y = append(l.X, s.QPS), append(l.Y, s.TTFTP90)
		}
		lines = append(lines, l)
	}
	return lines
}

// merge leaves the last stage of each rate: what came before it warmed up.
func merge(stages []sim.Stage) []sim.Stage {
	var out []sim.Stage
	for i, s := range stages {
		if !slices.ContainsFunc(stages[i+1:], func(o sim.Stage) bool { return o.QPS == s.QPS }) && s.Requests > 0 && (i > 0 || len(stages) < 3 || stages[1].QPS > s.QPS) {
			out = append(out, s)
		}
	}
	return out
}

func throughput(lines []Line, rows []Row) []Line {
	out := slices.Clone(lines)
	for i := range out {
		out[i].Y = nil
		for _, s := range merge(rows[len(rows)-1-i].Stages) {
			out[i].Y = append(out[i].Y, s.Throughput)
		}
	}
	return out
}

// diamondGlyph stands for a mean, barGlyph for a median.
type diamondGlyph struct{}

// DrawGlyph draws a filled diamond.
func (diamondGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	c.SetColor(s.Color)
	r := s.Radius * 1.25
	var p vg.Path
	p.Move(vg.Point{X: at.X, Y: at.Y + r})
	p.Line(vg.Point{X: at.X + r, Y: at.Y})
	p.Line(vg.Point{X: at.X, Y: at.Y - r})
	p.Line(vg.Point{X: at.X - r, Y: at.Y})
	p.Close()
	c.Fill(p)
}

type barGlyph struct{}

// DrawGlyph draws an upright stroke.
func (barGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	c.SetLineStyle(draw.LineStyle{Color: s.Color, Width: vg.Points(2.5)})
	var p vg.Path
	p.Move(vg.Point{X: at.X, Y: at.Y - s.Radius*1.4})
	p.Line(vg.Point{X: at.X, Y: at.Y + s.Radius*1.4})
	c.Stroke(p)
}

// must is for plotters, which refuse only what is no number.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
