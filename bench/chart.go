package main

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"
)

// chart is a drawing of lines, or of bars.
type chart struct {
	Title, X, Y string
	Text        string // what to see in it
	LogX, LogY  bool
	Lines       []line
	Bars        []bar
}

type line struct {
	Name   string
	Points []point
}

type point struct{ X, Y float64 }

// bar has whiskers from Low to High.
type bar struct {
	Name             string
	Value, Low, High float64
	Text             string // beside the value
}

// Measures of a drawing.
const (
	chartWidth, chartHeight               = 720, 360
	leftEdge, rightEdge, topEdge, lowEdge = 70, 160, 16, 46
	barHeight, barNames                   = 34, 210
)

// colours belong to contenders, so that one has the same in every chart.
var colours = map[string]string{
	"metered": "#2563eb", "floor": "#6b7280", "locked floor": "#a1a1aa", "early": "#059669", "seed": "#ea580c",
}

var spareColours = []string{"#9333ea", "#0891b2", "#ca8a04", "#be123c", "#4d7c0f", "#7c3aed"}

func colour(name string, i int) string {
	if c, ok := colours[name]; ok {
		return c
	}
	return spareColours[i%len(spareColours)]
}

// SVG draws the chart.
func (c chart) SVG() template.HTML {
	if len(c.Bars) > 0 {
		return template.HTML(c.bars())
	}
	return template.HTML(c.lines())
}

// scale maps a range of values to a range of pixels.
type scale struct {
	log      bool
	from, to float64 // values
	a, b     float64 // pixels
}

func (s scale) at(v float64) float64 {
	from, to := s.from, s.to
	if s.log {
		v, from, to = math.Log10(v), math.Log10(from), math.Log10(to)
	}
	if to == from {
		return s.a
	}
	return s.a + (v-from)/(to-from)*(s.b-s.a)
}

// ticks are round values within the scale, and its ends where it is logarithmic.
func (s scale) ticks() []float64 {
	var out []float64
	if s.log {
		for v := math.Pow(10, math.Floor(math.Log10(s.from))); v <= s.to*1.001; v *= 10 {
			if v >= s.from*0.999 {
				out = append(out, v)
			}
		}
		return out
	}
	step := math.Pow(10, math.Floor(math.Log10((s.to-s.from)/4)))
	for _, m := range []float64{2, 5, 10} {
		if (s.to-s.from)/step > 6 {
			step = m * math.Pow(10, math.Floor(math.Log10((s.to-s.from)/4)))
		}
	}
	for v := math.Ceil(s.from/step) * step; v <= s.to*1.001; v += step {
		out = append(out, v)
	}
	return out
}

// xTicks are the places where something was measured.
func (c chart) xTicks() []float64 {
	var out []float64
	for _, l := range c.Lines {
		for _, p := range l.Points {
			out = append(out, p.X)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// scales fit all points. A logarithmic scale runs between powers of ten, so it needs
// values above 0.
func (c chart) scales() (x, y scale) {
	x = scale{log: c.LogX, from: math.Inf(1), to: math.Inf(-1), a: leftEdge, b: chartWidth - rightEdge}
	y = scale{log: c.LogY, to: math.Inf(-1), a: chartHeight - lowEdge, b: topEdge}
	least := math.Inf(1)
	for _, l := range c.Lines {
		for _, p := range l.Points {
			x.from, x.to = min(x.from, p.X), max(x.to, p.X)
			y.to, least = max(y.to, p.Y), min(least, p.Y)
		}
	}
	if c.LogY {
		y.from = math.Pow(10, math.Floor(math.Log10(least)))
		y.to = math.Pow(10, math.Ceil(math.Log10(y.to)))
	} else {
		y.to *= 1.05
	}
	return x, y
}

func (c chart) lines() string {
	if len(c.xTicks()) == 0 {
		return ""
	}
	x, y := c.scales()
	s := &svg{}
	s.open(chartWidth, chartHeight, c.Title)
	for _, v := range y.ticks() {
		s.add(`<line class="grid" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/>`, leftEdge, chartWidth-rightEdge, y.at(v), y.at(v))
		s.text(leftEdge-8, y.at(v)+4, "end", short(v))
	}
	for _, v := range c.xTicks() {
		s.text(x.at(v), chartHeight-lowEdge+18, "middle", short(v))
	}
	s.add(`<line class="axis" x1="%d" x2="%d" y1="%d" y2="%d"/>`, leftEdge, chartWidth-rightEdge, chartHeight-lowEdge, chartHeight-lowEdge)
	s.text((leftEdge+chartWidth-rightEdge)/2, chartHeight-8, "middle", c.X)
	s.add(`<text transform="translate(14 %d) rotate(-90)" text-anchor="middle">%s</text>`, (topEdge+chartHeight-lowEdge)/2, escape(c.Y))
	var labels []float64
	for i, l := range c.Lines {
		var path strings.Builder
		for _, p := range l.Points {
			fmt.Fprintf(&path, "%.1f,%.1f ", x.at(p.X), y.at(p.Y))
			s.add(`<circle cx="%.1f" cy="%.1f" r="3" fill="%s"><title>%s: %s at %s</title></circle>`,
				x.at(p.X), y.at(p.Y), colour(l.Name, i), escape(l.Name), short(p.Y), short(p.X))
		}
		s.add(`<polyline fill="none" stroke-width="2" stroke="%s" points="%s"/>`, colour(l.Name, i), path.String())
		if len(l.Points) > 0 {
			last := l.Points[len(l.Points)-1]
			at := apart(labels, y.at(last.Y))
			labels = append(labels, at)
			s.add(`<text x="%.1f" y="%.1f" fill="%s">%s</text>`, x.at(last.X)+10, at+4, colour(l.Name, i), escape(l.Name))
		}
	}
	return s.close()
}

// apart is the place nearest to y where a label does not cover another.
func apart(taken []float64, y float64) float64 {
	for d := 0.0; d < chartHeight; d++ {
		for _, at := range []float64{y - d, y + d} {
			if !slices.ContainsFunc(taken, func(t float64) bool { return math.Abs(t-at) < 15 }) {
				return at
			}
		}
	}
	return y
}

func (c chart) bars() string {
	height := len(c.Bars)*barHeight + 40
	most := 0.0
	for _, b := range c.Bars {
		most = max(most, b.High, b.Value)
	}
	x := scale{to: most, a: barNames, b: chartWidth - 90}
	s := &svg{}
	s.open(chartWidth, height, c.Title)
	for i, b := range c.Bars {
		y := float64(i*barHeight + 8)
		s.text(barNames-8, y+15, "end", b.Name)
		s.add(`<rect x="%d" y="%.1f" width="%.1f" height="20" fill="%s"><title>%s</title></rect>`,
			barNames, y, x.at(b.Value)-barNames, colour(strings.SplitN(b.Name, ",", 2)[0], i), escape(b.Name+": "+b.Text))
		s.add(`<line class="axis" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, x.at(b.Low), x.at(b.High), y+10, y+10)
		s.text(max(x.at(b.High), x.at(b.Value))+6, y+15, "start", short(b.Value))
	}
	s.text((barNames+chartWidth)/2, float64(height-10), "middle", c.X)
	return s.close()
}

// svg writes elements.
type svg struct{ strings.Builder }

func (s *svg) add(format string, args ...any) { fmt.Fprintf(s, format+"\n", args...) }

func (s *svg) open(width, height int, title string) {
	s.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" aria-label="%s">`, width, height, escape(title))
}

func (s *svg) text(x, y float64, anchor, text string) {
	s.add(`<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`, x, y, anchor, escape(text))
}

func (s *svg) close() string {
	s.add("</svg>")
	return s.String()
}

func escape(s string) string { return template.HTMLEscapeString(s) }

// short is a number for an axis: 1.5k, 2M.
func short(v float64) string {
	for _, unit := range []struct {
		name string
		of   float64
	}{{"M", 1e6}, {"k", 1e3}} {
		if math.Abs(v) >= unit.of {
			return fmt.Sprintf("%.3g%s", v/unit.of, unit.name)
		}
	}
	return fmt.Sprintf("%.3g", v)
}
