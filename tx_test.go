package metered_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
)

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
