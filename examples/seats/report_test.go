package main

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

func (h *hall) report(query string) (p report) {
	h.t.Helper()
	a := h.admin.ask(http.MethodGet, "/api/events/"+h.event+"/report"+query, "", nil)
	require.Equal(h.t, http.StatusOK, a.status, a.text)
	require.NoError(h.t, json.Unmarshal([]byte(a.text), &p))
	return p
}

func TestReport_CountsSoldHeldAndBlockedSeatsBySectionAndHour(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	h.till(nil)
	begin := noon.Add(20 * time.Minute)
	clock := pgtest.SetClock(t, h.pool, begin)
	people := h.people(h.org, 3)
	ben, cleo, dan := people[0], people[1], people[2]
	block := func(seat int, what string) {
		t.Helper()
		a := h.admin.ask(http.MethodPost, h.admin.seatPath(h.seats[seat], what), "", nil)
		require.Equal(t, http.StatusOK, a.status, a.text)
	}
	// Between 12 and 13: five held, three of them sold, one given back, one runs out.
	sold := []string{ben.holding(h.seats[0]), ben.holding(h.seats[1]), ben.holding(h.seats[100])}
	require.Equal(t, http.StatusOK, ben.checkout("", sold...).status)
	require.Equal(t, http.StatusOK, ben.cancel(ben.holding(h.seats[2])).status)
	ben.holding(h.seats[3])
	block(101, "block")
	block(102, "block")
	block(102, "unblock")
	// Between 14 and 15: one is blocked under somebody's hands, one is held, and another sold.
	clock.Set(begin.Add(2 * time.Hour))
	cleo.holding(h.seats[4])
	block(4, "block")
	cleo.holding(h.seats[3])
	require.Equal(t, http.StatusOK, cleo.checkout("", cleo.holding(h.seats[5])).status)
	dan.hold(h.seats[0]) // refused

	p := h.report("?hours=4")
	require.Equal(t, demo[0].event, p.Title)
	require.Equal(t, begin.Add(2*time.Hour), p.At)
	eleven := noon.Add(-time.Hour)
	require.Equal(t, []time.Time{eleven, noon, noon.Add(time.Hour), noon.Add(2 * time.Hour)}, p.Hours)
	require.Len(t, p.Sections, 5)
	require.Equal(t, sectionReport{
		ID: h.blocks[0], Name: "Stalls left", Seats: 100, Cents: 3 * 4500, Now: tally{Sold: 3, Held: 1, Blocked: 1},
		Hours: []tally{{}, {Sold: 2, Held: 4}, {}, {Sold: 1, Held: 3, Blocked: 1}},
	}, p.Sections[0])
	require.Equal(t, sectionReport{
		ID: h.blocks[1], Name: "Stalls centre", Seats: 100, Cents: 5200, Now: tally{Sold: 1, Blocked: 1},
		Hours: []tally{{}, {Sold: 1, Held: 1, Blocked: 2}, {}, {}},
	}, p.Sections[1])
	require.Equal(t, tally{}, p.Sections[4].Now)

	one := h.report("?hours=1&section=" + h.blocks[1])
	require.Len(t, one.Sections, 1)
	require.Equal(t, []tally{{}}, one.Sections[0].Hours)
	require.Len(t, h.report("").Hours, 24)
	require.Len(t, h.report("?hours=168").Sections[0].Hours, 168)

	// A held seat expires, swept or not.
	clock.Advance(5 * time.Minute)
	require.Equal(t, tally{Sold: 3, Blocked: 1}, h.report("").Sections[0].Now)
	for _, bad := range []string{"?hours=0", "?hours=169", "?hours=x"} {
		require.Equal(t, http.StatusBadRequest, h.admin.ask(http.MethodGet, "/api/events/"+h.event+"/report"+bad, "", nil).status, bad)
	}
	for _, unknown := range []string{"?section=x", "?section=" + h.seats[0]} {
		require.Equal(t, http.StatusNotFound, h.admin.ask(http.MethodGet, "/api/events/"+h.event+"/report"+unknown, "", nil).status, unknown)
	}
	h.verify()
}

// drawing is the content of an SVG: its texts, and the heights of the bars of sold, held and blocked seats, added up.
func (h *hall) drawing(query string) (texts []string, heights [3]float64) {
	h.t.Helper()
	a := h.admin.ask(http.MethodGet, "/api/events/"+h.event+"/report.svg"+query, "", nil)
	require.Equal(h.t, http.StatusOK, a.status, a.text)
	require.Equal(h.t, "image/svg+xml", a.header.Get("Content-Type"))
	var svg struct {
		Paths []struct {
			D     string `xml:"d,attr"`
			Style string `xml:"style,attr"`
		} `xml:"path"`
		Texts []string `xml:"text"`
	}
	require.NoError(h.t, xml.Unmarshal([]byte(a.text), &svg))
	var fills []string // the legend has one of each, in order
	for _, path := range svg.Paths[1:] {
		_, fill, _ := strings.Cut(path.Style, "fill:")
		if fill == "none" {
			continue
		}
		if !slices.Contains(fills, fill) {
			fills = append(fills, fill)
			continue
		}
		var ys []float64
		for point := range strings.Lines(path.D) {
			var x, y float64
			_, err := fmt.Sscanf(point[1:], "%g %g", &x, &y)
			require.NoError(h.t, err, point)
			ys = append(ys, y)
		}
		heights[slices.Index(fills, fill)] += slices.Max(ys) - slices.Min(ys)
	}
	require.Len(h.t, fills, 3)
	return svg.Texts, heights
}

func TestReport_IsPlottedBySectionAndHour(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	h.till(nil)
	pgtest.SetClock(t, h.pool, noon.Add(time.Minute))
	h.exec(`update hall.blocks set name = '<b>"Left" & ''right''</b>' where id = $1`, h.blocks[0])
	empty, heights := h.drawing("?by=section")
	require.Zero(t, heights)
	for _, text := range []string{"sold", "held", "blocked", `<b>"Left" & 'right'</b>`, "Stalls centre", "Stalls right", "Balcony left", "Balcony right"} {
		require.Contains(t, empty, text)
	}
	ben := h.people(h.org, 1)[0]
	require.Equal(t, http.StatusOK, ben.checkout("", ben.holding(h.seats[0])).status)
	ben.holding(h.seats[1])
	ben.holding(h.seats[100])
	require.Equal(t, http.StatusOK, h.admin.ask(http.MethodPost, h.admin.seatPath(h.seats[2], "block"), "", nil).status)

	// The heights are proportional to the values, to the pixel.
	proportional := func(heights [3]float64, sold, held, blocked float64) {
		t.Helper()
		unit := (heights[0] + heights[1] + heights[2]) / (sold + held + blocked)
		require.Greater(t, unit, 20.0)
		for i, n := range []float64{sold, held, blocked} {
			require.InDelta(t, n*unit, heights[i], 3)
		}
	}
	_, heights = h.drawing("?by=section")
	proportional(heights, 1, 2, 1)
	texts, heights := h.drawing("?by=hour&hours=6")
	proportional(heights, 1, 3, 1)
	for _, hour := range []string{"07h", "08h", "09h", "10h", "11h", "12h"} {
		require.Contains(t, texts, hour)
	}
	texts, heights = h.drawing("?by=hour&section=" + h.blocks[1])
	proportional(heights, 0, 1, 0)
	require.Contains(t, texts, "Seats by hour (UTC), Stalls centre")
	texts, heights = h.drawing("?by=hour&hours=168&theme=dark")
	proportional(heights, 1, 3, 1)
	require.Contains(t, texts, noon.AddDate(0, 0, -7).Add(time.Hour).Format("Jan 2 15h"))
	require.Equal(t, http.StatusBadRequest, h.admin.ask(http.MethodGet, "/api/events/"+h.event+"/report.svg", "", nil).status)
	h.verify()
}
