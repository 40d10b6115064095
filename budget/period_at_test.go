package budget_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
)

// At agrees with the database in every zone that both know, around changes of its clocks and the ends of years.
func TestPeriodAt_IsTheDatabasesOwn(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	rows, err := pool.Query(ctx, `select name from pg_timezone_names where name ~ '^(UTC|Etc/GMT[+-][0-9]{1,2}|[A-Z][A-Za-z]+(/[A-Z][A-Za-z_-]*)+)$' order by name`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	var changed []time.Time // changes of clocks, and beside them what each zone's shows
	var of, shown []string
	zones := map[string][]time.Time{}
	for i := 0; i < len(names); i += pgtest.Size(4, 1) {
		name := names[i]
		loc, err := time.LoadLocation(name)
		if err != nil {
			continue
		}
		zones[name] = []time.Time{time.Date(2024, 12, 31, 12, 0, 0, 0, time.UTC), time.Date(2028, 2, 29, 23, 59, 59, 0, time.UTC)}
		from := time.Date(1993, 5, 1, 0, 0, 0, 0, loc)
		for at := from; at.Year() < 2030; {
			_, ends := at.ZoneBounds()
			if at = at.AddDate(0, 3, 0); !ends.IsZero() && ends.After(from) && ends.Before(at) {
				at = ends
				for _, x := range []time.Time{ends.Add(-time.Microsecond), ends} {
					changed, of, shown = append(changed, x), append(of, name), append(shown, x.Format("2006-01-02 15:04:05"))
				}
				if len(zones[name]) < 12 || ends.Year() > 2024 {
					zones[name] = append(zones[name], ends.Add(-time.Microsecond), ends, ends.Add(13*time.Hour))
				}
			}
		}
	}
	rows, err = pool.Query(ctx, `select distinct zone from unnest($1::text[], $2::timestamptz[], $3::text[]) x(zone, at, shown)
		where to_char(x.at at time zone x.zone, 'YYYY-MM-DD HH24:MI:SS') <> x.shown`, of, changed, shown)
	require.NoError(t, err)
	others, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for _, name := range others { // of which the server has other data
		delete(zones, name)
	}
	require.Greater(t, len(zones), 9*len(names)/pgtest.Size(40, 10))

	var periods []budget.Period
	var everies, names2 []string
	var anchors []*time.Time
	var times []time.Time
	anchor := time.Date(2024, 1, 31, 0, 30, 0, 0, time.UTC)
	for name, at := range zones {
		loc, err := time.LoadLocation(name)
		require.NoError(t, err)
		for i, x := range at {
			for every, limit := range map[string]budget.Limit{
				"1 day": budget.Per(1, budget.Day, loc, time.Time{}), "7 days": budget.Per(1, budget.Week, loc, time.Time{}),
				"1 mon": budget.Per(1, budget.Month, loc, anchor), "1 year": budget.Per(1, budget.Year, loc, anchor),
				"3 mons": budget.Per(1, budget.Every(3, budget.Month), loc, anchor), "10 days": budget.Per(1, budget.Every(10, budget.Day), loc, anchor),
			} {
				if i%2 == 1 {
					limit.Period.Anchor = x.UTC().Truncate(time.Microsecond)
				}
				var a *time.Time
				if !limit.Period.Anchor.IsZero() {
					a = &limit.Period.Anchor
				}
				limit.Period.Zone = name
				periods, everies, names2, anchors, times = append(periods, limit.Period), append(everies, every), append(names2, name), append(anchors, a), append(times, x)
			}
		}
	}
	rows, err = pool.Query(ctx, `select p[1], p[2] from unnest($1::interval[], $2::timestamptz[], $3::text[], $4::timestamptz[]) with ordinality x(every, anchor, zone, at, n),
		lateral (select metered._period_at(row(x.every, x.anchor, x.zone)::metered.period, x.at) as p) y order by n`, everies, anchors, names2, times)
	require.NoError(t, err)
	n := 0
	var start, end time.Time
	_, err = pgx.ForEachRow(rows, []any{&start, &end}, func() error {
		s, e, err := periods[n].At(times[n])
		if err != nil || !s.Equal(start) || !e.Equal(end) {
			require.Equal(t, []any{nil, start.UTC(), end.UTC()}, []any{err, s, e}, "%+v at %v", periods[n], times[n])
		}
		n++
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, len(periods), n)
}

func TestPeriodAt_OfAFixedLengthAndWithoutAnyPeriod(t *testing.T) {
	t.Parallel()
	anchor := time.Date(2026, 1, 10, 6, 0, 0, 0, time.UTC)
	p := budget.PerPeriod(1, 30*time.Hour, anchor).Period
	for at, want := range map[time.Time]time.Time{
		anchor: anchor, anchor.Add(-time.Microsecond): anchor.Add(-30 * time.Hour), anchor.Add(30*time.Hour - time.Nanosecond): anchor,
		anchor.Add(300 * time.Hour): anchor.Add(300 * time.Hour),
	} {
		start, end, err := p.At(at)
		require.NoError(t, err)
		require.Equal(t, []time.Time{want, want.Add(30 * time.Hour)}, []time.Time{start, end}, at)
	}
	_, _, err := budget.Period{}.At(anchor)
	require.ErrorIs(t, err, budget.ErrArgument)
	_, _, err = p.At(time.Time{}.AddDate(-5, 0, 0))
	require.ErrorIs(t, err, budget.ErrArgument)
	_, _, err = budget.Period{Unit: budget.Day, Zone: "Europe/Nowhere"}.At(anchor)
	require.ErrorIs(t, err, fault.New("budget_time_zone", ""))
}
