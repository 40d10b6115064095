package command_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A function that writes by another connection gets an error that names its command, by the pool and by database/sql, also
// where the pool has no connection left. Before and after it the pool serves as ever.
func TestNoOtherConnections_NamesTheCommandThatAsksForOne(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{}, pgtest.Options{MaxConns: 1, Config: func(cfg *pgxpool.Config) {
		require.NoError(t, metered.NoOtherConnections(cfg))
	}})
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	var kept context.Context
	out, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Tenant: "ann", Name: "save", Input: 1},
		func(ctx context.Context, tx *metered.Tx) (int, error) {
			kept = ctx
			for _, ctx := range []context.Context{ctx, context.WithoutCancel(ctx)} {
				_, err := db.ExecContext(ctx, "insert into uploads values ('by another connection')")
				require.ErrorIs(t, err, command.ErrNested)
				require.ErrorContains(t, err, `command "op" of tenant "ann", named "save"`)
				_, err = pool.Exec(ctx, "insert into uploads values ('by another connection')")
				require.ErrorIs(t, err, command.ErrNested)
				_, err = c.Budget.Usage(ctx, pool, budget.Query{Scope: "s"})
				require.ErrorIs(t, err, command.ErrNested)
			}
			_, err := tx.Exec(ctx, "insert into uploads values ('by the Tx')")
			return 1, err
		})
	require.NoError(t, err)
	require.Equal(t, 1, out.Result)
	require.Equal(t, "by the Tx", pgtest.Value[string](t, pool, "select string_agg(name, ',') from uploads"))
	_, err = pool.Exec(context.WithoutCancel(kept), "select 1")
	require.NoError(t, err, "the function has returned")
	require.PanicsWithValue(t, pgtest.ErrOwn, func() {
		_, _ = metered.Do(t.Context(), c, metered.Command{ID: "panics", Input: 1}, func(ctx context.Context, _ *metered.Tx) (int, error) {
			kept = ctx
			panic(pgtest.ErrOwn)
		})
	})
	_, err = pool.Exec(context.WithoutCancel(kept), "select 1")
	require.NoError(t, err, "the function has panicked")
}

// The error of a command that waits for a connection in vain says who has them.
func TestDo_AnExhaustedPoolSaysWhoHasIt(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{}, pgtest.Options{MaxConns: 2})
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	inside, goOn := make(chan struct{}), make(chan struct{})
	var holder sync.WaitGroup
	holder.Go(func() {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: "holder", Input: 1}, func(context.Context, *metered.Tx) (int, error) {
			close(inside)
			<-goOn
			return 1, nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-inside
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for _, call := range []func() error{
		func() error { _, err := metered.Do[any](ctx, c, metered.Command{ID: "waits"}, nil); return err },
		func() error {
			_, err := metered.Open[any](ctx, c, metered.Reservation{ID: "waits", Lines: []holds.Line{pgtest.Room("s", 1, 9)}})
			return err
		},
	} {
		err = call()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "all 2 connections of the pool are in use, 1 of them by functions of commands (an *sql.DB with SetMaxIdleConns keeps")
	}
	close(goOn)
	holder.Wait()
}
