package console

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// theme are the colours of a drawing. They are those of console.css.
type theme struct{ text, faint, grid, accent, fill, limit, held, captured, released, expired color.Color }

var (
	lightTheme = theme{
		text: rgb(0x1b2330), faint: rgb(0x5b6676), grid: rgb(0xe3e7ee), accent: rgb(0x2f5fd0), fill: rgb(0xdfe8fb), limit: rgb(0xc02f3d),
		held: rgb(0xc98a12), captured: rgb(0x2f5fd0), released: rgb(0x8590a2), expired: rgb(0xc02f3d),
	}
	darkTheme = theme{
		text: rgb(0xe6eaf2), faint: rgb(0x9aa6b8), grid: rgb(0x2b3342), accent: rgb(0x7ea6ff), fill: rgb(0x22345c), limit: rgb(0xff7b86),
		held: rgb(0xe8b04a), captured: rgb(0x7ea6ff), released: rgb(0x768297), expired: rgb(0xff7b86),
	}
)

func rgb(hex uint32) color.Color {
	return color.RGBA{R: uint8(hex >> 16), G: uint8(hex >> 8), B: uint8(hex), A: 255}
}

// look is how a drawing is wanted: for a dark page or a light one, for a phone or a desk.
type look struct{ dark, narrow bool }

func (l look) theme() theme {
	if l.dark {
		return darkTheme
	}
	return lightTheme
}

func (l look) width() vg.Length {
	if l.narrow {
		return 380
	}
	return 940
}

// usagePlot is what counted against a limit, over time.
type usagePlot struct {
	points []usagePoint // in the order of time
	limit  int64
	name   string // of the limit
	zone   *time.Location
}

type usagePoint struct {
	At   time.Time
	Used int64
}

// svg draws the plot.
func (u usagePlot) svg(l look) ([]byte, error) {
	t := l.theme()
	from, to := u.points[0].At, u.points[len(u.points)-1].At
	p := newPlot(l, from, to, u.zone)
	xys := make(plotter.XYs, len(u.points))
	lowest, highest := 0.0, math.Max(float64(u.limit), 1)
	for i, at := range u.points {
		xys[i] = plotter.XY{X: seconds(at.At), Y: float64(at.Used)}
		lowest, highest = math.Min(lowest, xys[i].Y), math.Max(highest, xys[i].Y)
	}
	area := plotter.Line{XYs: xys, FillColor: t.fill, LineStyle: draw.LineStyle{Color: t.accent, Width: 1.6}}
	x := []float64{seconds(from), seconds(to)}
	line := plotter.Line{
		XYs:       plotter.XYs{{X: x[0], Y: float64(u.limit)}, {X: x[1], Y: float64(u.limit)}},
		LineStyle: draw.LineStyle{Color: t.limit, Width: 1.4, Dashes: []vg.Length{6, 4}},
	}
	label := &plotter.Labels{
		XYs:    plotter.XYs{{X: x[1], Y: float64(u.limit)}},
		Labels: []string{u.name + " " + strings.ReplaceAll(number(u.limit), "\u202f", " ")}, // the renderer's font has no such space
		Offset: vg.Point{X: -4, Y: 4},
	}
	style := p.X.Tick.Label
	style.Color, style.XAlign, style.YAlign = t.limit, draw.XRight, draw.YBottom
	label.TextStyle = []draw.TextStyle{style}
	p.Y.Min, p.Y.Max = lowest, highest+(highest-lowest)*0.14 // room for the label
	p.Y.Tick.Marker = amounts{}
	grid := &plotter.Grid{Horizontal: draw.LineStyle{Color: t.grid, Width: 0.8}}
	p.Add(grid, &area, &line, label)
	return drawn(p, l.width(), 240)
}

// timeline is when holds began and ended.
type timeline struct {
	holds    []bar // newest first
	from, to time.Time
	zone     *time.Location
}

type bar struct {
	name     string
	state    string
	from, to time.Time
}

// svg draws the timeline: a bar for each hold.
func (tl timeline) svg(l look) ([]byte, error) {
	t := l.theme()
	p := newPlot(l, tl.from, tl.to, tl.zone)
	n := len(tl.holds)
	p.Y.Min, p.Y.Max = -0.6, float64(n)-0.4
	var names []plot.Tick
	for i, s := range tl.holds {
		names = append(names, plot.Tick{Value: float64(n - 1 - i), Label: shorten(s.name, l)})
	}
	p.Y.Tick.Marker = plot.ConstantTicks(names)
	p.Add(&plotter.Grid{Vertical: draw.LineStyle{Color: t.grid, Width: 0.8}}, bars{timeline: tl, theme: t})
	const row, edges = 17, 44
	return drawn(p, l.width(), vg.Length(row*n+edges))
}

// shorten keeps the end of a hold's id, which differs most.
func shorten(name string, l look) string {
	most := 26
	if l.narrow {
		most = 10
	}
	if r := []rune(name); len(r) > most {
		return "…" + string(r[len(r)-most+1:])
	}
	return name
}

// bars draw the spans of a timeline.
type bars struct {
	timeline
	theme theme
}

func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	colours := map[string]color.Color{"held": b.theme.held, "captured": b.theme.captured, "released": b.theme.released, "expired": b.theme.expired}
	for i, s := range b.holds {
		left, right := x(max(seconds(s.from), p.X.Min)), x(min(seconds(s.to), p.X.Max))
		middle := y(float64(len(b.holds) - 1 - i))
		const half, least = 5, 2
		right = max(right, left+least)
		colour, ok := colours[s.state]
		if !ok {
			colour = b.theme.released
		}
		c.FillPolygon(colour, []vg.Point{
			{X: left, Y: middle - half}, {X: right, Y: middle - half}, {X: right, Y: middle + half}, {X: left, Y: middle + half},
		})
	}
}

// newPlot is a plot with an axis of time.
func newPlot(l look, from, to time.Time, zone *time.Location) *plot.Plot {
	t := l.theme()
	p := plot.New()
	p.BackgroundColor = color.Transparent
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Color, a.Tick.Color = t.grid, t.grid
		a.Tick.Label.Color = t.faint
		a.Tick.Label.Font.Variant = "Sans"
		a.Tick.Label.Font.Size = 11
		a.Padding = 4
	}
	p.Y.LineStyle.Width, p.Y.Tick.LineStyle.Width = 0, 0
	p.X.Min, p.X.Max = seconds(from), seconds(to)
	p.X.Tick.Marker = clock{zone: zone, most: map[bool]int{true: 4, false: 8}[l.narrow]}
	return p
}

// drawn renders a plot. The fonts of the renderer are not everywhere, but others of the same measures are.
func drawn(p *plot.Plot, width, height vg.Length) ([]byte, error) {
	canvas := vgsvg.New(width, height)
	const edge = 10 // half of a mark's label may stand beyond the axis
	p.Draw(draw.Crop(draw.New(canvas), 0, -edge, 0, 0))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, err
	}
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"),
		[]byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")), nil
}

func seconds(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

// clock marks an axis of time, where clocks and calendars have their marks.
type clock struct {
	zone *time.Location
	most int // marks
}

type pace struct {
	every  time.Duration
	layout string
}

// label is that of a mark. At midnight a day begins.
func (p pace) label(at time.Time) string {
	if p.every >= time.Hour && p.every < day && at.Hour() == 0 {
		return at.Format("Jan 2")
	}
	return at.Format(p.layout)
}

var paces = []pace{
	{time.Second, "15:04:05"}, {5 * time.Second, "15:04:05"}, {15 * time.Second, "15:04:05"}, {time.Minute, "15:04"}, {5 * time.Minute, "15:04"},
	{10 * time.Minute, "15:04"}, {30 * time.Minute, "15:04"}, {time.Hour, "15:04"}, {3 * time.Hour, "15:04"}, {6 * time.Hour, "15:04"},
	{12 * time.Hour, "15:04"}, {24 * time.Hour, "Jan 2"}, {48 * time.Hour, "Jan 2"}, {7 * 24 * time.Hour, "Jan 2"},
	{28 * 24 * time.Hour, "Jan 2006"}, {91 * 24 * time.Hour, "Jan 2006"}, {365 * 24 * time.Hour, "2006"},
}

func (c clock) Ticks(from, to float64) []plot.Tick {
	pace := paces[len(paces)-1]
	for _, p := range paces {
		if (to-from)/p.every.Seconds() <= float64(c.most) {
			pace = p
			break
		}
	}
	for (to-from)/pace.every.Seconds() > float64(c.most) {
		pace.every *= 2
	}
	begin := time.UnixMicro(int64(from * 1e6)).In(c.zone)
	_, offset := begin.Zone()
	at := begin.Add(time.Duration(offset) * time.Second).Truncate(pace.every).Add(-time.Duration(offset) * time.Second)
	step := func() { at = at.Add(pace.every) }
	if pace.every >= day { // not all days have 24 hours
		year, month, date := begin.Date()
		at = time.Date(year, month, date, 0, 0, 0, 0, c.zone)
		step = func() { at = at.AddDate(0, 0, int(pace.every/day)) }
	}
	var ticks []plot.Tick
	for ; seconds(at) <= to; step() {
		if seconds(at) >= from {
			ticks = append(ticks, plot.Tick{Value: seconds(at), Label: pace.label(at.In(c.zone))})
		}
	}
	return ticks
}

// amounts marks an axis of units.
type amounts struct{}

func (amounts) Ticks(from, to float64) []plot.Tick {
	step := math.Pow(10, math.Floor(math.Log10((to-from)/2)))
	for _, times := range []float64{5, 2} {
		if (to-from)/(step*times) >= 3 {
			step *= times
			break
		}
	}
	step = math.Max(step, 1) // units are whole
	var ticks []plot.Tick
	for v := math.Ceil(from/step) * step; v <= to; v += step {
		ticks = append(ticks, plot.Tick{Value: v, Label: brief(v)})
	}
	return ticks
}

// brief is a number of few digits.
func brief(v float64) string {
	for _, unit := range []struct {
		size float64
		name string
	}{{1e15, "P"}, {1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if math.Abs(v) >= unit.size {
			return fmt.Sprintf("%.4g %s", v/unit.size, unit.name)
		}
	}
	return fmt.Sprintf("%.4g", v)
}
