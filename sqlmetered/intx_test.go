package sqlmetered_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/sqlmetered"
	"github.com/pgmetered/metered/wallet"
)

// in runs InTx with the test's context.
func in(t *testing.T, tx *sql.Tx, fn func(ctx context.Context, tx pgx.Tx) error) error {
	t.Helper()
	return sqlmetered.InTx(t.Context(), tx, fn)
}

func TestInTx_AnEndedTransactionIsRefused(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	never := func(context.Context, pgx.Tx) error { t.Error("the function ran"); return nil }
	for what, end := range map[string]func(tx *sql.Tx) error{
		"committed": (*sql.Tx).Commit, "rolled back": (*sql.Tx).Rollback,
		"committed by a statement": func(tx *sql.Tx) error { _, err := tx.Exec("commit"); return err },
	} {
		tx := s.begin(t, sql.LevelDefault)
		require.NoError(t, end(tx))
		require.ErrorIs(t, in(t, tx, never), sql.ErrTxDone, what)
	}
	ctx, cancel := context.WithCancel(t.Context())
	tx, err := s.db.BeginTx(ctx, nil)
	require.NoError(t, err)
	cancel()
	pgtest.WaitFor(t, "database/sql to roll back by itself", func() bool {
		return errors.Is(in(t, tx, func(context.Context, pgx.Tx) error { return nil }), sql.ErrTxDone)
	})
	require.ErrorIs(t, sqlmetered.Commit(tx), sql.ErrTxDone)
	require.ErrorIs(t, sqlmetered.InTx(ctx, s.begin(t, sql.LevelDefault), never), context.Canceled)
}

// Credit in lots is granted and drawn in a *sql.Tx: a command that is refused leaves it usable, and a rollback leaves nothing.
func TestDoTx_DrawsFromAWallet(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	book, err := wallet.New(s.c.Budget, wallet.Config{})
	require.NoError(t, err)
	for _, commits := range []bool{false, true} {
		tx := s.begin(t, sql.LevelDefault)
		require.NoError(t, in(t, tx, func(ctx context.Context, tx pgx.Tx) error {
			_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 10, Ends: wallet.After(time.Hour), Reference: "r"})
			return err
		}))
		draw := func(id string, upTo bool) (metered.Outcome[int], error) {
			return sqlmetered.DoTx(t.Context(), s.c, tx, metered.Command{ID: id, Input: 1}, func(_ context.Context, tx *metered.Tx) (int, error) {
				charge := book.Charge("ann", 11)
				charge.UpTo, charge.Lots = upTo, true
				return 0, tx.Charge(charge)
			})
		}
		_, err := draw("too much", false)
		require.ErrorIs(t, err, budget.ErrExceeded)
		out, err := draw("all", true)
		require.NoError(t, err)
		require.EqualValues(t, 10, out.Receipt.Entries[0].Amount)
		again, err := draw("all", false)
		require.NoError(t, err)
		require.Equal(t, out.Receipt.Entries[0].Lots, again.Receipt.Entries[0].Lots)
		if !commits {
			require.NoError(t, tx.Rollback())
			continue
		}
		require.NoError(t, sqlmetered.Commit(tx))
	}
	b, err := book.Balance(t.Context(), s.pool, "ann")
	require.NoError(t, err)
	require.Zero(t, b.Units)
	require.Positive(t, b.Seq)
}

func TestInTx_TheFunctionCannotEndTheTransaction(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	tx := s.begin(t, sql.LevelDefault)
	var kept pgx.Tx
	require.NoError(t, in(t, tx, func(ctx context.Context, tx pgx.Tx) error {
		require.ErrorIs(t, tx.Commit(ctx), guardtx.ErrControl)
		require.ErrorIs(t, tx.Rollback(ctx), guardtx.ErrControl)
		_, err := tx.Exec(ctx, "commit")
		require.ErrorIs(t, err, guardtx.ErrControl)
		objects := tx.LargeObjects()
		_, err = objects.Create(ctx, 0)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		_, err = tx.Exec(ctx, "insert into uploads values ('a')")
		kept = tx
		return err
	}))
	_, err := kept.Exec(t.Context(), "select 1")
	require.ErrorIs(t, err, guardtx.ErrDone)
	require.ErrorIs(t, in(t, tx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Conn().Exec(ctx, "commit") // behind its back
		require.NoError(t, err)
		return nil
	}), guardtx.ErrControl)
	require.Equal(t, 1, pgtest.Value[int](t, s.pool, "select count(*) from uploads"))

	tx = s.begin(t, sql.LevelDefault)
	require.ErrorIs(t, in(t, tx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Query(ctx, "select generate_series(1, 3)")
		return err
	}), guardtx.ErrFailed, "rows are left open")
	tx = s.begin(t, sql.LevelDefault)
	require.ErrorIs(t, in(t, tx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "select 1/0")
		require.Error(t, err)
		return nil
	}), guardtx.ErrFailed, "an error is swallowed")
	require.ErrorIs(t, sqlmetered.Commit(tx), guardtx.ErrFailed)
}

func TestInTx_BeginSetsASavepoint(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	tx := s.begin(t, sql.LevelDefault)
	for range 2 {
		require.NoError(t, in(t, tx, func(ctx context.Context, tx pgx.Tx) error {
			for i, end := range []func(pgx.Tx) error{
				func(nested pgx.Tx) error { return nested.Commit(ctx) }, func(nested pgx.Tx) error { return nested.Rollback(ctx) },
			} {
				outer, err := tx.Begin(ctx)
				require.NoError(t, err)
				_, err = outer.Exec(ctx, "insert into uploads values ($1) on conflict do nothing", []string{"kept", "undone"}[i])
				require.NoError(t, err)
				require.ErrorIs(t, pgx.BeginFunc(ctx, outer, func(inner pgx.Tx) error {
					_, err := inner.Exec(ctx, "select 1/0")
					require.Error(t, err)
					return errOwn
				}), errOwn)
				require.NoError(t, end(outer))
				require.ErrorIs(t, outer.Commit(ctx), pgx.ErrTxClosed)
				require.ErrorIs(t, outer.Rollback(ctx), pgx.ErrTxClosed)
			}
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"uploads"}, []string{"name"}, pgx.CopyFromRows(nil))
			return err
		}))
	}
	require.ErrorIs(t, in(t, tx, func(ctx context.Context, tx pgx.Tx) error {
		return pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
			_, err := nested.Exec(ctx, "release savepoint sqlmetered_2")
			require.ErrorContains(t, err, "3B001", "none is left behind")
			return errOwn
		})
	}), errOwn)
	require.NoError(t, sqlmetered.Commit(tx))
	require.Equal(t, "kept", pgtest.Value[string](t, s.pool, "select string_agg(name, ',') from uploads"))
}

func TestInTx_APanicLeavesTheTransactionOpen(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{MaxConns: 1})
	tx := s.begin(t, sql.LevelDefault)
	insert(t, tx, "a")
	require.PanicsWithValue(t, errOwn, func() { _ = in(t, tx, func(context.Context, pgx.Tx) error { panic(errOwn) }) })
	insert(t, tx, "b")
	require.NoError(t, tx.Rollback())
	require.Zero(t, pgtest.Value[int](t, s.pool, "select count(*) from uploads"), "and the connection serves others")
}

// Another goroutine's use of the *sql.Tx waits for the function.
func TestInTx_OtherUseOfTheTransactionWaits(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	tx := s.begin(t, sql.LevelDefault)
	var returned atomic.Bool
	var others sync.WaitGroup
	require.NoError(t, in(t, tx, func(ctx context.Context, inner pgx.Tx) error {
		for range 4 {
			others.Go(func() {
				_, err := tx.Exec("insert into uploads values (gen_random_uuid())")
				if err != nil || !returned.Load() {
					t.Errorf("did not wait: %v", err)
				}
			})
		}
		for range 100 {
			if _, err := inner.Exec(ctx, "select 1"); err != nil {
				return err
			}
		}
		returned.Store(true)
		return nil
	}))
	others.Wait()
	require.NoError(t, sqlmetered.Commit(tx))
	require.Equal(t, 4, pgtest.Value[int](t, s.pool, "select count(*) from uploads"))
}

// database/sql rolls back in a goroutine of its own. It must not do so between two statements of a function that goes
// on: the second one would be committed on its own.
func TestInTx_ACancelledContextRollsBackAfterTheFunction(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	tx, err := s.db.BeginTx(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, in(t, tx, func(ctx context.Context, inner pgx.Tx) error {
		cancel()
		for range 100 {
			_, err := inner.Exec(ctx, "insert into uploads values (gen_random_uuid())")
			require.NoError(t, err)
			require.Equal(t, byte('T'), inner.Conn().PgConn().TxStatus())
		}
		return nil
	}))
	require.Error(t, sqlmetered.Commit(tx))
	require.Zero(t, pgtest.Value[int](t, s.pool, "select count(*) from uploads"))

	// While a command waits for its scope the connection is given up, and nothing is left.
	release := pgtest.LockScope(t, s.pool, s.c, "busy")
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	tx, err = s.db.BeginTx(ctx, nil)
	require.NoError(t, err)
	go func() { pgtest.WaitQueued(t, s.pool, 1); cancel() }()
	_, err = sqlmetered.DoTx[any](ctx, s.c, tx, metered.Command{ID: "op", Charges: []budget.Charge{charge("busy", 1, 9)}}, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.Error(t, sqlmetered.Commit(tx))
	release()
	out, err := metered.Do[any](t.Context(), s.c, metered.Command{ID: "op", Charges: []budget.Charge{charge("busy", 1, 9)}}, nil)
	require.NoError(t, err)
	require.False(t, out.Replayed)
}

func TestCommit_ReportsItsOutcome(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	_, err := s.pool.Exec(t.Context(), "create table late (n int unique deferrable initially deferred)")
	require.NoError(t, err)
	tx := s.begin(t, sql.LevelDefault)
	_, err = tx.Exec("insert into late values (1), (1)")
	require.NoError(t, err)
	err = sqlmetered.Commit(tx)
	require.ErrorContains(t, err, "23505")
	require.NotErrorIs(t, err, budget.ErrCommitUnknown)
	require.ErrorIs(t, sqlmetered.Commit(tx), sql.ErrTxDone)

	pool, wire := pgtest.Tap(t, s.pool, nil)
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	isCommit := func(f *pgtest.Flush) bool { return f.Has("commit") }
	for what, test := range map[string]struct {
		fault func(*pgtest.Flush)
		err   error
		left  int
	}{
		"the answer is lost": {func(f *pgtest.Flush) { f.LoseAnswer() }, budget.ErrCommitUnknown, 1},
		"it is lost":         {func(f *pgtest.Flush) { f.Lose() }, budget.ErrCommitUnknown, 0},
		"a pooler breaks":    {func(f *pgtest.Flush) { f.AnswerWith(pgtest.ErrorResponse("ERROR", "08P01", "no")) }, budget.ErrCommitUnknown, 1},
		"all is well":        {func(*pgtest.Flush) {}, nil, 1},
	} {
		_, err := s.pool.Exec(t.Context(), "truncate uploads")
		require.NoError(t, err)
		tx, err := db.Begin()
		require.NoError(t, err)
		insert(t, tx, what)
		wire.Once(isCommit, test.fault)
		require.ErrorIs(t, sqlmetered.Commit(tx), test.err, what)
		pgtest.WaitFor(t, what, func() bool { return pgtest.Value[int](t, s.pool, "select count(*) from uploads") == test.left })
	}
	// database/sql rolls back on its own, too. If it comes first, the transaction has ended, and if it comes between, nobody can tell.
	for err = budget.ErrCommitUnknown; errors.Is(err, budget.ErrCommitUnknown) || errors.Is(err, sql.ErrTxDone); {
		ctx, cancel := context.WithCancel(t.Context())
		tx, err = s.db.BeginTx(ctx, nil)
		require.NoError(t, err)
		insert(t, tx, "cancelled")
		cancel()
		err = sqlmetered.Commit(tx)
	}
	require.ErrorIs(t, err, context.Canceled, "COMMIT was not sent")
}

type tracer struct{ failed, seen atomic.Int64 }

func (*tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (tr *tracer) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if tr.seen.Add(1); data.Err != nil {
		tr.failed.Add(1)
	}
}

func TestInTx_CostsNoRoundTripAndATracerSeesNoError(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	tr := &tracer{}
	for traced, want := range map[bool]int{false: 0, true: 1} {
		pool, wire := pgtest.Tap(t, s.pool, func(c *pgxpool.Config) {
			if traced {
				c.ConnConfig.Tracer = tr
			}
		})
		db := stdlib.OpenDBFromPool(pool)
		defer db.Close()
		tx, err := db.Begin()
		require.NoError(t, err)
		flushes := 0
		wire.Each(func(*pgtest.Flush) { flushes++ })
		require.NoError(t, in(t, tx, func(context.Context, pgx.Tx) error { return nil }))
		require.Equal(t, want, flushes)
		require.NoError(t, tx.Rollback())
	}
	require.NotZero(t, tr.seen.Load())
	require.Zero(t, tr.failed.Load())
}

// foreign is a driver of another library, which takes the arguments that database/sql takes, or any.
type foreign struct{ anything bool }

type anything struct{ foreign }

func (f foreign) Connect(context.Context) (driver.Conn, error) {
	if f.anything {
		return anything{f}, nil
	}
	return f, nil
}
func (f foreign) Driver() driver.Driver                              { return nil }
func (f foreign) Prepare(string) (driver.Stmt, error)                { return nil, errOwn }
func (f foreign) Close() error                                       { return nil }
func (f foreign) Begin() (driver.Tx, error)                          { return f, nil }
func (f foreign) Commit() error                                      { return nil }
func (f foreign) Rollback() error                                    { return nil }
func (f foreign) Exec(string, []driver.Value) (driver.Result, error) { return nil, errors.New("sent") }
func (anything) CheckNamedValue(*driver.NamedValue) error            { return nil }
func (anything) Exec(string, []driver.Value) (driver.Result, error)  { return driver.ResultNoRows, nil }

func TestInTx_AnotherDriverIsRefused(t *testing.T) {
	t.Parallel()
	for _, takes := range []bool{false, true} {
		db := sql.OpenDB(foreign{takes})
		defer db.Close()
		tx, err := db.Begin()
		require.NoError(t, err)
		err = in(t, tx, func(context.Context, pgx.Tx) error { t.Error("the function ran"); return nil })
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument)
		require.Equal(t, "tx", argument.Field)
		require.ErrorIs(t, err, budget.ErrArgument)
	}
}
