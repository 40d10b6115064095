package command_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// settings are those that a command could leave behind in a session.
func settings(t *testing.T, db interface {
	Query(context.Context, string, ...any) (pgx.Rows, error)
}) string {
	t.Helper()
	return pgtest.Value[string](t, db, `select concat_ws(' ', current_setting('lock_timeout'), current_setting('statement_timeout'),
		current_setting('idle_in_transaction_session_timeout'), current_setting('client_connection_check_interval'),
		current_setting('transaction_isolation'), current_setting('search_path'), current_setting('enable_seqscan'),
		nullif(current_setting('metered_tx.command', true), ''), (select count(*) from pg_cursors where name = 'metered_command'))`)
}

func TestDoTx_ARefusedOrFailedCommandLeavesTheTransactionAsItWas(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}})
	fill(t, pool, c, "full", 5)
	lockScope(t, pool, c, "locked")
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour) // timeouts are not set from it
	defer cancel()
	done, err := metered.Do(ctx, c, metered.Command{ID: "done", Input: 1}, upload("done"))
	require.NoError(t, err)

	for what, test := range map[string]struct {
		change func(*metered.Command)
		last   func(ctx context.Context, tx *metered.Tx) error
		err    error
	}{
		"the function fails":    {nil, func(context.Context, *metered.Tx) error { return errOwn }, errOwn},
		"the function panics":   {nil, func(context.Context, *metered.Tx) error { panic(errOwn) }, errOwn},
		"a statement fails":     {nil, func(ctx context.Context, tx *metered.Tx) error { _, err := tx.Exec(ctx, "select 1/0"); return err }, nil},
		"an error is swallowed": {nil, func(ctx context.Context, tx *metered.Tx) error { _, _ = tx.Exec(ctx, "select 1/0"); return nil }, guardtx.ErrFailed},
		"the first look": {func(cmd *metered.Command) {
			cmd.Charges, cmd.EarlyLook = append(cmd.Charges, charge("full", 1, 5)), true
		}, nil, budget.ErrExceeded},
		"the charge":   {nil, func(_ context.Context, tx *metered.Tx) error { return tx.Charge(charge("full", 1, 5)) }, budget.ErrExceeded},
		"a busy scope": {nil, func(_ context.Context, tx *metered.Tx) error { return tx.Charge(charge("locked", 1, 0)) }, budget.ErrBusy},
		"the token":    {func(cmd *metered.Command) { cmd.Token = redeem(unknownToken(t, c)) }, nil, tokens.ErrInvalid},
		"a conflict":   {func(cmd *metered.Command) { cmd.ID = "done" }, nil, budget.ErrConflict},
		"the future":   {func(cmd *metered.Command) { cmd.IssuedAt = time.Now().Add(time.Hour) }, nil, budget.ErrFuture},
		"the result":   {nil, nil, fault.New("invalid_result", "")},
		"an open savepoint": {nil, func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Begin(ctx)
			require.NoError(t, err)
			return errOwn
		}, errOwn},
	} {
		t.Run(what, func(t *testing.T) {
			cmd := whole(t, pool, c, what)
			changed := cmd
			if test.change != nil {
				test.change(&changed)
			}
			tx, err := pool.Begin(ctx)
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			for _, sql := range []string{"insert into uploads values ('before')", "set local lock_timeout = '777ms'",
				"set statement_timeout = '77s'", "declare mine cursor for select 1"} {
				_, err = tx.Exec(ctx, sql)
				require.NoError(t, err)
			}
			was := settings(t, tx)
			err = recovered(func() error {
				_, err := metered.DoTx(ctx, c, tx, changed, func(ctx context.Context, tx *metered.Tx) (any, error) {
					out, err := wholeFunc(cmd.ID, nil)(ctx, tx)
					require.NoError(t, err)
					if test.last != nil {
						return out, test.last(ctx, tx)
					}
					return func() {}, nil
				})
				return err
			})
			require.Error(t, err)
			if test.err != nil {
				require.ErrorIs(t, err, test.err)
			}
			require.Equal(t, byte('T'), tx.Conn().PgConn().TxStatus())
			require.Equal(t, was, settings(t, tx))
			require.Equal(t, 1, pgtest.Value[int](t, tx, "fetch mine"))
			_, err = tx.Exec(ctx, "rollback to savepoint metered_command")
			require.ErrorContains(t, err, "3B001", "the savepoint is gone")
			require.NoError(t, tx.Rollback(ctx))

			// And again, to commit it this time.
			require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "insert into uploads values ($1)", "with "+what)
				require.NoError(t, err)
				_ = recovered(func() error {
					_, err := metered.DoTx(ctx, c, tx, changed, func(ctx context.Context, tx *metered.Tx) (any, error) {
						if _, err := wholeFunc(cmd.ID, nil)(ctx, tx); err != nil || test.last == nil {
							return func() {}, err
						}
						return nil, test.last(ctx, tx)
					})
					return err
				})
				return nil
			}))
			require.Equal(t, nothing, footprintOf(t, pool, cmd))
			require.Equal(t, 1, pgtest.Value[int](t, pool, "select count(*) from uploads where name = $1", "with "+what))
		})
	}
	require.Equal(t, "done", done.Result.Name)
}

// recovered turns a panic with an error into that error.
func recovered(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = r.(error)
		}
	}()
	return f()
}

func TestDoTx_TakesEffectWithTheCallersCommit(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	a, b := whole(t, pool, c, "a"), whole(t, pool, c, "b")
	for _, end := range []func(pgx.Tx) error{
		func(tx pgx.Tx) error { return tx.Rollback(ctx) },
		func(tx pgx.Tx) error { return tx.Commit(ctx) },
	} {
		tx, err := pool.Begin(ctx)
		require.NoError(t, err)
		was := settings(t, tx)
		for _, cmd := range []metered.Command{a, b} {
			out, err := metered.DoTx(ctx, c, tx, cmd, wholeFunc(cmd.ID, nil))
			require.NoError(t, err)
			require.False(t, out.Replayed)
			again, err := metered.DoTx(ctx, c, tx, cmd, mustNotRun(t)) // inside, too
			require.NoError(t, err)
			require.True(t, again.Replayed)
			require.Equal(t, string(out.Raw), string(again.Raw))
			require.Equal(t, was, settings(t, tx))
		}
		require.Equal(t, nothing, footprintOf(t, pool, a))
		require.NoError(t, end(tx))
	}
	require.Equal(t, everything, footprintOf(t, pool, a))
	require.Equal(t, everything, footprintOf(t, pool, b))
	out, err := metered.Do(ctx, c, a, mustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
}

func TestDoTx_ACommandInsideACommandIsRefused(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	outer := func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "inner"}, mustNotRun(t))
		require.ErrorIs(t, err, command.ErrNested)
		nested, err := tx.Begin(ctx)
		require.NoError(t, err)
		_, err = metered.DoTx(ctx, c, nested, metered.Command{ID: "inner"}, mustNotRun(t))
		require.ErrorIs(t, err, command.ErrNested)
		require.NoError(t, nested.Commit(ctx))
		return upload("a")(ctx, tx) // and it goes on
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "outer"}, outer)
	require.NoError(t, err)
	_, err = pool.Exec(ctx, "delete from uploads")
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "outer tx"}, outer)
		return err
	}))
	require.Equal(t, 2, count(t, pool, "metered.operations"))
}

// The function must not reach back before the command's beginning either.
func TestDoTx_AFunctionThatUndoesTheBeginningFails(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for _, sql := range []string{"rollback to savepoint callers", "rollback to savepoint metered_command", "release savepoint metered_command"} {
		tx, err := pool.Begin(ctx)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, "savepoint callers")
		require.NoError(t, err)
		cmd := whole(t, pool, c, sql)
		_, err = metered.DoTx(ctx, c, tx, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
			_, err := tx.Exec(ctx, sql)
			require.NoError(t, err)
			return wholeFunc(cmd.ID, nil)(ctx, tx)
		})
		require.Error(t, err, sql)
		_ = tx.Commit(ctx)
		require.Equal(t, nothing, footprintOf(t, pool, cmd), sql)
	}
	pgtest.RequireUsable(t, c, "after")
}

func TestDo_LeavesTheSessionsSettings(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool := pgtest.Reopen(t, owner, func(config *pgxpool.Config) { config.MaxConns = 1 })
	c := newClient(t, pool, metered.Config{})
	fill(t, owner, c, "full", 5)
	_, err := pool.Exec(t.Context(), "set lock_timeout = '777ms'; set statement_timeout = '77s'")
	require.NoError(t, err)
	was := settings(t, pool)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, fn := range []metered.Func[any]{
		nil2,
		func(context.Context, *metered.Tx) (any, error) { return nil, errOwn },
		func(_ context.Context, tx *metered.Tx) (any, error) { return nil, tx.Charge(charge("full", 1, 5)) },
	} {
		_, _ = metered.Do(ctx, c, metered.Command{ID: "op"}, fn)
		require.Equal(t, was, settings(t, pool))
	}
}

func TestDoTx_InAFailedTransactionTouchesNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "outer"}, func(ctx context.Context, outer *metered.Tx) (any, error) {
			_, err := outer.Exec(ctx, `select 1/0`)
			require.Error(t, err)
			_, err = metered.DoTx(ctx, c, outer, metered.Command{ID: "inner"}, mustNotRun(t))
			require.ErrorIs(t, err, guardtx.ErrFailed)
			return nil, nil
		})
		require.ErrorIs(t, err, guardtx.ErrFailed)
		_, err = metered.DoTx(ctx, c, tx, metered.Command{ID: "after"}, upload("a"))
		return err
	}))
	require.Equal(t, 1, count(t, pool, "uploads"))
}

// The error of a failed statement is returned as it is: the caller may roll its transaction back and go on.
func TestDoTx_InATransactionThatWasAbortedBefore(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		nested, err := tx.Begin(ctx)
		require.NoError(t, err)
		_, err = nested.Exec(ctx, "select 1/0")
		require.Error(t, err)
		for what, fn := range map[string]metered.Func[uploaded]{"no function": nil, "a function": mustNotRun(t)} {
			_, err = metered.DoTx(ctx, c, nested, metered.Command{ID: "op", Charges: []budget.Charge{charge("s", 1, 0)}}, fn)
			require.ErrorIs(t, err, guardtx.ErrFailed, what)
			require.Equal(t, "transaction_failed", metered.Code(err))
			require.ErrorContains(t, err, "the caller's transaction was aborted before the command began")
			require.NotContains(t, err.Error(), "function")
			var answer *pgconn.PgError
			require.ErrorAs(t, err, &answer, what)
			require.Equal(t, "25P02", answer.Code)
		}
		require.NoError(t, nested.Rollback(ctx))
		_, err = metered.DoTx(ctx, c, tx, metered.Command{ID: "op"}, upload("a"))
		return err
	}))
	require.Equal(t, 1, count(t, pool, "uploads"))
}

// Past the wrapper, by the bare connection, the server refuses every COMMIT, and
// the last flush whatever came of a ROLLBACK.
func TestTx_TheBareConnectionCannotCommitEither(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	_, err := pool.Exec(ctx, `create procedure commits() language plpgsql as $$ begin commit; end $$;
		create procedure rolls_back() language plpgsql as $$ begin rollback; end $$`)
	require.NoError(t, err)
	for _, sql := range []string{
		"commit", "end", "commit and chain", "select 1; commit", "commit; begin; insert into uploads values ('op') on conflict do nothing",
		"prepare transaction 'x'", "do $$ begin commit; end $$", "do $$ begin rollback; end $$", "call commits()", "call rolls_back()",
		"savepoint x; commit", "rollback", "abort", "rollback; begin", "rollback and chain", "rollback; begin; select set_config('metered_tx.command', 'x', true)",
	} {
		for name, exec := range map[string]func(tx *metered.Tx) error{
			"conn":   func(tx *metered.Tx) error { _, err := tx.Conn().Exec(ctx, sql); return err },
			"pgconn": func(tx *metered.Tx) error { return tx.Conn().PgConn().Exec(ctx, sql).Close() },
			"begun": func(tx *metered.Tx) error {
				bare, err := tx.Conn().Begin(ctx)
				require.NoError(t, err)
				_, err = bare.Exec(ctx, sql)
				_ = bare.Commit(ctx)
				return err
			},
		} {
			cmd := whole(t, pool, c, sql+name)
			_, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
				out, err := wholeFunc(cmd.ID, nil)(ctx, tx)
				require.NoError(t, err)
				_ = exec(tx)
				if tx.Conn().PgConn().TxStatus() == 'I' {
					_, err = tx.Exec(ctx, `insert into uploads values ('on its own')`)
					require.ErrorIs(t, err, guardtx.ErrControl)
				}
				return out, nil
			})
			require.Error(t, err)
			require.Contains(t, []string{"transaction_control", "transaction_failed"}, metered.Code(err), "%s: %v", sql, err)
			require.Equal(t, nothing, footprintOf(t, pool, cmd), sql)
		}
	}
	require.Zero(t, count(t, pool, "uploads"))
	pgtest.RequireUsable(t, c, "after")
}

// A command that goes the short way completes its own transaction alone, too.
func TestTx_TheBareConnectionOfAPlainCommandCannotCommitEither(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for i, sql := range []string{"commit", "rollback", "rollback; begin", "rollback; begin; select set_config('metered_tx.command', 'x', true)"} {
		for _, charges := range [][]budget.Charge{nil, {{Scope: "plain", Amount: 1, Limits: []budget.Limit{budget.Lifetime(100)}}}} {
			cmd := metered.Command{ID: fmt.Sprint(i, len(charges)), Charges: charges}
			_, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (string, error) {
				_, err := tx.Exec(ctx, "insert into uploads values ($1)", cmd.ID)
				require.NoError(t, err)
				_, _ = tx.Conn().Exec(ctx, sql)
				return "", nil
			})
			require.Contains(t, []string{"transaction_control", "transaction_failed"}, metered.Code(err), "%s: %v", sql, err)
		}
	}
	require.Zero(t, count(t, pool, "uploads"))
	require.Zero(t, count(t, pool, "metered.ledger"))
	require.Zero(t, count(t, pool, "metered.operations"))
	pgtest.RequireUsable(t, c, "after")
}

// A transaction is completed by the marker that began it, and by no other, also the short way.
func TestTx_APlainCommandIsCompletedByItsOwnMarker(t *testing.T) {
	t.Parallel()
	pool, _ := setUp(t, metered.Config{})
	ctx := t.Context()
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(ctx, "select metered.begin_command_plain('t', 'op', 1, null, '1 hour', null, 'its own', 1000, false)")
	require.NoError(t, err)
	_, err = tx.Exec(ctx, `select metered.complete_command_plain('t', 'op', 'another', repeat('a', 33)::bytea, null, '', null, null,
		null, null, null, null, null, null, null, null, null, false, '1 minute', 1000)`)
	require.ErrorContains(t, err, "MT005")
	require.Error(t, tx.Commit(ctx))
	require.Zero(t, count(t, pool, "metered.operations"))
}

// A command without a function of its own is one flush, with its charge, its record and COMMIT. Its
// repetition is answered from the record, and another command of its id is a conflict.
func TestDo_ACommandWithoutAFunctionIsOneFlush(t *testing.T) {
	t.Parallel()
	owner, w, c, _ := onWire(t, metered.Config{}, func(*pgxpool.Config) {})
	ctx := t.Context()
	two := []budget.Limit{budget.PerWindow(5, time.Hour), budget.PerPeriod(50, time.Hour, time.Unix(0, 0))}
	warm := []budget.Charge{{Scope: "warm", Amount: 1, Limits: two}}
	_, err := metered.Do[any](ctx, c, metered.Command{ID: "warm", Charges: warm}, nil)
	require.NoError(t, err)
	warm = []budget.Charge{{Scope: "warm", Amount: 1, Limits: two[:1]}, {Scope: "warm total", Amount: 1}}
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "warm pair", Charges: warm}, nil)
	require.NoError(t, err)
	for i, charges := range [][]budget.Charge{
		nil, {{Scope: "plain", Amount: 3, Limits: two[:1]}}, {{Scope: "limited", Amount: 3, Limits: two}},
		{{Scope: "one", Amount: 3, Limits: two[:1]}, {Scope: "other", Amount: 1}},
	} {
		cmd := metered.Command{ID: fmt.Sprint("op", i), Charges: charges}
		first, err := metered.Do[any](ctx, c, metered.Command{ID: "warm " + cmd.ID}, nil)
		require.NoError(t, err)
		before := len(w.Sent())
		first, err = metered.Do[any](ctx, c, cmd, nil)
		require.NoError(t, err)
		require.False(t, first.Replayed)
		require.Len(t, w.Sent(), before+1)
		require.Len(t, first.Receipt.Entries, len(charges))

		again, err := metered.Do[any](ctx, c, cmd, nil)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.At, again.At)
		require.Equal(t, first.Raw, again.Raw)
		require.Len(t, again.Receipt.Entries, len(charges))
		if len(charges) > 0 {
			require.EqualValues(t, 2, first.Receipt.Entries[0].Standings[0].Available)
			require.Equal(t, first.Receipt.Entries[0].Seq, again.Receipt.Entries[0].Seq)
			require.Equal(t, first.Receipt.Entries[0].At, again.Receipt.Entries[0].At)
			more := cmd
			more.ID += " more"
			_, err = metered.Do[any](ctx, c, more, nil)
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = c.Lookup(ctx, owner, "", more.ID)
			require.ErrorIs(t, err, metered.ErrUnknownOperation)
		}
		cmd.Input = "another"
		_, err = metered.Do[any](ctx, c, cmd, nil)
		require.ErrorIs(t, err, budget.ErrConflict)
	}
}

// A total beside a limit changes neither the number of round trips, nor what a repetition is.
func TestDo_ATotalBesideALimitIsRepeatedFromTheRecord(t *testing.T) {
	t.Parallel()
	owner, w, c, _ := onWire(t, metered.Config{}, func(*pgxpool.Config) {})
	clock := pgtest.SetClock(t, owner, pgtest.Tomorrow(9))
	ctx := t.Context()
	own := budget.Charge{Scope: "own", Amount: 1, Limits: []budget.Limit{budget.PerWindow(5, time.Hour)}}
	flushes := map[string][]int{}
	for _, total := range []string{"", "total"} {
		cmd := metered.Command{Charges: []budget.Charge{own}}
		if total != "" {
			cmd.Charges = append(cmd.Charges, budget.Charge{Scope: total, Amount: 1})
		}
		cmd.ID = "warm" + total
		_, err := metered.Do[any](ctx, c, cmd, nil)
		require.NoError(t, err)
		_, err = owner.Exec(ctx, "update metered.ledger set tallied = true where scope = 'total'") // as after a wait
		require.NoError(t, err)
		clock.Advance(time.Microsecond) // one in 32 microseconds folds tallies, such as 9:00
		cmd.ID = "op" + total
		for range 2 {
			before := len(w.Sent())
			done, err := metered.Do[any](ctx, c, cmd, nil)
			require.NoError(t, err)
			flushes[total] = append(flushes[total], len(w.Sent())-before)
			require.Equal(t, len(flushes[total]) == 2, done.Replayed)
			require.Equal(t, total != "", done.Receipt.Entries[len(cmd.Charges)-1].Seq < 0)
		}
	}
	require.Equal(t, flushes[""], flushes["total"])
	require.Equal(t, 1, count(t, owner, "metered.tallies"))
}

func TestTx_IsDeadOnceTheFunctionHasReturned(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for what, end := range map[string]func() (uploaded, error){
		"returned": func() (uploaded, error) { return uploaded{}, nil },
		"failed":   func() (uploaded, error) { return uploaded{}, errOwn },
		"panicked": func() (uploaded, error) { panic("oh") },
	} {
		for _, owned := range []bool{true, false} {
			var kept *metered.Tx
			var nested pgx.Tx
			fn := func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
				kept = tx
				var err error
				nested, err = tx.Begin(ctx)
				require.NoError(t, err)
				return end()
			}
			cmd := metered.Command{ID: what}
			other, err := pool.Begin(ctx)
			require.NoError(t, err)
			func() {
				defer func() { _ = recover() }()
				if owned {
					_, _ = metered.Do(ctx, c, cmd, fn)
				} else {
					cmd.ID += " in"
					_, _ = metered.DoTx(ctx, c, other, cmd, fn)
				}
			}()
			for _, tx := range []pgx.Tx{kept, nested} {
				_, err := tx.Exec(ctx, "select 1")
				require.ErrorIs(t, err, guardtx.ErrDone)
				require.ErrorIs(t, tx.QueryRow(ctx, "select 1").Scan(), guardtx.ErrDone)
				_, err = tx.Query(ctx, "select 1")
				require.ErrorIs(t, err, guardtx.ErrDone)
				_, err = tx.Prepare(ctx, "p", "select 1")
				require.ErrorIs(t, err, guardtx.ErrDone)
				_, err = tx.CopyFrom(ctx, pgx.Identifier{"uploads"}, []string{"name"}, pgx.CopyFromRows(nil))
				require.ErrorIs(t, err, guardtx.ErrDone)
				_, err = tx.Begin(ctx)
				require.ErrorIs(t, err, guardtx.ErrDone)
				b := &pgx.Batch{}
				b.Queue("select 1")
				require.ErrorIs(t, tx.SendBatch(ctx, b).Close(), guardtx.ErrDone)
				large := tx.LargeObjects()
				_, err = large.Create(ctx, 0)
				require.ErrorIs(t, err, pgx.ErrTxClosed)
			}
			require.ErrorIs(t, nested.Commit(ctx), guardtx.ErrDone)
			require.ErrorIs(t, nested.Rollback(ctx), guardtx.ErrDone)
			require.ErrorIs(t, kept.Charge(charge("s", 1, 0)), guardtx.ErrDone)
			_, err = kept.Enqueue(ctx, process{}, nil)
			require.ErrorIs(t, err, guardtx.ErrDone)
			require.NoError(t, other.Rollback(ctx))
		}
	}
}
