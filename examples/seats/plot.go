package main

import (
	"net/http"
	"strconv"

	"github.com/go-analyze/charts"
)

// plotted are the bars of a plot, with a name and values each.
type plotted struct {
	title  string
	names  []string
	values []tally
}

// bySection has a bar for each section, as it is now.
func (p *report) bySection() plotted {
	b := plotted{title: "Seats by section, now"}
	for _, s := range p.Sections {
		b.names, b.values = append(b.names, s.Name), append(b.values, s.Now)
	}
	return b
}

// byHour has a bar for each hour: the seats that became sold, held and blocked in it.
func (p *report) byHour() plotted {
	b := plotted{title: "Seats by hour (UTC), all sections", values: make([]tally, len(p.Hours))}
	if len(p.Sections) == 1 {
		b.title = "Seats by hour (UTC), " + p.Sections[0].Name
	}
	layout := "15h"
	if len(p.Hours) > defaultHours {
		layout = "Jan 2 15h"
	}
	for i, hour := range p.Hours {
		b.names = append(b.names, hour.Format(layout))
		for _, s := range p.Sections {
			b.values[i] = b.values[i].plus(s.Hours[i])
		}
	}
	return b
}

// colours of sold, held and blocked seats.
var colours = []charts.Color{charts.ColorFromHex("#3557d5"), charts.ColorFromHex("#e0a92e"), charts.ColorFromHex("#7c8494")}

// svg draws the bars.
func (b plotted) svg(dark bool) ([]byte, error) {
	theme := charts.GetTheme(charts.ThemeLight)
	if dark {
		theme = charts.GetTheme(charts.ThemeDark)
	}
	series := make([][]float64, 3)
	for _, n := range b.values {
		for i, v := range []int{n.Sold, n.Held, n.Blocked} {
			series[i] = append(series[i], float64(v))
		}
	}
	opt := charts.NewBarChartOptionWithData(series)
	opt.Theme = theme.WithSeriesColors(colours)
	opt.StackSeries = charts.Ptr(true)
	opt.Title.Text = b.title
	opt.Legend.SeriesNames = []string{"sold", "held", "blocked"}
	opt.Legend.Offset = charts.OffsetRight
	opt.CategoryAxis.Labels = b.names
	opt.ValueFormatter = func(v float64) string { return strconv.Itoa(int(v)) }
	opt.CategoryAxis.BoundaryGap = charts.Ptr(true) // a name is below its bar
	opt.CategoryAxis.LabelFontStyle.FontSize = 10
	if opt.CategoryAxis.LabelCount = len(b.names); len(b.names) > defaultHours {
		opt.CategoryAxis.LabelCount = maxHours / 24
	}
	p := charts.NewPainter(charts.PainterOptions{OutputFormat: charts.ChartOutputSVG, Width: 1000, Height: 360})
	if err := p.BarChart(opt); err != nil {
		return nil, err
	}
	return p.Bytes()
}

// servePlot draws a report. The drawing has styles of its own, and nothing else.
func (a *app) servePlot(w http.ResponseWriter, r *request) error {
	p, err := a.reported(r)
	if err != nil {
		return err
	}
	b := p.bySection()
	switch r.URL.Query().Get("by") {
	case "section":
	case "hour":
		b = p.byHour()
	default:
		return badRequest("a plot is by section or by hour")
	}
	drawing, err := b.svg(r.URL.Query().Get("theme") == "dark")
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "image/svg+xml")
	w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
	_, _ = w.Write(drawing) // it fails if the client has gone
	return nil
}
