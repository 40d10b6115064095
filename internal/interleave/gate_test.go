package interleave_test

import (
	"context"
	"errors"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/interleave"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

const counterSQL = `create schema shop;
create table shop.stock (n int not null);
insert into shop.stock values (1);

create function shop.sell() returns boolean
language plpgsql volatile
as $$
declare
    had int := 0; -- no statement: select * from shop.stock
begin
    if exists (select from shop.stock where n > 0) then
        update shop.stock set n = n - 1;
        return case when true then true
            else false end;
    end if;
    return false;
end
$$;
`

var shared = regexp.MustCompile(`\bshop\.stock\b`)

func TestGated_PutsAGateBeforeEachSharedStatement(t *testing.T) {
	gated := interleave.Gated(counterSQL, shared)
	require.Equal(t, []string{"sell:1", "sell:2"}, interleave.Places(gated))
	require.Contains(t, gated, "perform gates.pass('sell:1'); if exists")
	require.Contains(t, gated, "perform gates.pass('sell:2'); update")
	require.Equal(t, counterSQL, interleave.Ungated(gated))
}

// Each function of the library that reads or writes a table has a gate, and its text is the same without.
func TestGated_OfTheLibraryIsTheSameText(t *testing.T) {
	source := schema.Current().Source()
	gated := interleave.Gated(source, interleave.Shared(source, "metered"))
	require.Equal(t, source, interleave.Ungated(gated))
	require.Greater(t, len(interleave.Places(gated)), 250)
}

// A stock of one is sold twice in some orders of a check and its write, and in no order under a lock.
func TestExplore_FindsTheOrdersThatSellTwice(t *testing.T) {
	for _, c := range []struct {
		name, script string
		twice        bool
	}{
		{"unlocked", counterSQL, true},
		{"locked", regexp.MustCompile("if exists").ReplaceAllString(counterSQL, "lock shop.stock; if exists"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			db := pgtest.OpenWith(t, pgtest.Options{Empty: true})
			conn, err := pgx.ConnectConfig(t.Context(), db.Config().ConnConfig)
			require.NoError(t, err)
			defer func() { _ = conn.Close(context.Background()) }()
			require.NoError(t, interleave.Install(t.Context(), conn))
			_, err = conn.Exec(t.Context(), interleave.Gated(c.script, shared), pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
			e, err := interleave.New(t.Context(), db.Config(), 2)
			require.NoError(t, err)
			t.Cleanup(func() { e.Close(context.Background()) })

			var sold [2]bool
			sell := func(i int) interleave.Call {
				return func(ctx context.Context, pool *pgxpool.Pool) error {
					return pool.QueryRow(ctx, "select shop.sell()").Scan(&sold[i])
				}
			}
			var twice []interleave.Order
			n, err := e.Explore(t.Context(), 2, func(int) ([]interleave.Call, error) {
				_, err := conn.Exec(t.Context(), "update shop.stock set n = 1")
				return []interleave.Call{sell(0), sell(1)}, err
			}, func(_ int, r *interleave.Run) (bool, error) {
				require.NoError(t, r.Errs[0])
				require.NoError(t, r.Errs[1])
				if sold[0] && sold[1] {
					twice = append(twice, r.Order)
				}
				return true, nil
			})
			require.NoError(t, err)
			require.Greater(t, n, 5)
			require.Equal(t, c.twice, len(twice) > 0, "orders that sell twice: %v", twice)
			if c.twice { // the order shows it again
				_, err := conn.Exec(t.Context(), "update shop.stock set n = 1")
				require.NoError(t, err)
				parsed, err := interleave.ParseOrder(twice[0].String())
				require.NoError(t, err)
				_, err = e.Run(t.Context(), parsed, []interleave.Call{sell(0), sell(1)})
				require.NoError(t, err)
				require.Equal(t, [2]bool{true, true}, sold)
			}
		})
	}
}

// Sessions that wait for each other go on when Postgres has ended one of them.
func TestRun_ADeadlockEndsOneCall(t *testing.T) {
	db := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	conn, err := pgx.ConnectConfig(t.Context(), db.Config().ConnConfig)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	require.NoError(t, interleave.Install(t.Context(), conn))
	_, err = conn.Exec(t.Context(), "create table stock (item int primary key, n int not null); insert into stock values (0, 0), (1, 0)", pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	e, err := interleave.New(t.Context(), db.Config(), 2)
	require.NoError(t, err)
	t.Cleanup(func() { e.Close(context.Background()) })

	both := func(first int) interleave.Call {
		return func(ctx context.Context, pool *pgxpool.Pool) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "update stock set n = n + 1 where item = $1", first)
				if err == nil {
					_, err = tx.Exec(ctx, "update stock set n = n + 1 where item = 1 - $1", first)
				}
				return err
			})
		}
	}
	r, err := e.Run(t.Context(), interleave.Order{0, 0, 1, 1, 0, 1}, []interleave.Call{both(0), both(1)})
	require.NoError(t, err)
	require.Len(t, r.Ended, 2)
	failed := errors.Join(r.Errs...)
	require.ErrorContains(t, failed, "40P01")
	require.True(t, r.Errs[0] == nil || r.Errs[1] == nil)
	var sum int
	require.NoError(t, conn.QueryRow(t.Context(), "select sum(n) from stock").Scan(&sum))
	require.Equal(t, 2, sum)
}
