package guardtx_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/guardtx"
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

// setUp opens a database with a table.
func setUp(t *testing.T, opts pgtest.Options) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.OpenWith(t, opts)
	_, err := pool.Exec(t.Context(), `create table uploads (name text primary key)`)
	require.NoError(t, err)
	return pool
}

func uploads(t *testing.T, pool *pgxpool.Pool) (names string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `select coalesce(string_agg(name, ',' order by name), '') from uploads`).Scan(&names))
	return names
}

// lend runs fn in a transaction that it cannot end, and commits.
func lend(ctx context.Context, pool *pgxpool.Pool, fn func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		done := new(atomic.Bool)
		defer done.Store(true)
		return fn(guardtx.New(tx, done))
	})
}

func TestTx_RefusesStatementsThatEndTheTransaction(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) { t.Parallel(); refusesControls(t, mode) })
	}
}

func refusesControls(t *testing.T, mode pgx.QueryExecMode) {
	pool := setUp(t, pgtest.Options{Config: func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }})
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
	err := lend(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into uploads values ('a')`)
		require.NoError(t, err)
		nested, err := tx.Begin(ctx)
		require.NoError(t, err)
		deeper, err := nested.Begin(ctx)
		require.NoError(t, err)
		for _, to := range []pgx.Tx{tx, nested, deeper} {
			for name, way := range ways {
				for _, sql := range controls {
					require.ErrorIs(t, way(to, sql), guardtx.ErrControl, "%s by %s", sql, name)
				}
			}
			require.ErrorIs(t, to.SendBatch(ctx, begin()).Close(), guardtx.ErrControl)
		}
		require.ErrorIs(t, tx.Commit(ctx), guardtx.ErrControl)
		require.ErrorIs(t, tx.Rollback(ctx), guardtx.ErrControl)
		require.Equal(t, byte('T'), tx.Conn().PgConn().TxStatus(), "and the transaction is as it was")
		require.NoError(t, deeper.Commit(ctx))
		require.NoError(t, nested.Commit(ctx))
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, "a", uploads(t, pool))
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
	pool := setUp(t, pgtest.Options{})
	ctx := t.Context()
	for _, sql := range innocent {
		err := lend(ctx, pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
			require.NotErrorIs(t, err, guardtx.ErrControl, sql)
			return err
		})
		require.NoError(t, err, sql)
	}
	err := lend(ctx, pool, func(tx pgx.Tx) error {
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
			return pgx.ErrNoRows
		}), pgx.ErrNoRows)
		_, err := tx.Exec(ctx, "update uploads set name = @name", pgx.NamedArgs{"name": "named"})
		require.NoError(t, err)
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"uploads"}, []string{"name"}, pgx.CopyFromRows([][]any{{"copied"}}))
		return err
	})
	require.NoError(t, err)
	require.Equal(t, "copied,named", uploads(t, pool))
}

// In the simple protocol the texts of a batch become one, in which an open quote of one text swallows the next.
func TestTx_RefusesATextThatLeavesSomethingOpen(t *testing.T) {
	t.Parallel()
	pool := setUp(t, pgtest.Options{Config: func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol }})
	ctx := t.Context()
	const escape = `; rollback; insert into uploads values ($$on its own$$); --`
	for _, texts := range [][2]string{
		{"select '", "'" + escape + "'"}, {`select 1 as "`, `"` + escape + `"`}, {"select 1 /*", "'*/" + escape + "'"},
		{"select $x$", "$x$" + escape + "$x$"}, {`select E'\`, "'" + escape + "'"}, {"select 1 /* /* */", "'*/" + escape + "'"},
	} {
		err := lend(ctx, pool, func(tx pgx.Tx) error {
			plain, rewritten := &pgx.Batch{}, &pgx.Batch{}
			for _, text := range texts {
				plain.Queue(text)
				rewritten.Queue("select 1", rewrite(text))
			}
			require.ErrorIs(t, tx.SendBatch(ctx, rewritten).Close(), guardtx.ErrControl, "%q", texts)
			require.ErrorIs(t, tx.SendBatch(ctx, plain).Close(), guardtx.ErrControl, "%q", texts)
			return nil
		})
		require.NoError(t, err, "%q", texts)
		require.Empty(t, uploads(t, pool), "%q", texts)
	}
}

// With backslashes special in plain literals the same text means another thing.
func TestTx_KnowsHowLiteralsAreRead(t *testing.T) {
	t.Parallel()
	pool, ctx := setUp(t, pgtest.Options{}), t.Context()
	const sql = `select '\'; commit; select '`
	err := lend(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sql+"'", pgx.QueryExecModeSimpleProtocol)
		require.ErrorIs(t, err, guardtx.ErrControl)
		_, err = tx.Exec(ctx, "set local standard_conforming_strings = off")
		require.NoError(t, err)
		_, err = tx.Exec(ctx, sql)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `select '\''; commit; select '`)
		require.ErrorIs(t, err, guardtx.ErrControl)
		return nil
	})
	require.NoError(t, err)
}
