package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// A wallet can have any number of lapses to announce: they are announced in batches, each with no more locks than a
// server has room for.
func TestExpire_AnnouncesAWalletsLotsHoweverMany(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	o := new(pgtest.Recorder)
	ledger, err := budget.New(budget.Config{Observer: o})
	require.NoError(t, err)
	book, err := wallet.New(ledger, wallet.Config{})
	require.NoError(t, err)
	const lots = 10_001
	for _, sweep := range []func() (wallet.SweepReport, error){
		func() (wallet.SweepReport, error) {
			return book.Sweep(t.Context(), pool, wallet.SweepOptions{Batch: 2_000})
		},
		func() (r wallet.SweepReport, err error) {
			err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				r, err = book.Expire(t.Context(), tx, "ann")
				return err
			})
			return r, err
		},
	} {
		_, err = pool.Exec(t.Context(), `insert into metered.lot_rows (granted_at, expires_at, granted_seq, last_seq, amount, rest, lapsed, untold, priority, origin, open, scope, category)
			select now(), now() - g * interval '1 s', 0, 0, 1, 0, 1, 1, 0, 'c', false, 'ann', '' from generate_series(1, $1) g`, lots)
		require.NoError(t, err)
		o.Forget()
		r, err := sweep()
		require.NoError(t, err)
		require.Equal(t, 6, r.Batches, "of 2,000 lots")
		require.EqualValues(t, lots, o.Sum("lots_lapsed"))
		require.Zero(t, pgtest.Value[int64](t, pool, "select count(*) from metered.lot_rows where untold > 0"))
	}
}

// A charge's reads grow with the number of lots that it draws, and not with the square.
func TestDraw_OfManyLotsReadsEachOnce(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	conn, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), "alter table metered.lot_rows set (autovacuum_enabled = off)")
	require.NoError(t, err)
	reads := func(lots int64) int64 {
		_, err := conn.Exec(t.Context(), `select metered.grant_lot('ann', null, row(1, null, null, '', 0, null, null, null, null, null)::metered.new_lot, false, 1000, null)
			from generate_series(1, $1::int)`, lots)
		require.NoError(t, err)
		before := lotReads(t, conn)
		require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			d, err := f.drawIn(t.Context(), tx, toDraw{Wallet: "ann", Amount: lots})
			require.Len(t, d.Lots, int(lots))
			return err
		}))
		return lotReads(t, conn) - before
	}
	few := reads(20)
	require.Less(t, reads(400), 25*few)
	f.has(0)
}

// A lot that ended by a clock that was ahead has not ended once the clock is repaired: units that a hold frees of it
// end with it.
func TestLot_EndsAgainAfterAClockRepair(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(2 * time.Hour)})
	f.place("r", 8, 100*day)
	f.clock.Set(noon.Add(10 * time.Hour))
	f.expire()
	f.clock.Set(noon.Add(time.Hour))
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.ClockState, error) {
		return f.ledger.RepairClock(ctx, tx, "ann", budget.Note{})
	})
	require.NoError(t, err)
	f.release("r")
	f.verify()
	f.has(8)
	f.clock.Set(noon.Add(2 * time.Hour))
	f.has(0)
	_, err = f.tryDraw(toDraw{Amount: 1})
	require.ErrorIs(t, err, budget.ErrExceeded)
}

// By a clock that was ahead units are drawn of a lot. After its repair the lot gets an end before that: it was not drawn after its end.
func TestVerify_KnowsAnEndThatWasSetAfterAClockRepair(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Reference: "a"})
	f.clock.Set(noon.Add(10 * time.Hour))
	f.draw(3)
	f.place("h", 2, day)
	f.clock.Set(noon.Add(time.Hour))
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.ClockState, error) {
		return f.ledger.RepairClock(ctx, tx, "ann", budget.Note{})
	})
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
		return f.book.SetEnd(ctx, tx, wallet.LotEnd{Wallet: "ann", Reference: "a", Expires: noon.Add(2 * time.Hour)})
	})
	require.NoError(t, err)
	f.verify()
	f.clock.Advance(30 * time.Minute)
	f.draw(1)
	f.clock.Set(noon.Add(2 * time.Hour))
	f.has(0)
	f.verify()
	_, err = f.pool.Exec(t.Context(), "update metered.lot_rows set expires_at = $1", noon.Add(80*time.Minute))
	require.NoError(t, err)
	r, err := f.ledger.Verify(t.Context(), f.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Len(t, r.Differences, 2, "lots_end, and the draw after the repair")
	require.Equal(t, budget.Difference{Scope: "ann", Seq: 6, Field: "drawn of lot 1", Got: "2026-11-21T13:30:00+00:00", Want: "before its end, 2026-11-21T13:20:00+00:00"}, r.Differences[1])
	_, err = f.pool.Exec(t.Context(), "update metered.lot_rows set expires_at = $1", noon.Add(2*time.Hour))
	require.NoError(t, err)
}

// An answer that rests on a snapshot from before the grant is not final.
func TestGrant_RepeatedAfterTheLotsEndInAnOldSnapshotIsRetryable(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		f := setUp(t, wallet.Config{})
		tx, err := f.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "select")
		require.NoError(t, err)
		g := wallet.Grant{Wallet: "ann", Amount: 10, Reference: "a", Ends: wallet.At(noon.Add(time.Hour))}
		f.grant(g)
		f.clock.Set(noon.Add(time.Hour))
		_, err = f.book.Grant(t.Context(), tx, g)
		require.True(t, metered.Retryable(err), "%v", err)
		require.NoError(t, tx.Rollback(t.Context()))
		require.True(t, f.grant(g).Replayed)
	}
}

// A closed child's own lots go when it is forgotten: a scope of that name begins anew.
func TestPurge_ForgetsAClosedChildsLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10})
	carver, err := leases.NewCarver(f.ledger)
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
		return carver.Carve(ctx, tx, leases.Carving{From: f.book.Charge("ann", 5), Child: "run", TTL: day})
	})
	require.NoError(t, err)
	f.grant(wallet.Grant{Wallet: "run", Amount: 7, Reference: "a", Ends: wallet.After(time.Hour)})
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
		return f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: "run", Reference: "a", Cap: 7, For: time.Hour})
	})
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
		return carver.End(ctx, tx, "run", budget.Note{})
	})
	require.NoError(t, err)
	f.clock.Advance(100 * day)
	_, err = purge.Leases.Delete(t.Context(), f.pool, purge.Options{OlderThan: day}) // with its lease there it stays closed
	require.NoError(t, err)
	_, err = f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: day, Forget: func(scope string) bool { return scope == "run" }})
	require.NoError(t, err)
	require.Zero(t, f.expire().Ended)
	require.Zero(t, pgtest.Value[int64](t, f.pool, "select (select count(*) from metered.lots where scope = 'run') + (select count(*) from metered.ledger where scope = 'run')"))
	require.False(t, f.grant(wallet.Grant{Wallet: "run", Amount: 7, Reference: "a"}).Replayed)
}

// How long a lot lasts is never a way back: a month less 30 days can be.
func TestGrant_OfATimeThatGoesBackIsRefused(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Reference: "a"})
	for _, sql := range []string{
		`select metered.grant_lot('ann', null, row(10, null, null, '', 0, null, null, 5, $1, null)::metered.new_lot, false, 1000, null)`,
		`select metered.grant_lot('ann', null, row(10, null, null, '', 0, null, null, null, null, $1)::metered.new_lot, false, 1000, null)`,
		`select metered.roll_over('ann', null, row(null, 'a', 5, $1)::metered.lot_rollover, '{}', 1000, null)`,
	} {
		for _, goes := range []string{"-1 mon 30 days 1 us", "1 mon -29 days", "1 day -1 us", "-1 s", "infinity"} {
			_, err := f.pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol, goes)
			var answer *pgconn.PgError
			require.ErrorAs(t, err, &answer, "%s: %s", goes, sql)
			require.Contains(t, []string{"22023", "22007", "22008"}, answer.Code)
		}
		_, err := f.pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol, "1 mon 1 day 1 us")
		require.NoError(t, err)
	}
}

// Units that a child spent beyond its carving are charged to its parent's lots, and not to lots that have ended.
func TestCarve_OverspentUnitsAreOfNoLotThatHasEnded(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 10, Reference: "ever"})
	carver, err := leases.NewCarver(f.ledger)
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
		return carver.Carve(ctx, tx, leases.Carving{From: f.book.Charge("ann", 2), Child: "run", TTL: day})
	})
	require.NoError(t, err)
	_, err = f.ledger.ChargeNow(t.Context(), f.pool, budget.Charge{Scope: "run", Amount: 5, Limits: []budget.Limit{budget.Lifetime(5)}})
	require.NoError(t, err)
	f.clock.Set(noon.Add(time.Hour))
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
		return carver.End(ctx, tx, "run", budget.Note{})
	})
	require.NoError(t, err)
	f.verify()
	f.has(7)
	require.Equal(t, map[string]int64{"ever": 7}, f.left())
}

// A refund also pays back held overdraft, where some of its units go on in a new lot because their lot has ended.
func TestRefund_PaysBackHeldOverdraftThoughPartOfItIsLate(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 20, LateRefunds: 2 * time.Hour})
	f.grant(wallet.Grant{Amount: 5, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 7, Reference: "ever"})
	d := f.draw(12)
	f.place("r", 2, day)
	f.clock.Set(noon.Add(time.Hour))
	f.refund(d.Seq, 12)
	f.verify()
	f.capture(holds.Capture{IDs: []string{"r"}, All: true})
	require.EqualValues(t, 10, f.balance().Units)
	f.refund(f.draw(10).Seq, 10)
	f.verify()
}
