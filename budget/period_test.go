package budget_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
)

func location(t testing.TB, name string) *time.Location {
	t.Helper()
	loc, err := time.LoadLocation(name)
	require.NoError(t, err)
	return loc
}

// span is a period done plainly: dates of a wall calendar, at the times when a clock beside it shows them.
type span struct{ start, end time.Time }

// spanOf is the period that t is in. The starts around it are found by counting from the anchor.
func spanOf(t testing.TB, p budget.Period, at time.Time) span {
	if p.Unit == "" {
		start := p.Anchor.Add((at.Sub(p.Anchor)/p.Length - 2) * p.Length) // near it
		for ; start.After(at); start = start.Add(-p.Length) {
		}
		for ; !start.Add(p.Length).After(at); start = start.Add(p.Length) {
		}
		return span{start, start.Add(p.Length)}
	}
	loc := location(t, p.Zone)
	anchor := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
	if !p.Anchor.IsZero() {
		anchor = shown(p.Anchor, loc)
	}
	now := shown(at, loc)
	count, unit := counted(t, p.Unit)
	near := map[budget.Unit]int{
		budget.Day: int(now.Unix()/86400 - anchor.Unix()/86400), budget.Week: int(now.Unix()/86400-anchor.Unix()/86400) / 7,
		budget.Month: (now.Year()-anchor.Year())*12 + int(now.Month()-anchor.Month()), budget.Year: now.Year() - anchor.Year(),
	}[unit] / count
	var s span
	for k := near - 3; k <= near+3; k++ {
		start := firstShown(after(anchor, unit, k*count), loc)
		if !start.After(at) {
			s.start = start
		} else if s.end.IsZero() {
			s.end = start
		}
	}
	return s
}

// counted is a unit as so many others: "3 months" as 3 of a month.
func counted(t testing.TB, u budget.Unit) (count int, unit budget.Unit) {
	n, name, several := strings.Cut(string(u), " ")
	if !several {
		return 1, u
	}
	count, err := strconv.Atoi(n)
	require.NoError(t, err)
	return count, budget.Unit(strings.TrimSuffix(name, "s"))
}

// shown is the reading of a clock in loc at a time, as if it were UTC.
func shown(at time.Time, loc *time.Location) time.Time {
	y, m, d := at.In(loc).Date()
	h, minute, s := at.In(loc).Clock()
	return time.Date(y, m, d, h, minute, s, at.Nanosecond(), time.UTC)
}

// after is the date k units after another one, or the last day of its month.
func after(date time.Time, unit budget.Unit, k int) time.Time {
	switch unit {
	case budget.Day:
		return date.AddDate(0, 0, k)
	case budget.Week:
		return date.AddDate(0, 0, 7*k)
	case budget.Year:
		k *= 12
	}
	first := time.Date(date.Year(), date.Month()+time.Month(k), 1, date.Hour(), date.Minute(), date.Second(), date.Nanosecond(), time.UTC)
	last := first.AddDate(0, 1, -1).Day()
	return first.AddDate(0, 0, min(date.Day(), last)-1)
}

// firstShown is the first time at which a clock in loc shows wall. Where it is set forward past it, the time is that at which
// it would have been shown. It tries every offset from UTC that is in force within a day or so.
func firstShown(wall time.Time, loc *time.Location) time.Time {
	offsets := map[time.Duration]bool{}
	for away := -27 * time.Hour; away <= 27*time.Hour; away += time.Hour {
		_, seconds := wall.Add(away).In(loc).Zone()
		offsets[time.Duration(seconds)*time.Second] = true
	}
	tried := slices.Sorted(maps.Keys(offsets))
	for _, offset := range slices.Backward(tried) { // the further ahead a clock is, the earlier it shows a time
		if at := wall.Add(-offset); shown(at, loc).Equal(wall) {
			return at
		}
	}
	return wall.Add(-tried[0])
}

// zones have days of 23, 25 and 24.5 hours, midnights that are skipped or come twice, and one a day that never was.
var zones = []string{
	"UTC", "Europe/Berlin", "America/New_York", "America/Havana", "America/St_Johns", "America/Sao_Paulo", "Asia/Kathmandu",
	"Asia/Beirut", "Australia/Lord_Howe", "Pacific/Apia", "Pacific/Chatham", "Africa/Casablanca", "Asia/Tehran", "Etc/GMT+7",
}

// changes are moments at which a clock is set, or which are the end of a month that has no 31st or 29th.
var changes = []time.Time{
	time.Date(2026, 3, 29, 1, 0, 0, 0, time.UTC), time.Date(2026, 10, 25, 1, 0, 0, 0, time.UTC), // Europe
	time.Date(2026, 3, 8, 7, 0, 0, 0, time.UTC), time.Date(2026, 11, 1, 6, 0, 0, 0, time.UTC), // New York
	time.Date(2026, 11, 1, 4, 0, 0, 0, time.UTC), time.Date(2026, 11, 1, 5, 0, 0, 0, time.UTC), // Havana: midnight comes twice
	time.Date(2009, 11, 1, 2, 31, 0, 0, time.UTC),                                              // St. John's: a minute of November, then October again
	time.Date(2018, 11, 4, 3, 0, 0, 0, time.UTC), time.Date(2018, 2, 18, 2, 0, 0, 0, time.UTC), // Sao Paulo: no midnight
	time.Date(2011, 12, 30, 10, 0, 0, 0, time.UTC),                                               // Apia: no 30th of December
	time.Date(2026, 4, 4, 15, 0, 0, 0, time.UTC), time.Date(2026, 10, 3, 15, 30, 0, 0, time.UTC), // Lord Howe: by half an hour
	time.Date(2026, 2, 28, 0, 0, 0, 0, time.UTC), time.Date(2024, 2, 29, 0, 0, 0, 0, time.UTC),
	time.Date(2028, 2, 29, 0, 0, 0, 0, time.UTC), time.Date(2026, 4, 30, 22, 0, 0, 0, time.UTC),
}

// The current period is that of a wall calendar, in every time zone of the session: at random times and at the edges of
// the periods themselves, a microsecond before and after.
func TestPeriods_AreThoseOfTheCalendar(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	rapid.Check(t, func(rt *rapid.T) {
		_, err := conn.Exec(t.Context(), "select set_config('timezone', $1, false)", rapid.SampledFrom(zones).Draw(rt, "session"))
		require.NoError(rt, err)
		var queries []budget.Query
		for range 12 {
			queries = append(queries, budget.Query{Scope: "any", Period: anyPeriod(rt, rapid.SampledFrom(changes).Draw(rt, "anchor near"))})
		}
		at := rapid.SampledFrom(changes).Draw(rt, "near").Add(time.Duration(rapid.Int64Range(-40*86400_000_000, 40*86400_000_000).Draw(rt, "away")) * time.Microsecond)
		if rapid.Bool().Draw(rt, "at an edge") {
			s := spanOf(t, queries[0].Period, at)
			at = s.end.Add(time.Duration(rapid.IntRange(-1, 1).Draw(rt, "beside")) * time.Microsecond)
		}
		clock.Set(at)
		got, err := l.Usage(t.Context(), conn, queries...)
		require.NoError(rt, err)
		for i, u := range got {
			require.Equal(rt, spanOf(t, queries[i].Period, at), span{u.PeriodStart, u.PeriodEnd}, "%+v at %v", queries[i].Period, at)
			require.Less(rt, u.PeriodEnd.Sub(u.PeriodStart), budget.Limit{Period: queries[i].Period}.Reach()+time.Microsecond)
		}
	})
}

// anyPeriod is a period with no anchor, or with an anchor near a time.
func anyPeriod(rt *rapid.T, near time.Time) budget.Period {
	anchor := near.Add(time.Duration(rapid.Int64Range(-3*86400, 3*86400).Draw(rt, "anchor")) * time.Second)
	if rapid.Bool().Draw(rt, "whole hour") {
		anchor = anchor.Truncate(30 * time.Minute)
	}
	loc, err := time.LoadLocation(rapid.SampledFrom(zones).Draw(rt, "zone"))
	require.NoError(rt, err)
	unit := rapid.SampledFrom([]budget.Unit{budget.Day, budget.Week, budget.Month, budget.Year, "", budget.Every(3, budget.Month), budget.Every(6, budget.Month)}).Draw(rt, "unit")
	several := budget.Every(rapid.IntRange(2, 40).Draw(rt, "several"), rapid.SampledFrom([]budget.Unit{budget.Day, budget.Week, budget.Month}).Draw(rt, "of"))
	switch {
	case unit == "":
		return budget.PerPeriod(1, time.Duration(rapid.Int64Range(1_000_000_000, 40*86400_000_000).Draw(rt, "length"))*time.Microsecond, anchor).Period
	case rapid.Bool().Draw(rt, "of several"):
		unit = several
	case rapid.Bool().Draw(rt, "by the calendar"):
		anchor = time.Time{}
	}
	return budget.Per(1, unit, loc, anchor).Period
}

// The first moment of a period belongs to it, and retry-after leads there.
func TestPerMonth_BeginsWithItsFirstMoment(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	berlin := location(t, "Europe/Berlin")
	limit := budget.Per(10, budget.Month, berlin, time.Date(2026, 1, 31, 0, 0, 0, 0, berlin)).Named("plan")
	february, march := time.Date(2026, 2, 28, 0, 0, 0, 0, berlin), time.Date(2026, 3, 31, 0, 0, 0, 0, berlin)

	clock.Set(february.Add(-time.Microsecond))
	posted := mustCharge(t, pool, l, "org", 10, limit)
	require.Equal(t, budget.Standing{Limit: limit, Used: 10,
		PeriodStart: time.Date(2026, 1, 30, 23, 0, 0, 0, time.UTC), PeriodEnd: february.UTC()}, posted.Standings[0])
	clock.Set(february)
	mustCharge(t, pool, l, "org", 4, limit)
	clock.Set(march.Add(-time.Hour))
	_, err := charge(t.Context(), pool, l, "org", 7, limit)
	var refused *budget.ExceededError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, budget.Refusal{Scope: "org", Limit: limit, Used: 4, Requested: 7, Available: 6, RetryAfter: time.Hour,
		PeriodStart: february.UTC(), PeriodEnd: march.UTC()}, refused.Refusals[0])
	require.Contains(t, err.Error(), "limit 10 per month (Europe/Berlin), retry after 1h0m0s")
	_, err = charge(t.Context(), pool, l, "org", 11, limit)
	require.ErrorAs(t, err, &refused)
	require.Equal(t, budget.Never, refused.RetryAfter())

	// Another plan in mid-period keeps the used units.
	bigger := budget.Per(20, budget.Month, berlin, time.Date(2026, 1, 31, 0, 0, 0, 0, berlin))
	require.Equal(t, int64(11), mustCharge(t, pool, l, "org", 7, bigger).Standings[0].Used)

	// A refund counts in the period of its charge.
	clock.Set(march)
	require.NoError(t, refund(t.Context(), pool, l, "org", 2, 3))
	mustCharge(t, pool, l, "org", 10, limit)
	_, err = charge(t.Context(), pool, l, "org", 1, limit)
	require.ErrorIs(t, err, budget.ErrExceeded)
	clock.Set(march.Add(-time.Minute))
	requireVerified(t, pool, l)
}

func TestPeriods_RefuseZonesWithoutAName(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	for name, limit := range map[string]budget.Limit{
		"time.Local":   budget.Per(1, budget.Day, time.FixedZone("Local", 3600), time.Time{}), // where TZ does not name its zone
		"unnamed":      budget.Per(1, budget.Day, time.FixedZone("", 3600), time.Time{}),
		"POSIX rule":   budget.Per(1, budget.Day, time.FixedZone("UTC+3", 3*3600), time.Time{}),
		"abbreviation": budget.Per(1, budget.Day, time.FixedZone("PST", -8*3600), time.Time{}),
		"rule in Etc":  budget.Per(1, budget.Day, time.FixedZone("Etc/UTC+3", 3*3600), time.Time{}),
		"no zone":      {Max: 1, Period: budget.Period{Unit: budget.Month}},
		"no unit":      {Max: 1, Period: budget.Period{Zone: "UTC"}},
		"other unit":   {Max: 1, Period: budget.Period{Unit: "hour", Zone: "UTC"}},
		"0 days":       budget.Per(1, budget.Every(0, budget.Day), time.UTC, start),
		"-1 months":    budget.Per(1, budget.Every(-1, budget.Month), time.UTC, start),
		"hours":        budget.Per(1, budget.Every(2, budget.Hour), time.UTC, start),
		"a century":    budget.Per(1, budget.Every(1201, budget.Month), time.UTC, start),
		"many weeks":   budget.Per(1, budget.Every(1<<60, budget.Week), time.UTC, start),
		"no anchor 2":  budget.Per(1, budget.Every(5, budget.Month), time.UTC, time.Time{}),
		"no anchor 3":  budget.Per(1, budget.Every(2, budget.Week), time.UTC, time.Time{}),
		"no anchor 4":  budget.Per(1, budget.Every(2, budget.Year), time.UTC, time.Time{}),
		"a year":       {Max: 1, Period: budget.Period{Unit: "12 months", Zone: "UTC"}},
		"a week":       {Max: 1, Period: budget.Period{Unit: "7 days", Zone: "UTC"}},
		"a month":      {Max: 1, Period: budget.Period{Unit: "1 months", Zone: "UTC"}},
		"leading 0":    {Max: 1, Period: budget.Period{Unit: "03 months", Zone: "UTC"}},
		"both":         {Max: 1, Window: time.Hour, Period: budget.Period{Unit: budget.Month, Zone: "UTC"}},
		"no anchor":    budget.PerPeriod(1, time.Hour, time.Time{}),
		"no length":    budget.PerPeriod(1, 0, start),
		"negative":     budget.PerPeriod(1, -time.Hour, start),
		"too fine":     budget.PerPeriod(1, time.Hour+1, start),
		"too long":     budget.PerPeriod(1, bounds.MaxWindow+time.Microsecond, start),
		"not in UTC":   {Max: 1, Period: budget.Period{Length: time.Hour, Anchor: start.In(time.FixedZone("", 3600))}},
	} {
		_, err := charge(t.Context(), pool, l, "a", 1, limit)
		require.ErrorIs(t, err, budget.ErrArgument, name)
		if limit.Window == 0 {
			_, err = l.Usage(t.Context(), pool, budget.Query{Scope: "a", Period: limit.Period})
			require.ErrorIs(t, err, budget.ErrArgument, name)
		}
	}
	// Names that look like one are for the server to know.
	for _, name := range []string{"Europe/Atlantis", "America/Foo-Bar", "Posix/Nowhere"} {
		limit := budget.Per(1, budget.Day, time.FixedZone(name, 0), time.Time{})
		_, err := charge(t.Context(), pool, l, "a", 1, limit)
		require.ErrorIs(t, err, fault.New("budget_time_zone", ""), name)
		_, err = l.Usage(t.Context(), pool, budget.Query{Scope: "a", Period: limit.Period})
		require.ErrorIs(t, err, fault.New("budget_time_zone", ""), name)
	}
	require.Zero(t, usage(t, pool, l, "a", 0).Seq)
	for _, name := range zones {
		mustCharge(t, pool, l, "b", 1, budget.Per(100, budget.Day, location(t, name), time.Time{}))
	}
}

// Units of equal length are equal, however they were made, and come back from JSON.
func TestEvery_HasOneTextForALength(t *testing.T) {
	t.Parallel()
	quarter := budget.Every(3, budget.Month)
	for got, want := range map[budget.Unit]budget.Unit{
		budget.Every(1, budget.Month): budget.Month, budget.Every(12, budget.Month): budget.Year, budget.Every(7, budget.Day): budget.Week,
		budget.Every(14, budget.Day): "2 weeks", budget.Every(10, budget.Day): "10 days", budget.Every(24, budget.Month): "2 years",
		budget.Every(2, budget.Every(9, budget.Month)): "18 months", quarter: "3 months", budget.Every(2, quarter): "6 months", budget.Every(4, quarter): budget.Year,
	} {
		require.Equal(t, want, got)
		limit := budget.Per(7, got, time.UTC, time.Date(2026, 1, 31, 0, 0, 0, 0, time.UTC))
		text, err := json.Marshal(limit)
		require.NoError(t, err)
		var back budget.Limit
		require.NoError(t, json.Unmarshal(text, &back), string(text))
		require.True(t, limit == back)
	}
	start, end, err := budget.Per(1, quarter, time.UTC, time.Time{}).Period.At(time.Date(2026, 11, 25, 6, 0, 0, 0, time.UTC))
	require.NoError(t, err)
	require.Equal(t, []time.Time{time.Date(2026, 10, 1, 0, 0, 0, 0, time.UTC), time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)}, []time.Time{start, end})
}

// Two periods are the same limit only if they are equal: none swallows another in one call, and equal ones are judged once.
func TestPeriods_AreComparedByValue(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	berlin := location(t, "Europe/Berlin")
	day := time.Date(2026, 1, 15, 0, 0, 0, 0, berlin)
	same := []budget.Limit{budget.Per(9, budget.Month, berlin, day), budget.Per(9, budget.Month, location(t, "Europe/Berlin"), day.UTC()), budget.Per(9, budget.Month, berlin, day.Add(time.Nanosecond))}
	require.True(t, same[0] == same[1] && same[1] == same[2])
	others := []budget.Limit{same[0], budget.Per(9, budget.Month, berlin, time.Time{}), budget.Per(9, budget.Month, time.UTC, time.Time{}), budget.Per(9, budget.Year, berlin, day),
		budget.PerPeriod(9, time.Hour, day), budget.PerPeriod(9, 2*time.Hour, day)}
	posted := mustCharge(t, pool, l, "a", 1, others...)
	require.Len(t, posted.Standings, len(others))
	for i, s := range posted.Standings {
		require.Equal(t, others[i], s.Limit)
		for _, other := range posted.Standings[:i] {
			require.NotEqual(t, fmt.Sprint(other.PeriodStart, other.PeriodEnd), fmt.Sprint(s.PeriodStart, s.PeriodEnd))
		}
	}
}
