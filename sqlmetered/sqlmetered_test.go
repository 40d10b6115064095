package sqlmetered_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/sqlmetered"
	"github.com/pgmetered/metered/tokens"
)

var levels = []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}

var errOwn = errors.New("the function says no")

type process struct {
	Name string `json:"name"`
}

func (process) Kind() string { return "process" }

type set struct {
	pool *pgxpool.Pool
	c    *metered.Client
	db   *sql.DB
}

func setUp(t *testing.T, opts pgtest.Options) set {
	t.Helper()
	pool, c := pgtest.SetUp(t, metered.Config{}, opts)
	db := sqlmetered.OpenDB(pool)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return set{pool, c, db}
}

func (s set) begin(t *testing.T, level sql.IsolationLevel) *sql.Tx {
	t.Helper()
	tx, err := s.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

func insert(t *testing.T, tx *sql.Tx, name string) {
	t.Helper()
	_, err := tx.Exec("insert into uploads values ($1)", name)
	require.NoError(t, err)
}

func charge(scope string, amount, limit int64) budget.Charge {
	return budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{{Max: limit, Window: time.Hour}}}
}

// rows counts the rows of a whole command and its transaction.
func (s set) rows(t *testing.T) (n [6]int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), `select (select count(*) from metered.operations),
		(select count(*) from metered.ledger), (select count(*) from metered.hold_events), (select coalesce(sum(used), 0) from metered.tokens),
		(select count(*) from river_job), (select count(*) from uploads)`).Scan(&n[0], &n[1], &n[2], &n[3], &n[4], &n[5]))
	return n
}

// whole returns a command that does all that one can do, by a token of its own, and its function.
func (s set) whole(t *testing.T, id string) (metered.Command, metered.Func[string]) {
	t.Helper()
	var secret string
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		token, err := s.c.Tokens.Mint(t.Context(), tx, tokens.Mint{Purpose: "upload", Subject: "ann", TTL: time.Hour})
		secret = token.Token.Reveal()
		return err
	}))
	return metered.Command{
			ID: id, Input: 1, Token: &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: secret},
			Charges: []budget.Charge{charge("units", 2, 100)},
		}, func(ctx context.Context, tx *metered.Tx) (string, error) {
			_, err := tx.Exec(ctx, "insert into uploads values ($1)", id)
			require.NoError(t, err)
			_, err = tx.Enqueue(ctx, process{id}, &jobs.Options{Key: id})
			require.NoError(t, err)
			_, err = tx.Place(ctx, holds.Placement{ID: id, Lines: []holds.Line{{Scope: "seats", Amount: 1}}, TTL: time.Hour}, nil)
			return "done", err
		}
}

func TestDoTx_IsPartOfTheTransaction(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			s := setUp(t, pgtest.Options{})
			cmd, fn := s.whole(t, "op")
			do := func(end func(*sql.Tx) error) {
				tx := s.begin(t, level)
				insert(t, tx, "before")
				out, err := sqlmetered.DoTx(t.Context(), s.c, tx, cmd, fn)
				require.NoError(t, err)
				require.Equal(t, "done", out.Result)
				require.Len(t, out.Holds, 1)
				var is string
				require.NoError(t, tx.QueryRow("show transaction isolation level").Scan(&is))
				require.Equal(t, level, map[string]sql.IsolationLevel{"read committed": sql.LevelReadCommitted,
					"repeatable read": sql.LevelRepeatableRead, "serializable": sql.LevelSerializable}[is])
				insert(t, tx, "after")
				again, err := sqlmetered.DoTx(t.Context(), s.c, tx, cmd, fn)
				require.NoError(t, err)
				require.True(t, again.Replayed)
				require.Zero(t, s.rows(t), "nothing is seen before the commit")
				require.NoError(t, end(tx))
			}
			do((*sql.Tx).Rollback)
			require.Zero(t, s.rows(t))
			do(sqlmetered.Commit)
			require.Equal(t, [6]int{1, 2, 1, 1, 1, 3}, s.rows(t))
			out, err := metered.Do(t.Context(), s.c, cmd, fn)
			require.NoError(t, err)
			require.True(t, out.Replayed)
		})
	}
}

func TestDoTx_ARefusedOrFailedCommandLeavesTheTransactionAsItWas(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	for _, level := range levels {
		tx := s.begin(t, level)
		insert(t, tx, level.String())
		out, err := sqlmetered.DoTx(t.Context(), s.c, tx, metered.Command{ID: "op", Charges: []budget.Charge{charge("units", 2, 1)}},
			func(ctx context.Context, tx *metered.Tx) (int, error) {
				_, err := tx.Exec(ctx, "insert into uploads values ('undone')")
				return 1, err
			})
		require.ErrorIs(t, err, budget.ErrExceeded)
		require.Zero(t, out)
		_, err = sqlmetered.DoTx(t.Context(), s.c, tx, metered.Command{ID: "op"}, func(ctx context.Context, tx *metered.Tx) (int, error) {
			_, err := tx.Exec(ctx, "select 1/0")
			return 1, err
		})
		require.ErrorContains(t, err, "22012")
		require.PanicsWithValue(t, errOwn, func() {
			_, _ = sqlmetered.DoTx(t.Context(), s.c, tx, metered.Command{ID: "op"}, func(context.Context, *metered.Tx) (int, error) { panic(errOwn) })
		})
		require.NoError(t, sqlmetered.Commit(tx))
	}
	require.Equal(t, [6]int{5: 3}, s.rows(t))
}

// At the levels above READ COMMITTED a writer with an old snapshot fails, and its whole transaction is worth another run.
func TestDoTx_ACollisionIsRetryable(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	for _, level := range levels {
		tx := s.begin(t, level)
		insert(t, tx, level.String()) // has its snapshot now
		_, err := metered.Do[any](t.Context(), s.c, metered.Command{ID: "first " + level.String(), Charges: []budget.Charge{charge("units", 1, 9)}}, nil)
		require.NoError(t, err)
		_, err = sqlmetered.DoTx[any](t.Context(), s.c, tx, metered.Command{ID: level.String(), Charges: []budget.Charge{charge("units", 1, 9)}}, nil)
		if level == sql.LevelReadCommitted {
			require.NoError(t, err)
			require.NoError(t, sqlmetered.Commit(tx))
			continue
		}
		require.ErrorContains(t, err, "40001")
		require.True(t, metered.Retryable(err))
	}
}

func TestNilArguments(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	tx := s.begin(t, sql.LevelDefault)
	niltest.Func(t, "InTx", sqlmetered.InTx, tx, func(context.Context, pgx.Tx) error { return nil })
	niltest.Func(t, "Commit", sqlmetered.Commit, tx)
	none := niltest.Given{Arg: metered.Func[any](nil)}
	niltest.Func(t, "DoTx", sqlmetered.DoTx[any], niltest.Given{Arg: s.c}, tx, metered.Command{ID: "op"}, none)
	session, err := metered.Open[any](t.Context(), s.c, answer("1"))
	require.NoError(t, err)
	defer session.Close()
	niltest.Func(t, "OpenTx", sqlmetered.OpenTx[any], niltest.Given{Arg: s.c}, tx, answer("2"))
	niltest.Func(t, "SettleTx", sqlmetered.SettleTx[any], session, tx, used(1), none)
}
