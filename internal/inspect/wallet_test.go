package inspect_test

import (
	"context"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// tx runs fn in a transaction of the owner's.
func (f *fixture) tx(fn func(tx pgx.Tx) error) {
	f.Helper()
	require.NoError(f, pgx.BeginFunc(f.Context(), f.pool, fn))
}

func TestWallet_HasUnitsLotsAndTheNextEnd(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.pool, pgtest.Tomorrow(9))
	book, err := wallet.New(f.client.Budget, wallet.Config{Overdraft: 100})
	require.NoError(t, err)
	grant := func(reference, category string, amount int64, lasts time.Duration) {
		f.tx(func(tx pgx.Tx) error {
			g := wallet.Grant{Wallet: "ann", Amount: amount, Reference: reference, Category: category}
			if lasts > 0 {
				g.Ends = wallet.After(lasts)
			}
			_, err := book.Grant(t.Context(), tx, g)
			return err
		})
	}
	grant("gift", "promotional", 10, time.Hour)
	grant("paid-1", "paid", 100, 48*time.Hour)
	grant("paid-2", "paid", 50, 48*time.Hour)
	grant("kept", "paid", 5, 0)
	held, err := holds.New(f.client.Budget, holds.Config{MaxTTL: 100 * time.Hour, MaxLifetime: 100 * time.Hour})
	require.NoError(t, err)
	f.tx(func(tx pgx.Tx) error {
		_, err := held.Place(t.Context(), tx, holds.Placement{ID: "h", TTL: 100 * time.Hour, Lines: []holds.Line{book.Line("ann", 30)}})
		return err
	})
	f.charge("c", "org/none", 1)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		d, err := r.Scope(ctx, "ann")
		require.NoError(t, err)
		require.True(t, d.Lots)
		w := d.Wallet
		require.Equal(t, []int64{135, 30, 0, 130}, []int64{w.Units, w.Held, w.Overdrawn, w.NextUnits}, "the gift is held, and 20 units of the first payment")
		require.Equal(t, w.Now.Add(48*time.Hour), w.NextEnd)
		require.Equal(t, []inspect.CategoryRest{{Category: "paid", Units: 135, Held: 20}, {Category: "promotional", Held: 10}}, w.Categories)
		none, err := r.Scope(ctx, "org/none")
		require.NoError(t, err)
		require.Nil(t, none.Wallet)
		require.False(t, none.Lots)
		missing, err := r.Wallet(ctx, "nobody")
		require.NoError(t, err)
		require.Nil(t, missing)
		list, err := r.Scopes(ctx, inspect.ScopeFilter{Limit: 0})
		require.NoError(t, err)
		require.Equal(t, []bool{true, false}, []bool{list.Scopes[0].Lots, list.Scopes[1].Lots})
		o, err := r.Overview(ctx)
		require.NoError(t, err)
		require.Zero(t, o.LotsDue.N)
		e, err := r.Explain(ctx, budget.Charge{Scope: "ann", Amount: 136, Limits: []budget.Limit{budget.Prepaid(0)}})
		require.NoError(t, err)
		require.False(t, e.Fits)
		require.EqualValues(t, 135, e.Wallet.Units)
		require.Len(t, e.Wallet.Lots, 4)
	})

	clock.Advance(49 * time.Hour)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		w, err := r.Wallet(ctx, "ann")
		require.NoError(t, err)
		require.Equal(t, []int64{5, 30}, []int64{w.Units, w.Held})
		require.True(t, w.NextEnd.IsZero())
		page, err := r.Lots(ctx, "ann", "", 3)
		require.NoError(t, err)
		rest, err := r.Lots(ctx, "ann", page.Next, 3)
		require.NoError(t, err)
		require.Empty(t, rest.Next)
		var names []string
		var states []inspect.LotState
		for _, l := range append(page.Lots, rest.Lots...) {
			names, states = append(names, l.Reference), append(states, l.State)
			require.Equal(t, l.Granted, l.Rest+l.Drawn+l.Held+l.Lapsed+l.Revoked+l.Rolled)
		}
		require.Equal(t, []string{"kept", "paid-2", "paid-1", "gift"}, names)
		require.Equal(t, []inspect.LotState{inspect.LotOpen, inspect.LotEnded, inspect.LotEnded, inspect.LotHeld}, states)
		o, err := r.Overview(ctx)
		require.NoError(t, err)
		require.Equal(t, inspect.Count{N: 2, Kind: inspect.Exact}, o.LotsDue)
		require.Equal(t, time.Hour, o.LotLag)
	})
	_, err = book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		o, err := r.Overview(ctx)
		require.NoError(t, err)
		require.Zero(t, o.LotsDue.N)
		page, err := r.Lots(ctx, "ann", "", 0)
		require.NoError(t, err)
		require.Equal(t, []int64{50, 0}, []int64{page.Lots[1].Lapsed, page.Lots[1].Rest})
	})
	starts := clock.Now().Add(time.Hour)
	require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "ann", Amount: 7, Reference: "later", Starts: starts})
		return err
	}))
	f.read(func(ctx context.Context, r *inspect.Reader) {
		page, err := r.Lots(ctx, "ann", "", 1)
		require.NoError(t, err)
		l := page.Lots[0]
		require.Equal(t, []any{"later", inspect.LotPending, int64(7), int64(7), int64(0), starts}, []any{l.Reference, l.State, l.Granted, l.Pending, l.Rest, l.GrantedAt})
	})
}

// The last entry lists the reported thresholds by the kind of the limit, its name and the threshold's.
func TestScope_SaysWhichThresholdsWereReached(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	nine := pgtest.Tomorrow(9)
	clock := pgtest.SetClock(t, f.pool, nine)
	var heard []string
	ledger, err := budget.New(budget.Config{OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
		heard = append(heard, c.Limit.Name+"/"+c.Threshold.Name)
		return nil
	}})
	require.NoError(t, err)
	f.tx(func(tx pgx.Tx) error {
		_, err := ledger.Charge(t.Context(), tx, budget.Charge{Scope: "org/a", Amount: 80, Limits: []budget.Limit{
			budget.Per(100, budget.Day, time.UTC, time.Time{}).Named("plan").WithThresholds(budget.Threshold{Name: "80 %", Percent: 80}, budget.Threshold{Name: "over"}),
			budget.PerPeriod(90, time.Hour, nine).Named("hour").WithThresholds(budget.Threshold{Name: "10 left", Left: 10}),
			budget.Lifetime(100).Named("credit").WithThresholds(budget.Threshold{Name: "low", Left: 20, Rearm: 5}, budget.Threshold{Name: "spent", Left: 20, Rearm: 5, Spent: true}),
			budget.PerWindow(160, time.Hour).Named("hourly").WithThresholds(budget.Threshold{Name: "half", Percent: 50, Spent: true}),
		}})
		return err
	})
	f.tx(func(tx pgx.Tx) error { // on the day after, it has no threshold that was reached
		_, err := ledger.Charge(t.Context(), tx, budget.Charge{Scope: "org/b", Amount: 80, Limits: []budget.Limit{
			budget.Per(100, budget.Day, time.UTC, time.Time{}).Named("plan").WithThresholds(budget.Threshold{Name: "80 %", Percent: 80})}})
		heard = heard[:5]
		return err
	})
	reached := func(scopes ...string) {
		f.read(func(ctx context.Context, r *inspect.Reader) {
			list, err := r.Scopes(ctx, inspect.ScopeFilter{Kind: inspect.Reached})
			require.NoError(t, err)
			var names []string
			for _, s := range list.Scopes {
				names = append(names, s.Scope)
				require.NotEmpty(t, s.Told)
			}
			require.Equal(t, scopes, names)
		})
	}
	reached("org/a", "org/b")
	require.Equal(t, []string{"plan/80 %", "hour/10 left", "credit/low", "credit/spent", "hourly/half"}, heard)
	var told map[string]any
	require.NoError(t, f.role.QueryRow(t.Context(), `select told from metered.scopes where scope = 'org/a'`).Scan(&told))
	require.Len(t, told, 5)
	clock.Advance(2 * time.Hour)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		d, err := r.Scope(ctx, "org/a")
		require.NoError(t, err)
		back := int64(75)
		require.Equal(t, []inspect.Told{
			{Name: "credit/low", Of: "lifetime", Rearm: &back}, {Name: "credit/spent", Of: "lifetime", Spent: true, Rearm: &back}, {Name: "hourly/half", Of: "window", Spent: true},
			{Name: "plan/80 %", Of: "period", Until: nine.Truncate(24*time.Hour).AddDate(0, 0, 1)},
		}, d.Told, "a new period reports again")
	})
	clock.Advance(24 * time.Hour)
	reached("org/a")
}

// A walk goes without the usage of limits that cannot be nearly out by the scope's last entry: it finds what
// the usage of each limit finds, page by page, whatever happened and however long ago.
func TestWalk_FindsAllThatAreNearlyOut(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.pool, pgtest.Tomorrow(9))
	book, err := wallet.New(f.client.Budget, wallet.Config{})
	require.NoError(t, err)
	held, err := holds.New(f.client.Budget, holds.Config{})
	require.NoError(t, err)
	random := rand.New(rand.NewPCG(48, 1))
	const scopes = 120
	for step := range 6 {
		f.tx(func(tx pgx.Tx) error {
			var charges []budget.Charge
			for i := range scopes {
				name, amount := fmt.Sprintf("s/%03d", i), 1+random.Int64N(60)
				switch random.IntN(9) {
				case 0, 1, 2:
					charges = append(charges, budget.Charge{Scope: name, Amount: amount})
				case 3:
					if _, err := f.client.Budget.Credit(t.Context(), tx, budget.Credit{Scope: name, Amount: amount}); err != nil {
						return err
					}
				case 4:
					p := holds.Placement{ID: fmt.Sprint(i, "/", step), TTL: time.Duration(1+random.IntN(60)) * time.Minute,
						Lines: []holds.Line{{Scope: name, Amount: amount, AtLeast: amount / 2}}}
					if _, err := held.Place(t.Context(), tx, p); err != nil {
						return err
					}
				case 5:
					g := wallet.Grant{Wallet: fmt.Sprintf("w/%03d", i), Amount: amount, Reference: fmt.Sprint(step), Ends: wallet.After(time.Hour)}
					if _, err := book.Grant(t.Context(), tx, g); err != nil {
						return err
					}
				}
			}
			_, err := f.client.Budget.ChargeEach(t.Context(), tx, charges...)
			return err
		})
		clock.Advance(20*time.Minute + time.Microsecond)
	}
	// The last entries of these are old, and charges that are no entries yet are young.
	execute(t, f.pool, "update metered.ledger set tallied = true where scope < 's/020'")
	for i := range 20 {
		f.charge(fmt.Sprint("tally ", i), fmt.Sprintf("s/%03d", i), 1+random.Int64N(60))
	}
	require.NotZero(t, pgtest.Count(t, f.pool, "metered.tallies"))
	limits := func(scope string) []budget.Limit {
		of := rand.New(rand.NewPCG(48, uint64(crc32.ChecksumIEEE([]byte(scope)))))
		return []budget.Limit{budget.PerWindow(1+of.Int64N(90), time.Hour), budget.PerWindow(1+of.Int64N(90), 10*time.Minute),
			budget.Per(1+of.Int64N(90), budget.Day, time.UTC, time.Time{}), budget.Lifetime(1 + of.Int64N(90)), budget.Prepaid(of.Int64N(20))}
	}
	f.read(func(ctx context.Context, r *inspect.Reader) {
		list, err := r.Scopes(ctx, inspect.ScopeFilter{Limit: inspect.MaxPage})
		require.NoError(t, err)
		var names []string
		for _, s := range list.Scopes {
			names = append(names, s.Scope)
		}
		rooms, err := r.Rooms(ctx, names, limits)
		require.NoError(t, err)
		w := inspect.Walk{Limits: limits, Keep: 5 * len(names)}
		pages := 0
		for more := true; more; pages++ {
			more, err = w.More(ctx, r)
			require.NoError(t, err)
		}
		require.Equal(t, len(names), w.Scopes)
		require.Greater(t, pages, 1, "a page reads so many usages")
		nearly := slices.DeleteFunc(rooms, func(room inspect.Room) bool { return !room.NearlyOut() })
		require.ElementsMatch(t, nearly, append(w.Nearly, w.Credit...))
		t.Log(len(names), len(nearly), pages)
	})
}
