package main

import (
	"encoding/xml"
	"errors"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func wellFormed(t *testing.T, svg string) {
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err, svg)
	}
}

var drawn = []chart{
	{Title: "lines & <more>", X: "x", Y: "y", LogX: true, LogY: true, Lines: []line{
		{Name: "metered", Points: []point{{1, 10}, {1000, 20}}}, {Name: "a<b", Points: []point{{1, 10}, {1000, 2000}}},
	}},
	{Title: "linear", X: "x", Y: "y", Lines: []line{{Name: "seed", Points: []point{{0, 5}, {2, 7}}}}},
	{Title: "bars", X: "x", Bars: []bar{{"redis", 5, 4, 6, "5/s"}, {"none", 0, 0, 0, ""}}},
	{Title: "empty"},
}

func TestChart_IsWellFormedAndStaysInsideItsFrame(t *testing.T) {
	t.Parallel()
	place := regexp.MustCompile(` (?:cx|x|x1|x2)="([^"]*)"`)
	for _, c := range drawn {
		svg := string(c.SVG())
		wellFormed(t, svg)
		require.NotContains(t, svg, "NaN")
		require.NotContains(t, svg, "Inf")
		for _, m := range place.FindAllStringSubmatch(svg, -1) {
			require.NotContains(t, m[1], "-", "%s: %s", c.Title, m[0])
		}
	}
	require.Contains(t, string(drawn[0].SVG()), "a&lt;b")
	require.Equal(t, 4, strings.Count(string(drawn[0].SVG()), "<circle"))
	require.Equal(t, 2, strings.Count(string(drawn[2].SVG()), "<rect"))
}

func TestReport_NeedsNoOtherFile(t *testing.T) {
	t.Parallel()
	results := []result{
		figure{name: "slow_one", goal: atMost(1)}.result(samples{values: []float64{2}, where: []profile{{Contender: "<c>", Rate: 1}}}),
	}
	page, err := report("a <machine>", results, drawn)
	require.NoError(t, err)
	text := strings.ReplaceAll(string(page), `xmlns="http://www.w3.org/2000/svg"`, "")
	for _, outside := range []string{"http:", "https:", "src=", "@import", "url(", "<script", "<link"} {
		require.NotContains(t, text, outside)
	}
	require.Contains(t, text, "slow_one")
	require.Contains(t, text, "a &lt;machine&gt;")
	require.Contains(t, text, "&lt;c&gt;: 1/s")
	require.Contains(t, text, "<h2>Goals missed")
	require.Equal(t, 3, strings.Count(text, "<svg"))
}
