package jobs_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// What a session keeps of a parked job is the same under any setting: its class, by which jobs are told apart, and its hold,
// which a session with other settings reads.
func TestParked_AJobIsKeptAlikeUnderAnySetting(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	const sql = `
		select metered._class_of(c)::text || metered._hold_text(h) from (select row('s', null, 1, 1, array[
			row(5, make_interval(months => 1, hours => -25), row(make_interval(days => 1, secs => -3), '2026-02-03 04:05:06Z'::timestamptz, 'UTC')::metered.period, null, null, null)::metered.charge_limit],
			null, null, null, null)::metered.new_charge as c,
			row('t', 'h', true, null, '', null, '\x5c00ff'::bytea, '2026-02-03 04:05:06Z'::timestamptz, make_interval(days => 3, hours => -25), '0', null, null, null)::metered.new_hold as h) x`
	want := pgtest.Value[string](t, owner, sql)
	require.Contains(t, want, "2026-02-03 04:05:06+00")
	for _, settings := range []map[string]string{
		{"DateStyle": "German", "IntervalStyle": "sql_standard", "TimeZone": "Asia/Kolkata", "bytea_output": "escape"},
		{"DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601", "TimeZone": "America/St_Johns"},
		{"IntervalStyle": "postgres_verbose"},
		{"TimeZone": "America/St_Johns"},
		{"bytea_output": "escape"},
	} {
		pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) {
			for setting, value := range settings {
				c.ConnConfig.RuntimeParams[setting] = value
			}
		})
		require.Equal(t, want, pgtest.Value[string](t, pool, sql), settings)
	}
}
