package sqlmetered_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/sqlmetered"
)

// prepares counts the statements that pgx prepares.
type prepares struct{ n int }

func (p *prepares) TracePrepareStart(ctx context.Context, _ *pgx.Conn, _ pgx.TracePrepareStartData) context.Context {
	p.n++
	return ctx
}

func (*prepares) TracePrepareEnd(context.Context, *pgx.Conn, pgx.TracePrepareEndData) {}

func (*prepares) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (*prepares) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A pool of one connection serves a Client and a *sql.DB that was told to keep idle ones, and each
// statement is prepared once.
func TestOpenDB_GivesEachConnectionBack(t *testing.T) {
	t.Parallel()
	var traced prepares
	pool, client := pgtest.SetUp(t, metered.Config{}, pgtest.Options{MaxConns: 1, Config: func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &traced
	}})
	db := sqlmetered.OpenDB(pool)
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxIdleConns(100)
	db.SetMaxOpenConns(100)
	back := func(after string) {
		t.Helper()
		require.Zero(t, pool.Stat().AcquiredConns(), after)
	}
	_, err := db.Exec("create table notes (text text not null)")
	require.NoError(t, err)
	back("Exec")
	insert, err := db.Prepare("insert into notes values ($1)")
	require.NoError(t, err)
	back("Prepare")
	traced.n = 0
	for _, text := range []string{"a", "b", "c"} {
		_, err = insert.Exec(text)
		require.NoError(t, err)
		back("a prepared statement")
	}
	require.Equal(t, 1, traced.n)
	for _, ends := range []func(*sql.Tx) error{sqlmetered.Commit, (*sql.Tx).Rollback} {
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		_, err = tx.Stmt(insert).Exec("d")
		require.NoError(t, err)
		_, err = sqlmetered.DoTx[any](t.Context(), client, tx, metered.Command{ID: metered.NewID(),
			Charges: []budget.Charge{{Scope: "notes", Amount: 1}}}, nil)
		require.NoError(t, err)
		require.NoError(t, ends(tx))
		back("a transaction")
	}
	rows, err := db.Query("select text from notes order by text")
	require.NoError(t, err)
	all := ""
	for rows.Next() {
		var text string
		require.NoError(t, rows.Scan(&text))
		all += text
	}
	require.NoError(t, rows.Err())
	require.Equal(t, "abcd", all)
	back("Query")
	_, err = insert.Exec(1, 2)
	require.Error(t, err)
	back("an error")
	usage, err := client.Budget.Usage(t.Context(), pool, budget.Query{Scope: "notes"})
	require.NoError(t, err)
	require.EqualValues(t, 1, usage[0].Used)
	require.NoError(t, insert.Close())
	require.NoError(t, db.Close())
	require.NoError(t, pool.Ping(t.Context()), "the pool stays open")
}

func TestOpenDB_WithoutAPoolIsAnArgumentError(t *testing.T) {
	t.Parallel()
	db := sqlmetered.OpenDB(nil)
	var refused *budget.ArgumentError
	require.ErrorAs(t, db.Ping(), &refused)
	require.Equal(t, "pool", refused.Field)
}
