package console

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

// The form reads its own text of limits.
func TestParseLimits_ReadsTheFormsOwnText(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	list := []budget.Limit{
		{Max: 1000, Window: time.Hour, Name: "hourly"},
		{Max: 20_000, Window: 30 * day},
		{Max: 500, Lifetime: true},
		{Max: 0, Prepaid: true, Name: "prepaid"},
		{Max: 9, Window: 90 * time.Minute},
		{Max: 9, Window: 1500 * time.Microsecond, Name: `a, "b" = c/d`},
		{Max: bounds.MaxLimit, Window: bounds.MaxWindow, Name: "line\nbreak"},
		{Max: 1, Window: time.Second, Name: " blank "},
		{Max: 1, Window: 10 * time.Second},
		{Max: 1, Window: 20 * time.Minute},
		budget.Per(9, budget.Month, berlin, time.Date(2026, 1, 31, 0, 0, 0, 0, berlin)).Named("plan"),
		budget.Per(9, budget.Week, berlin, time.Time{}),
		budget.PerPeriod(9, 30*day, time.Date(2026, 1, 31, 8, 0, 0, 1000, time.UTC)),
	}
	read, err := parseLimits(limits{List: list}.Text())
	require.NoError(t, err)
	require.Equal(t, list, read)
	for text, want := range map[string]string{"1h": "1h", "1h30m": "1h30m", "10s": "10s", "20m": "20m", "48h": "2d", "100ms": "100ms"} {
		d, err := time.ParseDuration(text)
		require.NoError(t, err)
		require.Equal(t, want, window(d))
	}
}

func TestParseLimits_NamesTheFault(t *testing.T) {
	t.Parallel()
	for text, why := range map[string]string{
		"1000":                   "is not of the form",
		"1000/":                  "not a window",
		"x/1h":                   "not a number of units",
		"-1/1h":                  "not a number of units",
		"9999999999999999999/1h": "not a number of units",
		"1/1y":                   "not a window",
		"1/-1h":                  "not a window",
		"1/0s":                   "whole microseconds",
		"1/1ns":                  "whole microseconds",
		"1/99999999h":            "not a window",
		"1/60000d":               "a century",
		"1/xd":                   "not a window",
		"1/month@UTC@x":          "is not a time",
		"1/month@UTC@@":          "more than an anchor",
		"1/x@2026-01-31":         "neither day, week",
		`"open=1/1h`:             "does not end with one",
		`"name" 1/1h`:            "followed by =",
		"1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h,1/1h": "more than 16",
	} {
		_, err := parseLimits(text)
		require.ErrorContains(t, err, why, text)
	}
	list, err := parseLimits(" 1/1h , ")
	require.NoError(t, err)
	require.Len(t, list, 1)
}
