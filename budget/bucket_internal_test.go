package budget

import (
	"archive/zip"
	"context"
	"go/build"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"testing"
	"time"
	_ "time/tzdata" // the same rules on every machine

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/bounds"
)

func place(t testing.TB, name string) *time.Location {
	t.Helper()
	loc, err := time.LoadLocation(name)
	require.NoError(t, err)
	return loc
}

// local is the instant at which a clock shows a time. The offset sets two such instants apart.
func local(t testing.TB, text string, loc *time.Location) time.Time {
	t.Helper()
	at, err := time.Parse("2006-01-02 15:04 -0700", text)
	require.NoError(t, err)
	return at.In(loc)
}

func edgesOf(t testing.TB, b Unit, zone, from, to string) (all []string) {
	t.Helper()
	loc := place(t, zone)
	edges, err := b.edges(t.Context(), local(t, from, loc), local(t, to, loc), loc)
	require.NoError(t, err)
	for _, e := range edges {
		all = append(all, e.In(loc).Format("2006-01-02 15:04 -0700"))
	}
	return all
}

func TestUnit_EdgesAtChangesOfTheClock(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		bucket   Unit
		zone     string
		from, to string
		between  []string
	}{
		"a day of 23 hours": {Day, "Europe/Berlin", "2026-03-28 00:00 +0100", "2026-03-31 00:00 +0200",
			[]string{"2026-03-29 00:00 +0100", "2026-03-30 00:00 +0200"}},
		"a day of 25 hours": {Day, "Europe/Berlin", "2026-10-24 12:00 +0200", "2026-10-26 12:00 +0100",
			[]string{"2026-10-25 00:00 +0200", "2026-10-26 00:00 +0100"}},
		"an hour is skipped": {Hour, "Europe/Berlin", "2026-03-29 00:30 +0100", "2026-03-29 04:30 +0200",
			[]string{"2026-03-29 01:00 +0100", "2026-03-29 03:00 +0200", "2026-03-29 04:00 +0200"}},
		"an hour comes twice": {Hour, "Europe/Berlin", "2026-10-25 01:30 +0200", "2026-10-25 03:30 +0100",
			[]string{"2026-10-25 02:00 +0200", "2026-10-25 02:00 +0100", "2026-10-25 03:00 +0100"}},
		"midnight is skipped": {Day, "America/Sao_Paulo", "2018-11-03 00:00 -0300", "2018-11-06 00:00 -0200",
			[]string{"2018-11-04 01:00 -0200", "2018-11-05 00:00 -0200"}},
		"the hour before midnight comes twice": {Day, "America/Sao_Paulo", "2018-02-17 00:00 -0200", "2018-02-19 00:00 -0300",
			[]string{"2018-02-18 00:00 -0300"}},
		"midnight comes twice": {Day, "America/St_Johns", "2006-10-28 00:00 -0230", "2006-10-30 00:00 -0330",
			[]string{"2006-10-29 00:00 -0230"}},
		"from the evening that comes twice": {Day, "America/St_Johns", "2006-10-28 23:30 -0330", "2006-10-30 12:00 -0330",
			[]string{"2006-10-30 00:00 -0330"}},
		"a day is skipped": {Day, "Pacific/Apia", "2011-12-29 00:00 -1000", "2012-01-01 00:00 +1400",
			[]string{"2011-12-31 00:00 +1400"}},
		"half an hour is skipped": {Hour, "Australia/Lord_Howe", "2026-10-04 01:00 +1030", "2026-10-04 04:00 +1100",
			[]string{"2026-10-04 02:30 +1100", "2026-10-04 03:00 +1100"}},
		"half an hour comes twice": {Hour, "Australia/Lord_Howe", "2026-04-05 00:00 +1100", "2026-04-05 03:00 +1030",
			[]string{"2026-04-05 01:00 +1100", "2026-04-05 02:00 +1030"}},
		"another hour comes twice, from its second minute on": {Hour, "America/St_Johns", "2006-10-28 23:30 -0230", "2006-10-29 00:30 -0330",
			[]string{"2006-10-29 00:00 -0230", "2006-10-28 23:01 -0330", "2006-10-29 00:00 -0330"}},
		"weeks begin on Monday": {Week, "Asia/Kathmandu", "2026-02-25 10:00 +0545", "2026-03-10 00:00 +0545",
			[]string{"2026-03-02 00:00 +0545", "2026-03-09 00:00 +0545"}},
		"a week from a Sunday":              {Week, "UTC", "2026-03-01 00:00 +0000", "2026-03-03 00:00 +0000", []string{"2026-03-02 00:00 +0000"}},
		"a week from a Monday":              {Week, "UTC", "2026-03-02 00:00 +0000", "2026-03-09 00:00 +0000", nil},
		"years begin on the 1st of January": {Year, "Asia/Kathmandu", "2026-02-25 10:00 +0545", "2028-01-01 00:00 +0545", []string{"2027-01-01 00:00 +0545"}},
		"months from the 31st": {Month, "America/New_York", "2026-01-31 12:00 -0500", "2026-05-01 00:00 -0400",
			[]string{"2026-02-01 00:00 -0500", "2026-03-01 00:00 -0500", "2026-04-01 00:00 -0400"}},
		"a fixed length does not look at the clock": {Unit("12h"), "Europe/Berlin", "2026-03-28 18:00 +0100", "2026-03-30 00:00 +0200",
			[]string{"2026-03-29 07:00 +0200", "2026-03-29 19:00 +0200"}},
	} {
		want := append(append([]string{c.from}, c.between...), c.to)
		require.Equal(t, want, edgesOf(t, c.bucket, c.zone, c.from, c.to), name)
	}
}

// A clock that is watched minute by minute shows the same edges. A date begins when it is first shown, or passed. An
// hour begins when the clock shows a full one, or another hour than a minute before.
func TestUnit_EdgesAreThoseOfAWatchedClock(t *testing.T) {
	t.Parallel()
	for _, zone := range []string{
		"Europe/Berlin", "Europe/Dublin", "America/New_York", "America/St_Johns", "America/Sao_Paulo", "America/Santiago", "America/Havana",
		"Africa/Cairo", "Africa/Casablanca", "Asia/Tehran", "Asia/Beirut", "Asia/Gaza", "Asia/Pyongyang", "Asia/Kathmandu", "Asia/Amman",
		"Australia/Lord_Howe", "Pacific/Apia", "Pacific/Chatham", "Pacific/Kiritimati", "Antarctica/Troll",
	} {
		loc := place(t, zone)
		change := 0
		for at := time.Date(1985, 1, 1, 0, 0, 0, 0, loc); ; change++ {
			_, at = at.ZoneBounds()
			if at.IsZero() || at.Year() >= 2027 {
				break
			}
			if change%6 > 1 && at.Year() != 1988 && at.Year() != 2011 {
				continue
			}
			from, to := at.Add(-27*time.Hour-17*time.Minute).Truncate(time.Minute), at.Add(27*time.Hour+11*time.Minute).Truncate(time.Minute)
			requireWatched(t, from, to, time.Minute)
		}
	}
}

// requireWatched compares edges by hour and by day with a clock that is looked at in steps, each of which begins where its offset
// from UTC may change.
func requireWatched(t *testing.T, from, to time.Time, step time.Duration) {
	t.Helper()
	hours, days := []time.Time{from}, []time.Time{from}
	latest := from.YearDay() + 1000*from.Year()
	hour := from.Hour()
	for m := from.Add(step); m.Before(to); m = m.Add(step) {
		if m.Minute() == 0 || m.Hour() != hour {
			hours = append(hours, m)
		}
		hour = m.Hour()
		if day := m.YearDay() + 1000*m.Year(); day > latest {
			days, latest = append(days, m), day
		}
	}
	for b, want := range map[Unit][]time.Time{Hour: hours, Day: days} {
		edges, err := b.edges(t.Context(), from, to, from.Location())
		require.NoError(t, err)
		if want = append(want, to); !slices.EqualFunc(want, edges, time.Time.Equal) {
			require.Equal(t, want, edges, "%v by %v", from.Location(), b)
		}
	}
}

// zones are the zones of Go's own data that differ, by one of their names.
func zones(t testing.TB) map[string]*time.Location {
	t.Helper()
	archive, err := zip.OpenReader(filepath.Join(build.Default.GOROOT, "lib", "time", "zoneinfo.zip"))
	require.NoError(t, err)
	defer archive.Close()
	all, seen := map[string]*time.Location{}, map[string]bool{}
	for _, file := range archive.File {
		content, err := fs.ReadFile(archive, file.Name)
		if err != nil || file.FileInfo().IsDir() || seen[string(content)] {
			require.True(t, err == nil || file.FileInfo().IsDir(), file.Name)
			continue
		}
		seen[string(content)] = true
		all[file.Name], err = time.LoadLocationFromTZData(file.Name, content)
		require.NoError(t, err)
	}
	require.Greater(t, len(all), 300)
	return all
}

// Where a zone's rule decides, Go ends the year after 365 days.
func TestUnit_LastDayOfALeapYearInAllZones(t *testing.T) {
	t.Parallel()
	for _, loc := range zones(t) {
		for _, year := range []int{2008, 2024, 2028, 2040, 2096, 2400} {
			from := time.Date(year, 12, 30, 13, 0, 0, 0, time.UTC).In(loc)
			requireWatched(t, from, from.Add(60*time.Hour), 15*time.Minute)
			for _, b := range []Unit{Week, Month} {
				edges, err := b.edges(t.Context(), from.Add(-9*24*time.Hour), from.Add(40*24*time.Hour), loc)
				require.NoError(t, err)
				for _, e := range edges[1 : len(edges)-1] {
					begins := b == Month && e.Day() == 1 || b == Week && e.Weekday() == time.Monday
					require.True(t, begins && e.Hour() == 0 && e.Minute() == 0, "%v by %v: %v", loc, b, e)
				}
			}
		}
	}
}

func TestUnit_EdgesEndWithTheContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	from := time.Date(2028, 12, 31, 12, 0, 0, 0, time.UTC)
	_, err := Hour.edges(ctx, from, from.Add(time.Hour), time.UTC)
	require.ErrorIs(t, err, context.Canceled)
}

func TestUnit_Bounds(t *testing.T) {
	t.Parallel()
	from := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	edges, err := Unit("1us").edges(t.Context(), from, from.Add(bounds.MaxBuckets*time.Microsecond), time.UTC)
	require.NoError(t, err)
	require.Len(t, edges, bounds.MaxBuckets+1)
	for _, b := range []Unit{"1us", Hour, Day, Week, Month, Year} {
		_, err := b.edges(t.Context(), time.Time{}, time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC), time.UTC)
		var argument *ArgumentError
		require.ErrorAs(t, err, &argument)
		require.Equal(t, "unit", argument.Field)
		require.Contains(t, argument.Reason, "more than 2000")
	}
	edges, err = Unit(time.Duration(math.MaxInt64).Truncate(time.Microsecond).String()).edges(t.Context(), time.Time{}, time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC), time.UTC)
	require.NoError(t, err)
	require.Len(t, edges, 36)
}

func TestUnit_OtherTextsAreRefused(t *testing.T) {
	t.Parallel()
	for _, u := range []Unit{Hour, Day, Week, Month, Year, "15m", "1us"} {
		require.NoError(t, u.checkSeries(), u)
	}
	for _, u := range []Unit{"", "decade", "0s", "-1h", "1ns", "-1ns", "-2ns"} {
		require.ErrorIs(t, u.checkSeries(), ErrArgument, u)
	}
}
