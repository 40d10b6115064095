package cells_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// A tenant's name has up to four parts. None of its scopes gets a first entry in the cell that it left,
// and scopes of the names before and beside it do.
func TestMove_OfNamesOfUpToFourPartsLeavesNoWayBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t))
	r := w.router()
	for _, tenant := range []string{"a", "b/b", "c/c/c", "d/d/d/d"} {
		old, err := w.router().Client(tenant)
		require.NoError(t, err)
		charge := func(scope string) error {
			return pgx.BeginFunc(t.Context(), w.pools[0], func(tx pgx.Tx) error {
				_, err := old.Budget.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: 1})
				return err
			})
		}
		w.move(r, tenant, 1-r.First(tenant))
		require.ErrorIs(t, charge(tenant), cells.ErrMoved, tenant)
		require.ErrorIs(t, charge(tenant+"/x"), cells.ErrMoved, tenant)
		require.ErrorIs(t, charge(tenant+"/x/y"), cells.ErrMoved, tenant)
		require.NoError(t, charge(tenant+"x"), tenant)
	}
}

// A process finishes a move just when another takes it back. The new cell's word decides: the rows
// arrive in one cell.
func TestMove_IsNotTakenBackOnceItsRowsArrive(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t), database(t))
	r := w.router()
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "acme", Amount: 7})
		return err
	})
	from := w.lives("acme")
	died := newMover(t, w)
	died.dies(1, true, func() {})
	require.Error(t, died.Move(t.Context(), cells.Move{Tenant: "acme", To: 1 - from}), "the rows are packed")

	finishes := newMover(t, w)
	arrives, goOn := make(chan struct{}), make(chan struct{})
	finishes.wires[1-from].Once(commits, func(f *pgtest.Flush) {
		f.Deliver = func() {
			close(arrives)
			<-goOn
			_ = f.Pass()
		}
	})
	finished := pgtest.Going(func() error { _, err := finishes.Recover(t.Context()); return err })
	<-arrives
	took := pgtest.Going(func() error {
		return w.router().Move(t.Context(), cells.Move{Tenant: "acme", To: from, LockTimeout: time.Minute})
	})
	var early bool
	pgtest.WaitFor(t, "the move back", func() bool {
		early = len(took) > 0
		return early || pgtest.Queued(t, w.pools[1-from]) > 0
	})
	close(goOn)
	require.False(t, early, "it waits for the new cell's word")
	require.NoError(t, <-finished)
	require.NoError(t, <-took)
	require.Equal(t, from, w.lives("acme"))
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		u, err := c.Budget.Usage(t.Context(), tx, budget.Query{Scope: "acme"})
		require.NoError(t, err)
		require.EqualValues(t, 7, u[0].Spent)
		return err
	})
	w.verified()
}

// A lease that was open when its tenant moved is spent by nobody who knew it: its fence is one of the
// new cell, whose settlement waits for the spends there.
func TestMove_AnOpenLeaseIsFencedAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t))
	r := w.router()
	var no, fence int64
	in(t, r, "acme", func(_ *metered.Client, tx pgx.Tx) error {
		return tx.QueryRow(t.Context(), fmt.Sprintf(`select no, fence from %[1]s.open_lease(row('acme/hot', null, 9, 0, '{}', null, null, null, null)::%[1]s.new_charge,
			row('rows', 'me', 1, 1, '1 hour'::interval, null)::%[1]s.lease_terms, '1 min', 5000)`, schemaOf(t, tx))).Scan(&no, &fence)
	})
	spend := func(fence int64) (spent bool) {
		in(t, r, "acme", func(_ *metered.Client, tx pgx.Tx) error {
			spent = pgtest.Value[bool](t, tx, `select `+schemaOf(t, tx)+`.spend($1, $2, (select coalesce(sum(s.amount), 0)::bigint
				from `+schemaOf(t, tx)+`.lease_spends s), 1, 'acme/hot', null) is not null`, no, fence)
			return nil
		})
		return spent
	}
	require.True(t, spend(fence))
	w.move(r, "acme", 1-r.First("acme"))
	require.False(t, spend(fence), "by the old fence")
	anew := pgtest.Value[int64](t, w.pools[0], `select fence from `+w.schemas[w.lives("acme")]+`.leases`)
	require.True(t, spend(anew))

	schema := w.schemas[w.lives("acme")]
	spends, err := w.pools[0].Begin(t.Context())
	require.NoError(t, err)
	require.True(t, pgtest.Value[bool](t, spends, `select `+schema+`.spend($1, $2, 2, 1, 'acme/hot', null) is not null`, no, anew))
	settled := pgtest.Going(func() error {
		var status string
		var spent int64
		err := w.pools[0].QueryRow(t.Context(), `select status, spent from `+schema+`.settle_lease($1, 'me', null, 60000, null, null)`, no).Scan(&status, &spent)
		if err == nil && (status != "settled" || spent != 3) {
			err = fmt.Errorf("%s with %d", status, spent)
		}
		return err
	})
	pgtest.WaitQueued(t, w.pools[0], 1)
	require.NoError(t, spends.Commit(t.Context()))
	require.NoError(t, <-settled)
	w.verified()
}

// An id that is refused since its record may have been purged is refused in the new cell, too, and in
// no cell because of a tenant's move does an older one pass.
func TestMove_TakesTheHorizonsAlong(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, database(t))
	r := w.router()
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "acme", Amount: 1})
		return err
	})
	first, now := w.lives("acme"), time.Now()
	for by, purged := range []time.Duration{time.Hour, 3 * time.Hour, time.Minute} {
		for _, table := range []string{"operations_horizon", "holds_horizon"} {
			_, err := w.pools[0].Exec(t.Context(), `update `+w.schemas[(first+by)%3]+`.`+table+` set at = $1`, now.Add(-purged))
			require.NoError(t, err)
		}
	}
	refuses := func(age time.Duration, want bool) {
		t.Helper()
		_, err := do(t.Context(), r, metered.Command{ID: fmt.Sprint(age), Tenant: "acme", IssuedAt: now.Add(-age)},
			func(context.Context, *metered.Tx) (int, error) { return 0, context.Canceled })
		require.Equal(t, want, errors.Is(err, budget.ErrRetired), "%v: %v", age, err)
		id := idOf(now.Add(-age))
		err = patiently(t.Context(), r, "acme", func(ctx context.Context, c *metered.Client) error {
			return c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
				_, err := c.Holds.Place(ctx, tx, holds.Placement{Tenant: "acme", ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "acme", Amount: 1}}})
				return errors.Join(err, context.Canceled)
			})
		})
		require.Equal(t, want, errors.Is(err, holds.ErrRetired), "%v: %v", age, err)
	}
	refuses(2*time.Hour, true)
	refuses(30*time.Minute, false)
	w.move(r, "acme", (first+1)%3) // it has purged less
	refuses(2*time.Hour, true)
	refuses(30*time.Minute, false)
	w.move(r, "acme", (first+2)%3) // it has purged more
	refuses(30*time.Minute, true)
	refuses(0, false)
}

// idOf is an id that carries a time: a UUIDv7.
func idOf(at time.Time) string {
	hex := fmt.Sprintf("%012x", at.UnixMilli())
	return hex[:8] + "-" + hex[8:] + "-7000-8000-000000000000"
}

// Periods of a plan that were skipped, since nobody touched the wallet, are known in another cell by their references, and the
// plan goes on there.
func TestMove_TakesSkippedPeriodsAlong(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t))
	r := w.router()
	clock := pgtest.SetClock(t, w.pools[0], pgtest.Tomorrow(12).AddDate(0, 0, -60))
	calls := func(fn func(book *wallet.Book, tx pgx.Tx) error) {
		t.Helper()
		in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
			book, err := wallet.New(c.Budget, wallet.Config{})
			require.NoError(t, err)
			return fn(book, tx)
		})
	}
	calls(func(book *wallet.Book, tx pgx.Tx) error {
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "acme", Amount: 5, Reference: "plan", Ends: wallet.EachPeriod(budget.Per(1, budget.Day, nil, time.Time{}).Period)})
		return err
	})
	clock.Advance(5 * 24 * time.Hour)
	var shown string
	left := func() (units int64) {
		calls(func(book *wallet.Book, tx pgx.Tx) error {
			b, err := book.Balance(t.Context(), tx, "acme")
			shown, units = b.Lots[0].Reference, b.Units
			return err
		})
		return units
	}
	draw := func() {
		in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
			book, err := wallet.New(c.Budget, wallet.Config{})
			require.NoError(t, err)
			_, err = c.Budget.Charge(t.Context(), tx, book.Charge("acme", 2))
			return err
		})
	}
	require.EqualValues(t, 5, left())
	skipped := shown
	clock.Advance(55 * 24 * time.Hour)
	draw()
	w.move(r, "acme", 1-r.First("acme"))
	require.EqualValues(t, 3, left())
	calls(func(book *wallet.Book, tx pgx.Tx) error {
		revoked, err := book.Revoke(t.Context(), tx, wallet.Revoke{Wallet: "acme", Reference: skipped})
		require.Zero(t, revoked.Amount)
		return err
	})
	clock.Advance(24 * time.Hour)
	draw()
	require.EqualValues(t, 3, left())
	w.verified()
}
