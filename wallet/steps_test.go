package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/wallet"
)

// Holds with minima that fell due in a wallet, between ends of its lots, are written in steps by calls in transactions of the library's, and
// so are sums of more holds than one call adds up. What they leave is what a sweep leaves, and what a Balance said before anybody wrote.
func TestBacklog_OfAWalletIsWrittenInStepsThatStay(t *testing.T) {
	t.Parallel()
	t.Run("minima", func(t *testing.T) {
		t.Parallel()
		backlogInSteps(t, setUp(t, wallet.Config{}), 2)
	})
	t.Run("sums", func(t *testing.T) {
		t.Parallel()
		f := setUp(t, wallet.Config{})
		_, err := f.pool.Exec(t.Context(), "create or replace function metered._lines_per_step() returns int language sql immutable as 'select 50'")
		require.NoError(t, err)
		backlogInSteps(t, f, 0)
	})
}

func backlogInSteps(t *testing.T, f *fixture, least int64) {
	c := pgtest.NewClient(t, f.pool, metered.Config{})
	for _, scope := range []string{"called", "swept"} {
		f.grant(wallet.Grant{Wallet: scope, Amount: 60, Ends: wallet.At(noon.Add(time.Hour + 40*time.Microsecond))})
		f.grant(wallet.Grant{Wallet: scope, Amount: 30, Ends: wallet.At(noon.Add(time.Hour + 60*time.Microsecond))})
		f.grant(wallet.Grant{Wallet: scope, Amount: 500, Reference: "paid"})
		f.holdsDue(scope, 120, least, f.book.Line(scope, 3))
	}
	f.clock.Advance(2 * time.Hour)
	units := func(scope string) (all []int64) { // of the wallet, and of each lot
		b, err := f.book.Balance(t.Context(), f.pool, scope)
		require.NoError(t, err)
		all = append(all, b.Units, b.Held)
		for _, l := range b.Lots {
			all = append(all, l.Units)
		}
		return all
	}
	read := units("called")
	require.Equal(t, read, units("swept"))
	draw := func(ctx context.Context, tx pgx.Tx) error {
		_, err := f.drawIn(ctx, tx, toDraw{Wallet: "called", Amount: 1})
		return err
	}
	for _, call := range []func(ctx context.Context, tx pgx.Tx) error{draw, func(ctx context.Context, tx pgx.Tx) error {
		return f.calledOn(false)["grant"](ctx, tx, "called")
	}} {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (struct{}, error) { return struct{}{}, call(ctx, tx) })
		require.ErrorIs(t, err, budget.ErrBusy)
		require.ErrorContains(t, err, "sweep it")
	}
	require.Equal(t, 123, f.lastSeq("called"), "nothing is written")
	var more bool
	require.NoError(t, f.pool.QueryRow(t.Context(), "select metered.catch_up('called', 1000)").Scan(&more))
	require.True(t, more)
	require.Equal(t, read, units("called"), "a step, as after a crash")
	require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, draw))
	f.sweeps()
	require.Equal(t, read, units("swept"))
	read[0]--
	read[2]--
	require.Equal(t, read, units("called"))
}

// Lots that no call leaves to a later one are written in steps, too: lots that begin, lots whose units go on again, or share a cap, or are
// for a use, and the periods of a plan before a hold falls due. A step writes about 25 of them.
func TestBacklog_LotsThatNoCallLeavesAreWrittenInSteps(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 1000})
	c := pgtest.NewClient(t, f.pool, metered.Config{})
	roll := wallet.Roll{Cap: 5, Lasts: wallet.For(day)}
	again, shared := roll, roll
	again.Times, shared.Shared, shared.Cap = 5, true, 100
	kinds := map[string]func(scope string){
		"go on again": func(scope string) { f.lotsEnd(scope, 40, wallet.Grant{Roll: &again}) },
		"share a cap": func(scope string) { f.lotsEnd(scope, 40, wallet.Grant{Roll: &shared}) },
		"for a use":   func(scope string) { f.lotsEnd(scope, 40, wallet.Grant{Roll: &roll, Uses: []string{"images"}}) },
		"begin": func(scope string) {
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
				for i := 0; i < 40 && err == nil; i++ {
					_, err = f.book.Grant(ctx, tx, wallet.Grant{Wallet: scope, Amount: 5, Starts: noon.Add(time.Hour + time.Duration(i)*time.Microsecond)})
				}
				return struct{}{}, err
			})
			require.NoError(t, err)
		},
		"of a plan, and a hold": func(scope string) {
			f.clock.Set(noon.AddDate(0, 0, -60))
			f.grant(wallet.Grant{Wallet: scope, Amount: 5, Reference: "plan", Ends: wallet.EachPeriod(daily), Roll: &roll})
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
				return f.holds.Place(ctx, tx, holds.Placement{ID: scope, TTL: 50 * day, Lines: []holds.Line{f.book.Line(scope, 2)}})
			})
			require.NoError(t, err)
		},
		"of a plan that pays overdraft": func(scope string) {
			f.clock.Set(noon.AddDate(0, 0, -60))
			f.grant(wallet.Grant{Wallet: scope, Amount: 5, Reference: "plan", Ends: wallet.EachPeriod(daily)})
			_, err := f.tryDraw(toDraw{Wallet: scope, Amount: 805})
			require.NoError(t, err)
		},
	}
	for kind, fill := range kinds {
		f.clock.Set(noon)
		for _, scope := range []string{kind, "swept " + kind} {
			fill(scope)
			f.grant(wallet.Grant{Wallet: scope, Amount: 500, Reference: "paid"})
		}
	}
	f.clock.Set(noon.Add(2 * time.Hour))
	units := func(scope string) (all []int64) { // of the wallet, and of each lot
		b, err := f.book.Balance(t.Context(), f.pool, scope)
		require.NoError(t, err)
		all = append(all, b.Units, b.Held)
		for _, l := range b.Lots {
			all = append(all, l.Units)
		}
		return all
	}
	read := map[string][]int64{}
	for kind := range kinds {
		read[kind] = units(kind)
		draw := func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.drawIn(ctx, tx, toDraw{Wallet: kind, Amount: 1})
			return err
		}
		grant := func(ctx context.Context, tx pgx.Tx) error { return f.calledOn(false)["grant"](ctx, tx, kind) }
		before := f.lastSeq(kind)
		for _, call := range []func(ctx context.Context, tx pgx.Tx) error{draw, grant} {
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (struct{}, error) { return struct{}{}, call(ctx, tx) })
			require.ErrorIs(t, err, budget.ErrBusy, kind)
		}
		require.Equal(t, before, f.lastSeq(kind), "nothing is written")
		var more bool
		require.NoError(t, f.pool.QueryRow(t.Context(), "select metered.catch_up($1, 1000)", kind).Scan(&more))
		require.True(t, more, kind)
		require.InDelta(t, 50, f.lastSeq(kind)-before, 50, kind)
		require.Equal(t, read[kind], units(kind), "a step, as after a crash: %s", kind)
		require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, grant))
		read[kind][0] += 7
	}
	f.sweeps()
	for kind := range kinds {
		swept := units("swept " + kind)
		swept[0] += 7
		require.Equal(t, read[kind][:2], swept[:2], kind)
		require.Equal(t, read[kind][:2], units(kind)[:2], kind)
	}
}

// Due holds whose lots end between them cannot be one sum. Where more sums are due than one step writes, each step writes some.
func TestBacklog_SumsBetweenEndsOfLotsAreWrittenInSteps(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	c := pgtest.NewClient(t, f.pool, metered.Config{})
	f.grant(wallet.Grant{Amount: 7, Reference: "paid"})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
		for i := range 30 {
			ends := time.Hour + time.Duration(2*i)*time.Microsecond
			if _, err := f.book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 2, Ends: wallet.At(noon.Add(ends))}); err != nil {
				return struct{}{}, err
			}
			hold := holds.Placement{ID: fmt.Sprint(i), TTL: ends + time.Microsecond, Lines: []holds.Line{f.book.Line("ann", 2)}}
			if _, err := f.holds.Place(ctx, tx, hold); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})
	require.NoError(t, err)
	f.clock.Advance(2 * time.Hour)
	before := f.lastSeq("ann")
	grant := func(ctx context.Context, tx pgx.Tx) (struct{}, error) {
		return struct{}{}, f.calledOn(false)["grant"](ctx, tx, "ann")
	}
	_, err = do(f, grant)
	require.ErrorIs(t, err, budget.ErrBusy)
	var more bool
	require.NoError(t, f.pool.QueryRow(t.Context(), "select metered.catch_up('ann', 1000)").Scan(&more))
	require.True(t, more)
	require.Equal(t, before+2*25, f.lastSeq("ann"), "units of 25 sums are freed, and lapse")
	require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		_, err := grant(ctx, tx)
		return err
	}))
	require.Equal(t, before+2*30+1, f.lastSeq("ann"))
	b, err := f.book.Balance(t.Context(), f.pool, "ann")
	require.NoError(t, err)
	require.EqualValues(t, 14, b.Units)
}

// lastSeq is the number of a wallet's last entry.
func (f *fixture) lastSeq(scope string) (seq int) {
	f.Helper()
	require.NoError(f, f.pool.QueryRow(f.Context(), "select max(seq) from metered.ledger where scope = $1", scope).Scan(&seq))
	return seq
}

// However much is due, calls go through where no statement may last more than a second: their steps stay. A charge of another wallet
// waits for none of them.
func TestBacklog_CallsGoThroughWhereAStatementMayLastASecond(t *testing.T) {
	pgtest.InCI(t)
	t.Parallel()
	many := pgtest.Size(250, 100_000)
	for name, b := range map[string]struct {
		plain bool
		fill  func(f *fixture, scope string)
	}{
		"due holds": {true, func(f *fixture, scope string) { f.holdsDue(scope, many, 0, holds.Line{Scope: scope, Amount: 2}) }},
		"minima": {true, func(f *fixture, scope string) {
			f.holdsDue(scope, pgtest.Size(250, 20_000), 1, holds.Line{Scope: scope, Amount: 2})
		}},
		"due holds of a wallet": {false, func(f *fixture, scope string) { f.holdsDue(scope, many, 0, f.book.Line(scope, 2)) }},
		"minima of a wallet": {false, func(f *fixture, scope string) {
			f.holdsDue(scope, pgtest.Size(250, 5_000), 1, f.book.Line(scope, 2))
		}},
		"ended lots": {false, func(f *fixture, scope string) { f.lotsEnd(scope, pgtest.Size(400, 10_000), wallet.Grant{}) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Wallet: "other", Amount: 100})
			if !b.plain {
				f.grant(wallet.Grant{Wallet: "much", Amount: 1_000_000, Reference: "paid"})
			}
			b.fill(f, "much")
			f.clock.Advance(2 * time.Hour)
			_, err := f.pool.Exec(t.Context(), "analyze metered.ledger, metered.lot_rows, metered.lot_moves, metered.lot_holds, metered.hold_lines, metered.holds, metered.hold_events")
			require.NoError(t, err)
			pool := pgtest.Reopen(t, f.pool, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["statement_timeout"] = "1s" })
			c := pgtest.NewClient(t, pool, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})

			step, err := f.pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = step.Exec(t.Context(), "select metered.catch_up('much', 1000)")
			require.NoError(t, err)
			_, err = f.ledger.ChargeNow(t.Context(), f.pool, f.book.Charge("other", 1))
			require.NoError(t, err, "beside a step")
			require.NoError(t, step.Rollback(t.Context()))

			calls := f.calledOn(b.plain)
			names := []string{"charge", "place", "draw", "grant"}
			if b.plain {
				names = names[:2]
			}
			errs := make(chan error, len(names))
			for _, name := range names {
				go func() {
					var err error
					for range 20 { // on a busy machine a short statement may last longer
						err = c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error { return calls[name](ctx, tx, "much") })
						if sqlstate.Of(err) != sqlstate.QueryCanceled {
							break
						}
					}
					errs <- err
				}()
			}
			for range names {
				require.NoError(t, <-errs)
			}
		})
	}
}
