package holds_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func TestRole_ApplicationCanMakeEveryCallButPurge(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := setUp(t, holds.Config{Notify: true})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{Notify: true}, owner.clock)
	app.everyFunction(0)
	app.everyFunction(1)
	_, err := app.purge()
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))

	open := app.mustPlace(holds.Placement{ID: "open", TTL: time.Hour, Lines: []holds.Line{capacity("a", 1, 9999)}})
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
		`select metered._release_lines(array[1], null, 'x', now(), null, null)`,
		`select metered._end_rows(array[1], now(), null, false)`,
		`select metered._end_due(array['a'], now(), 1)`,
		`select metered._lock_holds(('', array['open'], array[null::timestamptz], ''), 'h', 1)`,
		`select metered._announce('c', '', 'open', 1, 'x')`,
		`select metered.purge_holds('-infinity', now(), 10, 10)`,
		`alter table metered.holds disable trigger all`,
		`create table metered.mine ()`,
	} {
		_, err := app.pool.Exec(t.Context(), sql)
		require.Equal(t, sqlstate.InsufficientPrivilege, code(err), "%s: %v", sql, err)
	}
	// An ended hold it can mark as announced, and no more. It can do nothing to an open one.
	execute(t, app.pool, `select metered.announced(array(select no from metered.holds where id = 'open'), null)`)
	require.Equal(t, before, owner.dump())
	require.Equal(t, holds.Held, app.get(open.ID).State)
	owner.verify()
}

func TestRole_MaintenancePurgesAndNothingElse(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := setUp(t, holds.Config{})
	owner.everyFunction(0)
	maintenance := on(t, pgtest.AsRole(t, owner.pool, metered.GrantMaintenanceSQL, ""), holds.Config{}, owner.clock)
	n, err := maintenance.purge()
	require.NoError(t, err)
	require.Positive(t, n)
	_, err = maintenance.place(holds.Placement{Lines: []holds.Line{capacity("a", 1, 1)}})
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))
	_, err = maintenance.pool.Exec(t.Context(), `delete from metered.holds`)
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))
	owner.verify()
}

// Objects that a caller puts in front of pg_catalog are not used, in any call.
func TestRole_HostileSearchPathChangesNothing(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
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

	h := f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 4, 9)}})
	_, err = f.place(holds.Placement{ID: "i", Lines: []holds.Line{capacity("a", 6, 9)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	hs, err := f.capture(holds.Capture{IDs: []string{"h"}, Keep: true, Lines: []holds.Line{{Scope: "a", Amount: 3}}})
	require.NoError(t, err)
	require.Equal(t, int64(1), hs[0].Lines[0].Open)
	f.clock.Advance(time.Minute)
	_, ended, err := f.expire(holds.Expire{ID: "h", Deadline: h.Deadline})
	require.NoError(t, err)
	require.True(t, ended)
	require.Equal(t, []string{"placed h 1", "captured_part h 2", "expired h 3"}, heard())
	used, held := owner.usage("a")
	require.Equal(t, []int64{3, 0}, []int64{used, held})
	owner.verify()
}

// A hold that a charge of one of its scopes ended still keeps room of the others. Marking it as announced does not get
// it purged.
func TestRole_AnnouncingAHoldLosesNoneOfItsUnits(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	owner.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 10, 10), capacity("b", 10, 10)}})
	owner.clock.Advance(time.Minute)
	_, err := app.charge(budget.Charge{Scope: "a", Amount: 10, Limits: []budget.Limit{budget.Lifetime(10)}})
	require.NoError(t, err)
	_, err = app.pool.Exec(t.Context(), `select metered.announced('{1}', null)`)
	require.NoError(t, err)
	owner.clock.Advance(time.Hour)
	_, err = purge.Holds.Delete(t.Context(), owner.pool, purge.Options{OlderThan: time.Minute})
	require.NoError(t, err)
	owner.verify()
	_, err = app.charge(budget.Charge{Scope: "b", Amount: 10, Limits: []budget.Limit{budget.Lifetime(10)}})
	require.NoError(t, err)
}

// A time after the year 9999 is none to JSON's readers: one such hold would keep all others from being listed.
func TestRole_NoExtensionMakesAHoldUnreadable(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := setUp(t, holds.Config{})
	cfg := holds.Config{NoCeiling: true}
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), cfg, owner.clock)
	owner.clock.Advance(72 * 24 * time.Hour) // to February: of an interval Postgres counts the months as of 30 days
	h := app.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 1, 1)}})
	for _, by := range []string{"100000000 days", "9000 years", "3661 days", "1 mon -29 days"} {
		_, err := app.pool.Exec(t.Context(), `select metered.extend_holds(row('', array['h'], array[null::timestamptz], ''), $1::text::interval, 1000, null, null, false)`, by)
		require.Equal(t, "22023", code(err), "%s: %v", by, err)
	}
	// Nor do many of those that are let in.
	var err error
	for n := 0; err == nil && n < 1000; n++ {
		_, err = app.extend(bounds.MaxLifetime, "h")
	}
	require.ErrorIs(t, err, holds.ErrCeiling)
	require.Zero(t, app.get("h").Ceiling)
	list, err := app.book.List(t.Context(), app.pool, holds.Filter{})
	require.NoError(t, err)
	require.Len(t, list.Holds, 1)
	require.Greater(t, list.Holds[0].Deadline.Year(), 9900)
	require.Equal(t, h.PlacedAt, list.Holds[0].PlacedAt)
	due, err := app.book.Due(t.Context(), app.pool, holds.DueFilter{})
	require.NoError(t, err)
	require.Len(t, due.Holds, 1)
	owner.verify()
}

// Months and days are no constant lengths: by a sum of them no deadline is before its hold, nor after its end.
func TestRole_NoHoldEndsBeforeItBegins(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := setUp(t, holds.Config{})
	app := pgtest.AsRole(t, owner.pool, metered.GrantSQL, "")
	for _, c := range []struct{ at, ttl, grace, lifetime, by string }{
		{"2027-03-31", "-1 mon 30 days 1 us", "0", "100 days", ""},
		{"2027-03-01", "1 mon", "-1 mon 30 days", "100 days", ""},
		{"2027-03-01", "1 mon", "0", "30 days", ""},
		{"2027-01-29", "36 h", "18 h", "100 days", "1 mon"},
	} {
		at, err := time.Parse(time.DateOnly, c.at)
		require.NoError(t, err)
		owner.clock.Set(at)
		_, err = app.Exec(t.Context(), `select metered.place(row('', 'h', true, null, '', null, decode(repeat('01', 33), 'hex'), null, $1, $2, $3, null, null),
			array[row('a', null, 1, 1, '{}', null, null, null, null)]::metered.new_charge[], '1 min', 1000, null, null, false)`, pgx.QueryExecModeSimpleProtocol, c.ttl, c.grace, c.lifetime)
		if c.by != "" {
			require.NoError(t, err)
			_, err = app.Exec(t.Context(), `select metered.extend_holds(row('', array['h'], array[null::timestamptz], ''), $1, 1000, null, null, false)`,
				pgx.QueryExecModeSimpleProtocol, c.by)
		}
		require.Equal(t, "22023", code(err), "%v: %v", c, err)
	}
	owner.verify()
}

// A scope's clock was repaired since the snapshot: the refusal is not final.
func TestCharge_AClockRepairedSinceTheSnapshotIsRetryable(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.clock.Advance(time.Hour)
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 1})
	require.NoError(t, err)
	f.clock.Advance(-time.Hour)
	tx, err := f.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(t.Context(), "select 1")
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.ClockState, error) {
		return f.ledger.RepairClock(ctx, tx, "a", budget.Note{})
	})
	require.NoError(t, err)
	_, err = f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{budget.PerWindow(5, time.Minute)}})
	require.Equal(t, "40001", code(err), "%v", err)
}

// Two refunds of the same part give it back once each, as far as there is something left.
func TestRefund_RacesGiveBackNoMoreThanWasCaptured(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUp(t, holds.Config{})
	for _, iso := range isolations {
		t.Run(string(iso), func(t *testing.T) {
			ids, a, b := []string{string(iso)}, "a "+string(iso), "b "+string(iso)
			f.mustPlace(holds.Placement{ID: ids[0], Lines: []holds.Line{capacity(a, 10, 10), capacity(b, 7, 10)}})
			_, err := f.capture(holds.Capture{IDs: ids, All: true})
			require.NoError(t, err)
			_ = pgtest.InParallel(8, func(n int) error {
				for i := range 6 {
					_ = pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: iso}, func(tx pgx.Tx) error {
						var err error
						switch (n + i) % 3 {
						case 0:
							_, err = f.book.Return(t.Context(), tx, holds.Return{IDs: ids, Lines: []holds.Line{{Scope: a, Amount: 3}}})
						case 1:
							_, err = f.book.Return(t.Context(), tx, holds.Return{IDs: ids, Lines: []holds.Line{{Scope: b, Amount: 2}, {Scope: a, Amount: 1}}})
						default:
							_, err = f.ledger.Refund(t.Context(), tx, budget.Refund{Scope: a, Seq: 2, Amount: 1})
						}
						return err
					})
				}
				return nil
			})
		})
	}
	f.verify()
}

// A charge under a key that is not its scope's. No Go call sends one, but a role may call the
// function.
const wrongKeySQL = `select (metered.charge(array[row('a', 1, $1::bigint, 0, array[row(10, '0', null, null, null, null)::metered.charge_limit], null, null, null, null)::metered.new_charge],
	'1 minute', 60000, true)).refused is null`

// Lines are freed under the locks of their scopes alone. Units that cannot be freed keep their room.
func TestRole_AChargeUnderAWrongKeyTakesNoRoomOfAHoldThatItCannotEnd(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	owner.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 10, 10)}})
	owner.clock.Advance(time.Minute)
	before := owner.dump()
	_, err := app.pool.Exec(t.Context(), wrongKeySQL, 10)
	require.Equal(t, "22023", code(err), "%v", err)
	require.Equal(t, before, owner.dump())
	owner.verify()
	_, err = app.charge(budget.Charge{Scope: "a", Amount: 10, Limits: []budget.Limit{budget.Lifetime(10)}})
	require.NoError(t, err)
	require.Equal(t, holds.Expired, owner.get("h").State)
	owner.verify()
}

// Without its scope's lock a charge sees a hold as due that is just being extended.
func TestRole_AChargeUnderAWrongKeyEndsNoHoldEarly(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	ctx := t.Context()
	owner.mustPlace(holds.Placement{ID: "extended", Lines: []holds.Line{capacity("a", 5, 10)}})
	owner.mustPlace(holds.Placement{ID: "released", Lines: []holds.Line{capacity("a", 5, 10)}, TTL: time.Hour})
	tx, err := app.pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = app.book.Extend(ctx, tx, holds.Extend{IDs: []string{"extended"}, By: time.Hour})
	require.NoError(t, err)
	_, err = app.book.Release(ctx, tx, holds.Release{IDs: []string{"released"}}) // so that there is room all the same
	require.NoError(t, err)
	owner.clock.Advance(time.Minute)

	charged := app.chargeUnderAWrongKey(5)
	require.NoError(t, tx.Commit(ctx))
	<-charged // either answer is right
	h := owner.get("extended")
	require.Equal(t, holds.Held, h.State)
	require.Equal(t, int64(5), h.Lines[0].Open)
	owner.verify()
}

// chargeUnderAWrongKey begins to charge, and returns when that waits for a lock or is over.
func (f *fixture) chargeUnderAWrongKey(amount int) <-chan error {
	charged := pgtest.Going(func() error {
		_, err := f.pool.Exec(f.Context(), wrongKeySQL, amount)
		return err
	})
	pgtest.WaitFor(f, "the charge to wait, or to be over", func() bool { return pgtest.Queued(f, f.pool) == 1 || len(charged) == 1 })
	return charged
}

// Without its scope's lock a charge sees a hold as due that is just being captured. The captured units count against
// the limit.
func TestRole_AChargeUnderAWrongKeyCountsARacingCapture(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	ctx := t.Context()
	owner.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 10, 10)}})
	tx, err := app.pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = app.book.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, All: true})
	require.NoError(t, err)
	owner.clock.Advance(time.Minute)

	charged := app.chargeUnderAWrongKey(10)
	require.NoError(t, tx.Commit(ctx))
	<-charged // either answer is right
	used, held := owner.usage("a")
	require.LessOrEqual(t, used+held, int64(10))
	owner.verify()
}

// A role that calls the function itself cannot capture a negative amount, which would give spending back.
func TestCapture_OfANegativeAmountIsRefusedByTheFunction(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 3})
	require.NoError(t, err)
	f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 2, 9), capacity("b", 2, 9)}})
	for _, closing := range []bool{true, false} {
		for _, policy := range []string{"refuse", "fit", "allow"} {
			_, err := f.pool.Exec(t.Context(), `select metered.capture_holds(('', '{h}', '{null}', '')::metered.hold_ids,
				array[('a', -5, array[(9, '0', null, null, null, null)::metered.charge_limit])::metered.used_units, ('b', 1, array[(9, '0', null, null, null, null)::metered.charge_limit])::metered.used_units],
				($1::bool, $2::text, null)::metered.capture_terms, '1 min', 1000, (null, null, null)::metered.origin, null, false)`, closing, policy)
			require.ErrorContains(t, err, "used", "%v %s", closing, policy)
		}
	}
	f.verify()
}
