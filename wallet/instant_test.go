package wallet_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// More than one step writes may be due in one instant: lots of which units go on, or that begin, and holds with minima, or of a wallet that
// owes. Steps of calls and of sweeps write a part of it. What is left is due still, in its order: no balance moves, and the entries are
// those of one that was written at once.
func TestBacklog_OfOneInstantIsWrittenInParts(t *testing.T) {
	t.Parallel()
	const many, most = 13, 5
	first := -1
	f := setUp(t, wallet.Config{Overdraft: 1000})
	instant := noon.Add(time.Hour)
	lots := func(g wallet.Grant) func(ctx context.Context, tx pgx.Tx, i int) error {
		return func(ctx context.Context, tx pgx.Tx, i int) error {
			g := g
			g.Amount += int64(3 + i%4)
			_, err := f.book.Grant(ctx, tx, g)
			return err
		}
	}
	ends := func(g wallet.Grant) func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error {
		return func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error {
			g.Wallet, g.Ends = scope, wallet.At(instant)
			return lots(g)
		}
	}
	due := func(scope string, least int64) func(ctx context.Context, tx pgx.Tx, i int) error {
		return func(ctx context.Context, tx pgx.Tx, i int) error {
			line := f.book.Line(scope, 4)
			line.AtLeast = min(least*int64(1+i%3), 3)
			if least < 0 {
				line.AtLeast = int64(i % 2)
			}
			var before time.Duration
			if i == 1 { // before all lots
				before = time.Microsecond
			}
			_, err := f.holds.Place(ctx, tx, holds.Placement{ID: fmt.Sprint(scope, i), TTL: instant.Sub(noon) - before, Lines: []holds.Line{line}})
			return err
		}
	}
	roll := wallet.Roll{Cap: 5, Lasts: wallet.For(day), Times: 5}
	fills := map[string]func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error{
		"go on again": ends(wallet.Grant{Roll: &roll}),
		"share a cap": ends(wallet.Grant{Roll: &wallet.Roll{Cap: 100, Lasts: wallet.For(day), Shared: true}}),
		"for a use":   ends(wallet.Grant{Roll: &roll, Uses: []string{"images"}}),
		"begin": func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error {
			return lots(wallet.Grant{Wallet: scope, Starts: instant})
		},
		"end and begin": func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error {
			ends := ends(wallet.Grant{Roll: &roll})(scope)
			return func(ctx context.Context, tx pgx.Tx, i int) error {
				if i%2 == 0 {
					return ends(ctx, tx, i)
				}
				_, err := f.book.Grant(ctx, tx, wallet.Grant{Wallet: scope, Amount: 9, Reference: fmt.Sprint(scope, i), Starts: instant, Ends: wallet.EachPeriod(daily), Roll: &roll})
				return err
			}
		},
		"hold, of lots that end": func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error {
			ends, due := ends(wallet.Grant{Amount: 20, Priority: &first, Roll: &roll})(scope), due(scope, 1)
			return func(ctx context.Context, tx pgx.Tx, i int) error {
				if i%2 == 0 {
					return ends(ctx, tx, i)
				}
				return due(ctx, tx, i)
			}
		},
		"hold some minima": func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error { return due(scope, -1) },
		"hold minima":      func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error { return due(scope, 1) },
		"hold, and owe": func(scope string) func(ctx context.Context, tx pgx.Tx, i int) error {
			_, err := f.tryDraw(toDraw{Wallet: scope, Amount: 1110})
			require.NoError(t, err)
			return due(scope, 0)
		},
	}
	ways := []string{"whole ", "stepped ", "swept "}
	for kind, fill := range fills {
		for _, way := range ways {
			f.grant(wallet.Grant{Wallet: way + kind, Amount: 500, Reference: "paid"})
			one := fill(way + kind)
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
				for i := 0; i < many && err == nil; i++ {
					err = one(ctx, tx, i)
				}
				return struct{}{}, err
			})
			require.NoError(t, err)
		}
	}
	f.clock.Set(instant)
	units := func(scope string) (all []string) { // of the wallet, and of each lot
		b, err := f.book.Balance(t.Context(), f.pool, scope)
		require.NoError(t, err)
		all = append(all, fmt.Sprint(b.Units, b.Held))
		for _, l := range b.Lots {
			all = append(all, fmt.Sprint(l.Units, l.Held, l.Amount, l.GrantedAt.Unix(), l.Expires))
		}
		return all
	}
	entries := func(scope string) (all []string) {
		rows, err := f.pool.Query(t.Context(), `
			select format('%s %s %s %s %s %s %s', l.kind, l.amount, l.at, l.spent, l.credited, l.held,
				(select string_agg(format('%s %s', m.kind, m.amount), ', ' order by m.nth) from metered.lot_moves m where m.scope = l.scope and m.seq = l.seq))
			from metered.ledger l where l.scope = $1 order by l.seq`, scope)
		require.NoError(t, err)
		all, err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return all
	}
	perStep := func(events int) {
		_, err := f.pool.Exec(t.Context(), fmt.Sprintf("create or replace function metered._events_per_step() returns int language sql immutable as 'select %d'", events))
		require.NoError(t, err)
	}
	steps := func(way, kinds string, most int, sql string) { // each writes at most so many events, until nothing is left
		for kind := range fills {
			if !strings.HasPrefix(kind, kinds) {
				continue
			}
			scope := way + kind
			read := units(scope)
			for more, n := true, 0; more; n++ {
				require.Less(t, n, many, kind)
				before := f.lastSeq(scope)
				require.NoError(t, f.pool.QueryRow(t.Context(), sql, scope).Scan(&more))
				require.LessOrEqual(t, f.lastSeq(scope)-before, 4*most+1, scope)
				require.Equal(t, read, units(scope), "after a part: %s", scope)
			}
		}
	}
	perStep(1000)
	steps("whole ", "", 1000, "select metered.catch_up($1, 1000)")
	perStep(most)
	for kind := range fills {
		scope := "stepped " + kind
		before := f.lastSeq(scope)
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
			return f.ledger.Charge(ctx, tx, f.book.Charge(scope, 1))
		})
		require.ErrorIs(t, err, budget.ErrBusy, kind)
		require.Equal(t, before, f.lastSeq(scope), "nothing is written: %s", kind)
	}
	steps("stepped ", "", most, "select metered.catch_up($1, 1000)")
	var behind []string
	require.NoError(t, f.pool.QueryRow(t.Context(), "select behind from metered.sweep_wallets('-infinity', 0, 2000, false, null, 1000, '{}')").Scan(&behind))
	require.Len(t, behind, len(fills)-3, "those that no hold keeps back")
	steps("swept ", "hold", most, "select coalesce(more, false) from metered.sweep_scope($1, 500, false, null)")
	steps("swept ", "", most, "select more from metered.sweep_wallet($1, '-infinity', 0, 500, false, null, 1000, false)")
	delete(fills, "hold some minima") // the others are one sum, or not
	for kind := range fills {
		whole := entries("whole " + kind)
		for _, way := range ways[1:] {
			require.Equal(t, whole, entries(way+kind), way+kind)
		}
	}
}
