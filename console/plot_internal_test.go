package console

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// wellFormed returns the texts of a drawing.
func wellFormed(t *testing.T, drawing []byte) (texts []string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(string(drawing)))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return texts
		}
		require.NoError(t, err)
		if data, ok := token.(xml.CharData); ok && strings.TrimSpace(string(data)) != "" {
			texts = append(texts, strings.TrimSpace(string(data)))
		}
	}
}

func TestUsagePlot_HasTheLimitAndItsScale(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 23, 9, 0, 0, 0, time.UTC)
	u := usagePlot{limit: 1000, name: `<b>&"hourly"`, zone: time.UTC}
	for i := range 61 {
		u.points = append(u.points, usagePoint{at.Add(time.Duration(i) * time.Minute), int64(i * 10)})
	}
	for _, l := range []look{{}, {dark: true}, {narrow: true}, {dark: true, narrow: true}} {
		drawing := u.svg(l)
		texts := wellFormed(t, drawing)
		require.Contains(t, texts, `<b>&"hourly" 1 000`)
		require.Contains(t, texts, "600")
		require.Contains(t, texts, "1 k")
		require.Contains(t, texts, "09:30")
		require.NotContains(t, string(drawing), "http://www.w3.org/1999/xlink\" href")
	}
	// No data makes it fail: no usage, no limit, credit, the greatest numbers, an instant.
	for _, u := range []usagePlot{
		{points: []usagePoint{{at, 0}, {at.Add(time.Microsecond), 0}}, zone: time.UTC},
		{points: []usagePoint{{at, -5000}, {at.Add(time.Hour), 0}}, zone: time.UTC},
		{points: []usagePoint{{at, 1 << 62}, {at.AddDate(100, 0, 0), 1 << 62}}, limit: 1 << 62, zone: time.UTC},
	} {
		drawing := u.svg(look{})
		require.NotContains(t, string(drawing), "NaN")
		require.NotContains(t, string(drawing), "Inf")
		require.Less(t, len(drawing), 30_000)
		wellFormed(t, drawing)
	}
}

// A curve far below its limit fills the picture all the same, and the label says where the limit is.
func TestUsagePlot_ACurveFarBelowItsLimitIsNotFlat(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 3, 9, 0, 0, 0, time.UTC)
	plot := usagePlot{points: []usagePoint{{at, 0}, {at.Add(time.Hour), 90}}, limit: 100_000, name: "hourly", zone: time.UTC}
	drawing := string(plot.svg(look{}))
	require.Contains(t, drawing, ">hourly 100 000, far above</text>")
	require.Contains(t, drawing, ">80</text>", "the scale is the curve's")
	require.NotContains(t, drawing, `stroke-dasharray="6 4"`)
	plot.limit = 900
	require.Contains(t, string(plot.svg(look{})), `stroke-dasharray="6 4"`)
}

func TestClock_MarksWhereClocksHaveMarks(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	from := time.Date(2026, 10, 23, 15, 0, 0, 0, berlin) // the 25th has 25 hours
	var labels []string
	for _, tick := range (clock{zone: berlin, most: 8}).Ticks(seconds(from), seconds(from.AddDate(0, 0, 5))) {
		labels = append(labels, tick.Label)
		require.Zero(t, time.Unix(int64(tick.Value), 0).In(berlin).Hour())
	}
	require.Equal(t, []string{"Oct 24", "Oct 25", "Oct 26", "Oct 27", "Oct 28"}, labels)
}
