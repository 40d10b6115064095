package console

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"strings"
	"time"
)

// theme are the colours of a drawing. They are those of console.css.
type theme struct{ faint, grid, accent, fill, limit, held, captured, released, expired string }

var (
	lightTheme = theme{
		faint: "#5B6676", grid: "#E3E7EE", accent: "#2F5FD0", fill: "#DFE8FB", limit: "#C02F3D",
		held: "#C98A12", captured: "#2F5FD0", released: "#8590A2", expired: "#C02F3D",
	}
	darkTheme = theme{
		faint: "#9AA6B8", grid: "#2B3342", accent: "#7EA6FF", fill: "#22345C", limit: "#FF7B86",
		held: "#E8B04A", captured: "#7EA6FF", released: "#768297", expired: "#FF7B86",
	}
)

// look is how a drawing is wanted: for a dark page or a light one, for a phone or a desk.
type look struct{ dark, narrow bool }

func (l look) theme() theme {
	if l.dark {
		return darkTheme
	}
	return lightTheme
}

func (l look) width() float64 {
	if l.narrow {
		return 380
	}
	return 940
}

// tick is a mark of an axis.
type tick struct {
	Value float64
	Label string
}

// canvas is an SVG in the making, whose plane has an axis of time and one of values.
type canvas struct {
	bytes.Buffer
	theme                    theme
	left, right, top, bottom float64 // of the plane, in pixels
	x0, x1, y0, y1           float64 // its values there
}

const fontSize = 11

// newCanvas draws the marks of both axes. Times are in seconds since 1970.
func newCanvas(l look, height, from, to, low, high float64, times, values []tick) *canvas {
	c := &canvas{theme: l.theme(), top: 6, right: l.width() - 18, bottom: height - 2*fontSize,
		x0: from, x1: to, y0: low, y1: high}
	widest := 0
	for _, t := range values {
		widest = max(widest, len([]rune(t.Label)))
	}
	c.left = float64(widest)*fontSize*0.6 + 12
	fmt.Fprintf(c, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %[1]g %[2]g" font-family="Arial,Helvetica,sans-serif" font-size="%d">`,
		l.width(), height, fontSize)
	c.line(c.left, c.bottom, c.right, c.bottom, c.theme.grid, "")
	for _, t := range times {
		c.line(c.x(t.Value), c.bottom, c.x(t.Value), c.bottom+4, c.theme.grid, "")
		c.text(c.x(t.Value), c.bottom+4+fontSize, "middle", c.theme.faint, t.Label)
	}
	for _, t := range values {
		c.text(c.left-6, c.y(t.Value)+4, "end", c.theme.faint, t.Label)
	}
	return c
}

func (c *canvas) x(v float64) float64 { return c.left + (v-c.x0)/(c.x1-c.x0)*(c.right-c.left) }
func (c *canvas) y(v float64) float64 { return c.bottom - (v-c.y0)/(c.y1-c.y0)*(c.bottom-c.top) }

func (c *canvas) line(x0, y0, x1, y1 float64, colour, dashes string) {
	fmt.Fprintf(c, `<path d="M%.1f %.1fL%.1f %.1f" stroke="%s" stroke-dasharray="%s"/>`, x0, y0, x1,
		y1, colour, dashes)
}

func (c *canvas) text(x, y float64, anchor, colour, text string) {
	fmt.Fprintf(c, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s">`, x, y, anchor, colour)
	_ = xml.EscapeText(c, []byte(text)) // a buffer takes all
	c.WriteString("</text>")
}

func (c *canvas) done() []byte {
	c.WriteString("</svg>")
	return c.Bytes()
}

// usagePlot is the usage of a limit over time.
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
func (u usagePlot) svg(l look) []byte {
	from, to := seconds(u.points[0].At), seconds(u.points[len(u.points)-1].At)
	lowest, highest := 0.0, 1.0
	for _, at := range u.points {
		lowest, highest = math.Min(lowest, float64(at.Used)), math.Max(highest, float64(at.Used))
	}
	// A limit far above the curve, which would be a flat line, is out of the picture.
	beyond := highest > 1 && float64(u.limit) > 10*(highest-lowest)
	if !beyond {
		highest = math.Max(highest, float64(u.limit))
	}
	highest += (highest - lowest) * 0.14 // room for the label
	values := amounts(lowest, highest)
	c := newCanvas(l, 240, from, to, lowest, highest, clockOf(l, u.zone).Ticks(from, to), values)
	for _, t := range values {
		c.line(c.left, c.y(t.Value), c.right, c.y(t.Value), c.theme.grid, "")
	}
	var curve strings.Builder
	for _, at := range u.points {
		fmt.Fprintf(&curve, " %.1f,%.1f", c.x(seconds(at.At)), c.y(float64(at.Used)))
	}
	zero := c.y(max(lowest, 0))
	fmt.Fprintf(c, `<polygon points="%.1f,%.1f%s %.1f,%.1[2]f" fill="%[5]s"/><polyline points="%[3]s" fill="none" stroke="%[6]s" stroke-width="1.6"/>`,
		c.left, zero, curve.String(), c.right, c.theme.fill, c.theme.accent)
	label, at := u.name+" "+strings.ReplaceAll(number(u.limit), "\u202f", " "),
		c.y(float64(u.limit))-4
	if beyond {
		label, at = label+", far above", c.top+fontSize
	} else {
		c.line(c.left, at+4, c.right, at+4, c.theme.limit, "6 4")
	}
	c.text(c.right-4, at, "end", c.theme.limit, label)
	return c.done()
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
func (tl timeline) svg(l look) []byte {
	from, to := seconds(tl.from), seconds(tl.to)
	n := len(tl.holds)
	names := make([]tick, n)
	for i, s := range tl.holds {
		names[i] = tick{float64(n - 1 - i), shorten(s.name, l)}
	}
	const row, edges = 17, 44
	times := clockOf(l, tl.zone).Ticks(from, to)
	c := newCanvas(l, float64(row*n+edges), from, to, -0.6, float64(n)-0.4, times, names)
	for _, t := range times {
		c.line(c.x(t.Value), c.top, c.x(t.Value), c.bottom, c.theme.grid, "")
	}
	colours := map[string]string{"held": c.theme.held, "captured": c.theme.captured,
		"released": c.theme.released, "expired": c.theme.expired}
	for i, s := range tl.holds {
		left, right := c.x(max(seconds(s.from), from)), c.x(min(seconds(s.to), to))
		colour, ok := colours[s.state]
		if !ok {
			colour = c.theme.released
		}
		fmt.Fprintf(c, `<rect x="%.1f" y="%.1f" width="%.1f" height="10" fill="%s"/>`, left,
			c.y(names[i].Value)-5, max(right-left, 2), colour)
	}
	return c.done()
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

func seconds(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

func clockOf(l look, zone *time.Location) clock {
	return clock{zone: zone, most: map[bool]int{true: 4, false: 8}[l.narrow]}
}

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
	{time.Second, "15:04:05"}, {5 * time.Second, "15:04:05"}, {15 * time.Second, "15:04:05"},
	{time.Minute, "15:04"}, {5 * time.Minute, "15:04"},
	{10 * time.Minute, "15:04"}, {30 * time.Minute, "15:04"}, {time.Hour, "15:04"},
	{3 * time.Hour, "15:04"}, {6 * time.Hour, "15:04"},
	{12 * time.Hour, "15:04"}, {24 * time.Hour, "Jan 2"}, {48 * time.Hour, "Jan 2"},
	{7 * 24 * time.Hour, "Jan 2"},
	{28 * 24 * time.Hour, "Jan 2006"}, {91 * 24 * time.Hour, "Jan 2006"},
	{365 * 24 * time.Hour, "2006"},
}

func (c clock) Ticks(from, to float64) []tick {
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
	var ticks []tick
	for ; seconds(at) <= to; step() {
		if seconds(at) >= from {
			ticks = append(ticks, tick{seconds(at), pace.label(at.In(c.zone))})
		}
	}
	return ticks
}

// amounts marks an axis of units.
func amounts(from, to float64) []tick {
	step := math.Pow(10, math.Floor(math.Log10((to-from)/2)))
	for _, times := range []float64{5, 2} {
		if (to-from)/(step*times) >= 3 {
			step *= times
			break
		}
	}
	step = math.Max(step, 1) // units are whole
	var ticks []tick
	for v := math.Ceil(from/step) * step; v <= to; v += step {
		ticks = append(ticks, tick{v, brief(v)})
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
