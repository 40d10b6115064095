package inspect_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// Plans say what they do next, whether their wallet was written to since they renewed or not.
func TestPlans_SayWhatTheyDoNext(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	nine := time.Date(2031, 3, 10, 9, 0, 0, 0, time.UTC)
	clock := pgtest.SetClock(t, f.pool, nine)
	book, err := wallet.New(f.client.Budget, wallet.Config{})
	require.NoError(t, err)
	month := budget.Per(1, budget.Month, time.UTC, time.Time{}).Period
	fortnight := budget.Per(1, budget.Every(2, budget.Week), time.UTC, nine).Period
	hours := budget.PerPeriod(1, 30*24*time.Hour, nine).Period
	grant := func(g wallet.Grant) {
		f.tx(func(tx pgx.Tx) error { _, err := book.Grant(t.Context(), tx, g); return err })
	}
	change := func(c wallet.Change) {
		f.tx(func(tx pgx.Tx) error { _, err := book.Change(t.Context(), tx, c); return err })
	}
	grant(wallet.Grant{Wallet: "ann", Amount: 300, Reference: "pro", Ends: wallet.EachPeriod(month), Category: "included"})
	grant(wallet.Grant{Wallet: "ann", Amount: 5, Reference: "gift"})
	grant(wallet.Grant{Wallet: "ben", Amount: 300, Reference: "pro", Ends: wallet.EachPeriod(month)})
	grant(wallet.Grant{Wallet: "eve", Amount: 40, Reference: "pictures", Ends: wallet.EachPeriod(fortnight), Uses: []string{"picture"}})
	grant(wallet.Grant{Wallet: "joe", Amount: 7, Reference: "later", Ends: wallet.EachPeriod(hours), Starts: nine.Add(48 * time.Hour)})
	grant(wallet.Grant{Wallet: "kim", Amount: 9, Reference: "x", Ends: wallet.EachPeriod(month)})
	f.tx(func(tx pgx.Tx) error {
		_, err := f.client.Budget.Charge(t.Context(), tx, book.Charge("ben", 100))
		return err
	})
	small := wallet.Grant{Amount: 30, Reference: "small", Ends: wallet.EachPeriod(month)}
	change(wallet.Change{Wallet: "ben", Reference: "down", Plan: "pro", To: &small, AtEnd: true})
	change(wallet.Change{Wallet: "eve", Reference: "cancel", Plan: "pictures", AtEnd: true})
	change(wallet.Change{Wallet: "kim", Reference: "cancel", Plan: "x", AtEnd: true})
	f.tx(func(tx pgx.Tx) error {
		_, err := f.client.Budget.Charge(t.Context(), tx, book.Charge("kim", 9))
		return err
	})
	wallets := []string{"ann", "ben", "eve", "joe", "kim", "nobody"}
	april, may := time.Date(2031, 4, 1, 0, 0, 0, 0, time.UTC), time.Date(2031, 5, 1, 0, 0, 0, 0, time.UTC)
	read := func(names inspect.PlanNames, want ...inspect.Plan) {
		t.Helper()
		f.read(func(ctx context.Context, r *inspect.Reader) {
			plans, err := r.Plans(ctx, wallets, names)
			require.NoError(t, err)
			require.Equal(t, want, append([]inspect.Plan(nil), plans...))
		})
	}
	planned := func(names inspect.PlanNames, want ...string) {
		t.Helper()
		f.read(func(ctx context.Context, r *inspect.Reader) {
			list, err := r.Scopes(ctx, inspect.ScopeFilter{Kind: inspect.Planned, Plan: names})
			require.NoError(t, err)
			var found []string
			for _, s := range list.Scopes {
				found = append(found, s.Scope)
			}
			require.Equal(t, want, found)
		})
	}
	later := inspect.Plan{Plan: "later", Wallet: "joe", State: inspect.PlanBegins, At: nine.Add(48 * time.Hour), Period: hours, Amount: 7}
	pictures := inspect.Plan{Plan: "pictures", Wallet: "eve", State: inspect.PlanEnds, At: nine.AddDate(0, 0, 14)}
	ben := inspect.Plan{Plan: "pro", Wallet: "ben", State: inspect.PlanEnds, At: april, Units: 200}
	ann := inspect.Plan{Plan: "pro", Wallet: "ann", State: inspect.PlanRenews, At: april, Period: month, Amount: 300, Category: "included", Units: 305}
	tiny := inspect.Plan{Plan: "small", Wallet: "ben", State: inspect.PlanBegins, At: april, Period: month, Amount: 30, Units: 200}
	read("*", later, pictures, ben, ann, tiny)
	read("pro", ben, ann)
	read("p*", pictures, ben, ann)
	read("pr")
	planned("", "ann", "ben", "eve", "joe")
	planned("small", "ben")
	planned("pr")

	// Nobody wrote to the wallets since.
	clock.Set(april.AddDate(0, 0, 20))
	later.State, later.At = inspect.PlanRenews, nine.AddDate(0, 0, 60)
	ann.At, tiny.State, tiny.At, tiny.Units = may, inspect.PlanRenews, may, 30
	later.Units = 7
	read("*", later, ann, tiny)
	planned("*", "ann", "ben", "joe")

	// What ends within a time is the same, written or not.
	ending := func(prefix string, want ...inspect.Ending) {
		t.Helper()
		for range 2 {
			f.read(func(ctx context.Context, r *inspect.Reader) {
				w := inspect.Walk{Prefix: prefix, Within: 11 * 24 * time.Hour, Keep: 10}
				more, err := w.More(ctx, r)
				require.NoError(t, err)
				require.False(t, more)
				found := w.Ending
				for i := range found {
					found[i].Lot = 0
				}
				require.Equal(t, want, found)
			})
			_, err := book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
			require.NoError(t, err)
		}
	}
	ending("", inspect.Ending{Wallet: "ann", Reference: "pro 2031-04-01T00:00:00Z", Units: 300, Expires: may},
		inspect.Ending{Wallet: "ben", Reference: "small", Units: 30, Expires: may})
	ending("be", inspect.Ending{Wallet: "ben", Reference: "small", Units: 30, Expires: may})
	read("*", later, ann, tiny)
}
