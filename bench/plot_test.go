package main

import (
	"encoding/xml"
	"errors"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A plot is XML, and has a curve for each contender with a point for each slice, within its ground.
func TestPlot_HasACurveForEach(t *testing.T) {
	var b strings.Builder
	require.NoError(t, plot(&b, "a < b", 10*time.Minute, []series{
		{"charges", "#2a7", []float64{900, 910, 905, 900}}, {"a row & a half", "#d63", []float64{1700, 600, 250, 160}}}))
	d := xml.NewDecoder(strings.NewReader(b.String()))
	var curves []string
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if e, is := token.(xml.StartElement); is && e.Name.Local == "polyline" {
			for _, a := range e.Attr {
				if a.Name.Local == "points" {
					curves = append(curves, a.Value)
				}
			}
		}
	}
	require.Equal(t, []string{"60.0,134.4 230.0,134.4 400.0,134.4 570.0,134.8 ", "60.0,97.2 230.0,142.8 400.0,220.8 570.0,240.8 "}, curves)
	require.Len(t, regexp.MustCompile(`/s</text>`).FindAllString(b.String(), -1), 4)
	require.Contains(t, b.String(), "<title>a &lt; b</title>")
	require.Contains(t, b.String(), `y1="196.0" y2="196.0"`)
	require.NotContains(t, b.String(), "%!")
	require.ErrorContains(t, plot(io.Discard, "", time.Minute, []series{{name: "one", rates: []float64{1}}}), "one was measured 1 times")
}

func TestPlot_GridHasAtMostFiveLines(t *testing.T) {
	for top, step := range map[float64]float64{3: 1, 5: 1, 6: 2, 26: 10, 49: 10, 51: 20, 999: 200, 1001: 500, 2600: 1000} {
		require.Equal(t, step, gridStep(top), top)
	}
}
