package answer_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/pgtest"
)

const (
	askSQL      = `select $1::timestamptz, $2::interval, $3::bytea, 'infinity'::timestamptz > $1::timestamptz, null::bytea, $4::text[] from pg_catalog.generate_series(1, $5::int)`
	settingsSQL = `select pg_catalog.current_setting('DateStyle') || pg_catalog.current_setting('IntervalStyle') || pg_catalog.current_setting('bytea_output')`
)

var (
	at    = time.Date(2026, 2, 3, 4, 5, 6, 789_000, time.UTC) // another date where day and month are swapped
	lasts = 25*time.Hour + time.Millisecond
	raw   = []byte("a\\'\x00\xff\\x41")
)

func execute(t *testing.T, tx pgx.Tx, sql string) {
	t.Helper()
	_, err := tx.Exec(t.Context(), sql)
	require.NoError(t, err)
}

// row reads an answer of askSQL.
func row(t *testing.T) func(row pgx.CollectableRow) (struct{}, error) {
	return func(row pgx.CollectableRow) (_ struct{}, err error) {
		var gotAt time.Time
		var gotLasts time.Duration
		var gotRaw, none []byte
		var later bool
		var texts []string
		if err = row.Scan(&gotAt, &gotLasts, &gotRaw, &later, &none, &texts); err == nil {
			require.WithinDuration(t, at, gotAt, 0)
			require.Equal(t, lasts, gotLasts)
			require.Equal(t, raw, gotRaw)
			require.Nil(t, none)
			require.Equal(t, []string{"null", "ä"}, texts)
		}
		return struct{}{}, err
	}
}

// A statement has the same answer in each mode of pgx under any setting: of a pool, of a connection, of a transaction, in a
// savepoint of one, alone and in a batch. The caller's settings stay, also after an error.
func TestAnswers_AreTheSameUnderAnySetting(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	for name, settings := range map[string]map[string]string{
		"usual":    {},
		"German":   {"DateStyle": "German", "IntervalStyle": "sql_standard", "TimeZone": "Asia/Kolkata", "bytea_output": "escape"},
		"SQL":      {"DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601", "TimeZone": "America/St_Johns", "array_nulls": "off"},
		"Postgres": {"DateStyle": "Postgres, MDY", "IntervalStyle": "postgres_verbose", "bytea_output": "escape", "backslash_quote": "off"},
		"interval": {"IntervalStyle": "iso_8601"},
	} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeCacheStatement} {
			t.Run(name+" "+mode.String(), func(t *testing.T) {
				t.Parallel()
				ctx := t.Context()
				pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) {
					c.MaxConns = 2
					c.ConnConfig.DefaultQueryExecMode = mode
					for setting, value := range settings {
						c.ConnConfig.RuntimeParams[setting] = value
					}
				})
				conn, err := pool.Acquire(ctx)
				require.NoError(t, err)
				defer conn.Release()
				before := pgtest.Value[string](t, conn, settingsSQL)
				stays := func(db answer.Querier) {
					t.Helper()
					require.Equal(t, before, pgtest.Value[string](t, db, settingsSQL))
				}
				args := []any{at, lasts, raw, []string{"null", "ä"}, 2}
				ask := func(db interface {
					answer.Querier
					answer.RowQuerier
				}, by answer.Querier) {
					t.Helper()
					rows, err := answer.Query(ctx, db, askSQL, args...)
					require.NoError(t, err)
					all, err := pgx.CollectRows(rows, row(t))
					require.NoError(t, err)
					require.Len(t, all, 2)
					stays(by)
					var one time.Time
					require.NoError(t, answer.QueryRow(ctx, db, "select $1::timestamptz", at).Scan(&one))
					require.WithinDuration(t, at, one, 0)
					require.ErrorIs(t, answer.QueryRow(ctx, db, "select $1::timestamptz where false", at).Scan(&one), pgx.ErrNoRows)
					stays(by)
				}
				ask(pool, pool)
				ask(conn, conn)
				ask(conn.Conn(), conn)
				require.ErrorContains(t, answer.QueryRow(ctx, conn, "select 1 / $1::int", 0).Scan(new(int)), "22012")
				stays(conn)

				tx, err := conn.Begin(ctx)
				require.NoError(t, err)
				ask(tx, tx)
				ask(answer.Tx(tx), tx)
				sub, err := answer.Tx(tx).Begin(ctx)
				require.NoError(t, err)
				ask(sub, tx)
				require.ErrorContains(t, answer.QueryRow(ctx, sub, "select 1 / $1::int", 0).Scan(new(int)), "22012")
				require.NoError(t, sub.Rollback(ctx))
				stays(tx)

				for _, last := range []string{"release savepoint mine", "select 1 / 0"} {
					batch := &pgx.Batch{}
					batch.Queue("savepoint mine")
					batch.Queue(askSQL, args...)
					batch.Queue("select $1::timestamptz", at)
					batch.Queue(last)
					results := answer.SendBatch(ctx, tx, batch)
					_, err := results.Exec()
					require.NoError(t, err)
					rows, err := results.Query()
					require.NoError(t, err)
					all, err := pgx.CollectRows(rows, row(t))
					require.NoError(t, err)
					require.Len(t, all, 2)
					var one time.Time
					require.NoError(t, results.QueryRow().Scan(&one))
					require.WithinDuration(t, at, one, 0)
					if _, err = results.Exec(); last == "select 1 / 0" {
						require.ErrorContains(t, err, "22012")
						require.Error(t, results.Close())
						execute(t, tx, "rollback to savepoint mine")
					} else {
						require.NoError(t, err)
						require.NoError(t, results.Close())
					}
					stays(tx)
				}
				require.NoError(t, tx.Commit(ctx))
				stays(conn)
			})
		}
	}
}

// What a caller has set within a transaction stays, too.
func TestAnswers_LeaveWhatATransactionHasSet(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		execute(t, tx, "set local datestyle = 'SQL, DMY'")
		var got time.Time
		require.NoError(t, answer.QueryRow(t.Context(), tx, "select $1::timestamptz", at).Scan(&got))
		require.WithinDuration(t, at, got, 0)
		require.Equal(t, "SQL, DMY", pgtest.Value[string](t, tx, "show datestyle"))
		return nil
	}))
}
