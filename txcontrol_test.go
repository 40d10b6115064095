package metered_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// controls are statements that would end a command's transaction, or begin one.
var controls = []string{
	"commit", "COMMIT", "Commit Work", "commit transaction", "commit and chain", "commit and no chain",
	"end", "end work", "abort", "rollback", "rollback work", "rollback and chain", "ROLLBACK TRANSACTION AND CHAIN",
	"begin", "begin isolation level serializable", "start transaction", "prepare transaction 'x'", "commit prepared 'x'", "rollback prepared 'x'",
	" \t\r\n\f\vcommit", ";;commit", "select 1; commit", "select 1;commit;", "commit; insert into uploads values ('b')",
	"-- x\ncommit", "-- x\rcommit", "--\ncommit", "select 1 -- '\n; commit --'", "/* x */commit", "/* /* */ ; */ commit", "/**/commit/**/work",
	"select ';'; commit", "select ''';'; commit", "select ';''' ; commit --'", "select 'a''', '; select '; commit; select ''",
	`select E'\''; commit; select '`, `select e'\\'; commit`, "select E'a'\n'\\''; commit; --'", "select E'a' -- x\n'\\''; commit; --'",
	`select "'" from (select 1 as "'") x; commit; select '`, `select ";" from (select 1 as ";") x; commit`,
	"select $$;$$; commit", "select $x$ $$ $x$; commit; select $$ $$", "select $x$ $y$ $x$; commit -- $y$", "select 1$$ ' $$; commit; select $$'$$",
	"select $1$$;$$; commit",
	"select U&'\\0041'; commit", "select b'1', x'F'; commit", "select 1 /* ' */; commit -- '",
	"/* commit", "/* /* */", "select '", `select "`, "select $x$ $$", `select e'\'`, "select 1 -- '\n'",
	"close all", "close metered_command", `CLOSE "metered_command"`, "close metered_write", "select 1; close all; commit",
}

var innocent = []string{
	"savepoint a; rollback to a; rollback to savepoint a; rollback work to a; rollback transaction to savepoint a; release a",
	"select 'commit'", "select ';commit'", "select $$; commit; $$", "select $x$; commit;$x$", `select 1 as "commit"`, "select 1 as commit",
	"-- commit\nselect 1", "/* ; commit */ select 1", "/* /* */ ; commit */ select 1", "select 'a''; commit'", "select E'\\'; commit'",
	"select 1 as rollback; select 2 as begin", "do $$ begin perform 1; end $$", "prepare p as select 1; execute p; deallocate p",
	"declare c cursor for select 1; fetch c; close c", "set local work_mem = '1MB'", "lock table uploads", "",
	"select case when true then 1 end", "select '\\'",
}

func TestTx_RefusesStatementsThatEndTheTransaction(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) { t.Parallel(); refusesControls(t, mode) })
	}
}

func refusesControls(t *testing.T, mode pgx.QueryExecMode) {
	pool, c := setUpWith(t, metered.Config{}, pgtest.Options{Config: func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }})
	ctx := t.Context()
	ways := map[string]func(tx pgx.Tx, sql string) error{
		"exec": func(tx pgx.Tx, sql string) error { _, err := tx.Exec(ctx, sql); return err },
		"simple": func(tx pgx.Tx, sql string) error {
			_, err := tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
			return err
		},
		"query": func(tx pgx.Tx, sql string) error {
			rows, err := tx.Query(ctx, sql)
			rows.Close()
			require.ErrorIs(t, rows.Err(), err)
			return err
		},
		"row": func(tx pgx.Tx, sql string) error { return tx.QueryRow(ctx, sql).Scan() },
		"batch": func(tx pgx.Tx, sql string) error {
			b := &pgx.Batch{}
			b.Queue("select 1")
			b.Queue(sql)
			return tx.SendBatch(ctx, b).Close()
		},
		"prepare": func(tx pgx.Tx, sql string) error { _, err := tx.Prepare(ctx, "p", sql); return err },
		"rewriter": func(tx pgx.Tx, sql string) error {
			_, err := tx.Exec(ctx, "select 1", pgx.QueryExecModeSimpleProtocol, rewrite(sql))
			return err
		},
		"rewriter in a batch": func(tx pgx.Tx, sql string) error {
			b := &pgx.Batch{}
			b.Queue("select 1", rewrite(sql))
			return tx.SendBatch(ctx, b).Close()
		},
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "op"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Exec(ctx, `insert into uploads values ('a')`)
		require.NoError(t, err)
		nested, err := tx.Begin(ctx)
		require.NoError(t, err)
		deeper, err := nested.Begin(ctx)
		require.NoError(t, err)
		for _, to := range []pgx.Tx{tx, nested, deeper} {
			for name, way := range ways {
				for _, sql := range controls {
					require.ErrorIs(t, way(to, sql), metered.ErrTxControl, "%s by %s", sql, name)
				}
			}
			require.ErrorIs(t, to.SendBatch(ctx, begin()).Close(), metered.ErrTxControl)
		}
		require.ErrorIs(t, tx.Commit(ctx), metered.ErrTxControl)
		require.ErrorIs(t, tx.Rollback(ctx), metered.ErrTxControl)
		require.Equal(t, byte('T'), tx.Conn().PgConn().TxStatus(), "and the transaction is as it was")
		require.NoError(t, deeper.Commit(ctx))
		require.NoError(t, nested.Commit(ctx))
		return nil, nil
	})
	require.NoError(t, err)
	require.Equal(t, 1, count(t, pool, "uploads"))
}

type rewrite string

func (r rewrite) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	return string(r), nil, nil
}

func begin() *pgx.Batch {
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{})
	return b
}

func TestTx_AllowsSavepointsAndMentions(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for _, sql := range innocent {
		_, err := metered.Do(ctx, c, metered.Command{ID: "op " + sql}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
			require.NotErrorIs(t, err, metered.ErrTxControl, sql)
			return nil, err
		})
		require.NoError(t, err, sql)
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "nested"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		for i, end := range []func(pgx.Tx) error{
			func(nested pgx.Tx) error { return nested.Commit(ctx) },
			func(nested pgx.Tx) error { return nested.Rollback(ctx) },
		} {
			nested, err := tx.Begin(ctx)
			require.NoError(t, err)
			_, err = nested.Exec(ctx, "insert into uploads values ($1)", []string{"kept", "undone"}[i])
			require.NoError(t, err)
			require.NoError(t, end(nested))
			require.ErrorIs(t, nested.Rollback(ctx), pgx.ErrTxClosed)
		}
		require.ErrorIs(t, pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error { // as after a failed statement
			_, err := nested.Exec(ctx, "select 1/0")
			require.Error(t, err)
			return errOwn
		}), errOwn)
		_, err := tx.Exec(ctx, "update uploads set name = @name", pgx.NamedArgs{"name": "named"})
		require.NoError(t, err)
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"uploads"}, []string{"name"}, pgx.CopyFromRows([][]any{{"copied"}}))
		return nil, err
	})
	require.NoError(t, err)
	require.Equal(t, "copied,named", queryRow[string](t, pool, "select string_agg(name, ',' order by name) from uploads"))
}

// In the simple protocol the texts of a batch become one, in which what one text leaves open
// takes in the next.
func TestTx_RefusesATextThatLeavesSomethingOpen(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool := reopen(t, owner, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol })
	c := newClient(t, pool, metered.Config{})
	const escape = `; rollback; insert into uploads values ($$on its own$$); --`
	for i, texts := range [][2]string{
		{"select '", "'" + escape + "'"}, {`select 1 as "`, `"` + escape + `"`}, {"select 1 /*", "'*/" + escape + "'"},
		{"select $x$", "$x$" + escape + "$x$"}, {`select E'\`, "'" + escape + "'"}, {"select 1 /* /* */", "'*/" + escape + "'"},
	} {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: fmt.Sprint(i)}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			plain, rewritten := &pgx.Batch{}, &pgx.Batch{}
			for _, text := range texts {
				plain.Queue(text)
				rewritten.Queue("select 1", rewrite(text))
			}
			require.ErrorIs(t, tx.SendBatch(ctx, rewritten).Close(), metered.ErrTxControl, "%q", texts)
			require.ErrorIs(t, tx.SendBatch(ctx, plain).Close(), metered.ErrTxControl, "%q", texts)
			return nil, nil
		})
		require.NoError(t, err, "%q", texts)
		require.Zero(t, count(t, pool, "uploads"), "%q", texts)
	}
}

// With backslashes special in plain literals the same text means another thing.
func TestTx_KnowsHowLiteralsAreRead(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	const sql = `select '\'; commit; select '`
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Exec(ctx, sql+"'", pgx.QueryExecModeSimpleProtocol)
		require.ErrorIs(t, err, metered.ErrTxControl)
		_, err = tx.Exec(ctx, "set local standard_conforming_strings = off")
		require.NoError(t, err)
		_, err = tx.Exec(ctx, sql)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `select '\''; commit; select '`)
		require.ErrorIs(t, err, metered.ErrTxControl)
		return nil, nil
	})
	require.NoError(t, err)
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
					require.ErrorIs(t, err, metered.ErrTxControl)
				}
				return out, nil
			})
			require.Error(t, err)
			require.Contains(t, []string{"transaction_control", "transaction_failed"}, metered.Code(err), "%s: %v", sql, err)
			require.Equal(t, nothing, footprintOf(t, pool, cmd), sql)
		}
	}
	require.Zero(t, count(t, pool, "uploads"))
	requireUsable(t, c, "after")
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
				require.ErrorIs(t, err, metered.ErrTxDone)
				require.ErrorIs(t, tx.QueryRow(ctx, "select 1").Scan(), metered.ErrTxDone)
				_, err = tx.Query(ctx, "select 1")
				require.ErrorIs(t, err, metered.ErrTxDone)
				_, err = tx.Prepare(ctx, "p", "select 1")
				require.ErrorIs(t, err, metered.ErrTxDone)
				_, err = tx.CopyFrom(ctx, pgx.Identifier{"uploads"}, []string{"name"}, pgx.CopyFromRows(nil))
				require.ErrorIs(t, err, metered.ErrTxDone)
				_, err = tx.Begin(ctx)
				require.ErrorIs(t, err, metered.ErrTxDone)
				b := &pgx.Batch{}
				b.Queue("select 1")
				require.ErrorIs(t, tx.SendBatch(ctx, b).Close(), metered.ErrTxDone)
				large := tx.LargeObjects()
				_, err = large.Create(ctx, 0)
				require.ErrorIs(t, err, pgx.ErrTxClosed)
			}
			require.ErrorIs(t, nested.Commit(ctx), metered.ErrTxDone)
			require.ErrorIs(t, nested.Rollback(ctx), metered.ErrTxDone)
			require.ErrorIs(t, kept.Charge(charge("s", 1, 0)), metered.ErrTxDone)
			_, err = kept.Enqueue(ctx, process{}, nil)
			require.ErrorIs(t, err, metered.ErrTxDone)
			require.NoError(t, other.Rollback(ctx))
		}
	}
}
