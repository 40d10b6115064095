package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"
)

// series is the rate of one contender, in operations a second, in slices of the same length.
type series struct {
	name, color string
	rates       []float64
}

// The plot's size and the ground that its curves have, in pixels.
const (
	plotWidth, plotHeight                  = 720, 320
	plotLeft, plotTop, plotRight, plotFoot = 60, 44, 150, 48
)

// plotFile writes the plot of some rates that were measured side by side during length.
func plotFile(path, title string, length time.Duration, all []series) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		if failed := f.Close(); err == nil {
			err = failed
		}
	}()
	return plot(f, title, length, all)
}

// plot draws one curve for each of the series, over the minutes of length. Both colours and the grey of the text
// can be read on a white page and on a dark one.
func plot(w io.Writer, title string, length time.Duration, all []series) error {
	top := 0.0
	for _, s := range all {
		if len(s.rates) < 2 {
			return fmt.Errorf("%s was measured %d times, and a curve needs 2", s.name, len(s.rates))
		}
		for _, r := range smooth(s.rates) {
			top = max(top, r)
		}
	}
	step := gridStep(top)
	top = math.Ceil(top/step) * step
	wide, high := float64(plotWidth-plotLeft-plotRight), float64(plotHeight-plotTop-plotFoot)
	y := func(rate float64) float64 { return plotTop + high*(1-rate/top) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12" fill="#888">`+"\n", plotWidth, plotHeight)
	fmt.Fprintf(&b, "<title>%s</title>\n<text x=\"%d\" y=\"20\" font-size=\"14\">%[1]s</text>\n", text(title), plotLeft)
	for rate := 0.0; rate <= top+step/2; rate += step {
		fmt.Fprintf(&b, `<line x1="%d" x2="%.0f" y1="%.1f" y2="%.1[3]f" stroke="#8884"/><text x="%d" y="%.1f" text-anchor="end">%.0f/s</text>`+"\n",
			plotLeft, plotLeft+wide, y(rate), plotLeft-6, y(rate)+4, rate)
	}
	for i := range 6 {
		part := float64(i) / 5
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%.3g min</text>`+"\n", plotLeft+part*wide, plotHeight-plotFoot+20, part*length.Minutes())
	}
	for _, s := range all {
		rates := smooth(s.rates)
		fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="2" points="`, s.color)
		for i, r := range rates {
			fmt.Fprintf(&b, "%.1f,%.1f ", plotLeft+wide*float64(i)/float64(len(rates)-1), y(r))
		}
		fmt.Fprintf(&b, `"/><text x="%.0f" y="%.1f" fill="%s">%s</text>`+"\n", plotLeft+wide+8, y(rates[len(rates)-1])+4, s.color, text(s.name))
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d">minutes since another session opened a snapshot</text>`+"\n</svg>\n", plotLeft, plotHeight-8)
	_, err := io.WriteString(w, b.String())
	return err
}

// smooth is the mean of each rate and of its two neighbours.
func smooth(rates []float64) []float64 {
	out := make([]float64, len(rates))
	for i := range rates {
		near := rates[max(i-1, 0):min(i+2, len(rates))]
		for _, r := range near {
			out[i] += r / float64(len(near))
		}
	}
	return out
}

// gridStep is 1, 2 or 5 times a power of ten, so that at most five lines lie below top.
func gridStep(top float64) float64 {
	step := math.Pow(10, math.Floor(math.Log10(max(top, 1)/5)))
	for _, times := range []float64{1, 2, 5} {
		if top/(step*times) <= 5 {
			return step * times
		}
	}
	return 10 * step
}

func text(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder refuses nothing
	return b.String()
}
