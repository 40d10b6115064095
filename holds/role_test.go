package holds_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func TestRole_ApplicationCanMakeEveryCallButPurge(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{Notify: true})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{Notify: true}, owner.clock)
	app.everyFunction(0)
	app.everyFunction(1)
	_, err := app.purge()
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))

	open := app.mustPlace(holds.Request{ID: "open", TTL: time.Hour, Lines: []holds.Line{capacity("a", 1, 9999)}})
	before := owner.dump()
	for _, sql := range []string{
		`insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant, id, holder, fingerprint, keys)
			values (now(), now(), now(), now(), 1, 'h', '', 'x', '', '', '{}')`,
		`update metered.holds set holder = 'me'`,
		`update metered.holds set state = 'r'`,
		`delete from metered.holds`,
		`truncate metered.holds`,
		`update metered.hold_lines set open = 0`,
		`delete from metered.hold_lines`,
		`insert into metered.hold_lines values (1, 1, 1, 1, 1, now(), 'a')`,
		`update metered.hold_events set note = null`,
		`delete from metered.hold_events`,
		`insert into metered.hold_events (hold, at, version, kind) values (1, now(), 99, 'r')`,
		`update metered.holds_horizon set at = 'infinity'`,
		`delete from metered.holds_horizon`,
		`select * from metered.holds for update`,
		`select nextval(pg_get_serial_sequence('metered.holds', 'no'))`,
		`select metered.release_lines(array[1], null, 'x', now(), null, null)`,
		`select metered.expire_rows(array[1], now(), null)`,
		`select metered.expire_due(array['a'], array[now()], now(), 1, 1)`,
		`select metered.lock_holds(('', array['open'], array[null::timestamptz], ''), 'h', 1)`,
		`select metered.announce('c', '', 'open', 1, 'x')`,
		`select metered.purge_holds('-infinity', now(), 10, 10)`,
		`alter table metered.holds disable trigger all`,
		`create table metered.mine ()`,
	} {
		_, err := app.pool.Exec(t.Context(), sql)
		require.Equal(t, sqlstate.InsufficientPrivilege, code(err), "%s: %v", sql, err)
	}
	// To mark as announced is all that it can do to one that has ended; to one that is
	// open, nothing.
	execute(t, app.pool, `select metered.announced(array(select no from metered.holds where id = 'open'), null)`)
	require.Equal(t, before, owner.dump())
	require.Equal(t, holds.Held, app.get(open.ID).State)
	owner.verify()
}

func TestRole_MaintenancePurgesAndNothingElse(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{})
	owner.everyFunction(0)
	maintenance := on(t, pgtest.AsRole(t, owner.pool, metered.GrantMaintenanceSQL, ""), holds.Config{}, owner.clock)
	n, err := maintenance.purge()
	require.NoError(t, err)
	require.Positive(t, n)
	_, err = maintenance.place(holds.Request{Lines: []holds.Line{capacity("a", 1, 1)}})
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))
	_, err = maintenance.pool.Exec(t.Context(), `delete from metered.holds`)
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))
	owner.verify()
}

// What a caller puts in front of pg_catalog is not used, in any call.
func TestRole_HostileSearchPathChangesNothing(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{Notify: true})
	execute(t, owner.pool, `
		create schema evil;
		create function evil.no(bigint, bigint) returns boolean language sql as 'select false';
		create function evil.no(text, text) returns boolean language sql as 'select false';
		create function evil.no(timestamptz, timestamptz) returns boolean language sql as 'select false';
		create function evil.no("char", "char") returns boolean language sql as 'select false';
		create function evil.zero(bigint, bigint) returns bigint language sql as 'select 0::bigint';
		create operator evil.= (leftarg = bigint, rightarg = bigint, function = evil.no);
		create operator evil.= (leftarg = text, rightarg = text, function = evil.no);
		create operator evil.= (leftarg = "char", rightarg = "char", function = evil.no);
		create operator evil.<> (leftarg = "char", rightarg = "char", function = evil.no);
		create operator evil.<= (leftarg = timestamptz, rightarg = timestamptz, function = evil.no);
		create operator evil.> (leftarg = timestamptz, rightarg = timestamptz, function = evil.no);
		create operator evil.+ (leftarg = bigint, rightarg = bigint, function = evil.zero);
		create operator evil.- (leftarg = bigint, rightarg = bigint, function = evil.zero);
		create function evil.pg_notify(text, text) returns void language sql as '';
		create function evil.clock_timestamp() returns timestamptz language sql as $$select timestamptz '1999-01-01'$$;
		grant usage on schema evil to public`)
	app := pgtest.AsRole(t, owner.pool, metered.GrantSQL, "")
	config := app.Config().Copy()
	config.ConnConfig.RuntimeParams["search_path"] = "evil, pg_catalog"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	f := on(t, pool, holds.Config{Notify: true}, owner.clock)
	heard := listen(t, owner)

	h := f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 4, 9)}})
	_, err = f.place(holds.Request{ID: "i", Lines: []holds.Line{capacity("a", 6, 9)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	hs, err := f.capture(holds.Capture{IDs: []string{"h"}, Keep: true, Lines: []holds.Line{{Scope: "a", Amount: 3}}})
	require.NoError(t, err)
	require.Equal(t, int64(1), hs[0].Lines[0].Open)
	f.clock.Advance(time.Minute)
	_, status, err := f.expire(holds.Expire{ID: "h", Deadline: h.Deadline})
	require.NoError(t, err)
	require.Equal(t, holds.ExpiredNow, status)
	require.Equal(t, []string{"placed h 1", "captured_part h 2", "expired h 3"}, heard())
	used, held := owner.usage("a")
	require.Equal(t, []int64{3, 0}, []int64{used, held})
	owner.verify()
}
