package command_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
)

// writes is a command of two statements and a charge.
func writes(id string, level pgx.TxIsoLevel) metered.Command {
	b := &pgx.Batch{}
	b.Queue("insert into uploads values ($1)", id)
	b.Queue("insert into uploads values (@id)", pgx.NamedArgs{"id": id + " too"})
	return metered.Command{ID: id, Input: 1, Statements: b, Isolation: level, Charges: []budget.Charge{charge("statements", 1, 1000)}}
}

// Statements, claim, charge, record and COMMIT are one flush, by each protocol and at each level of isolation. A
// repetition is answered from the record, another command of the id is a conflict, and a refusal leaves nothing.
func TestStatements_GoInOneFlushOfWhichAllOrNothingIsDone(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			owner, w, c, _ := onWire(t, metered.Config{}, func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode })
			ctx := t.Context()
			rows := 0
			for i, level := range isolationLevels {
				_, err := metered.Do[any](ctx, c, writes(fmt.Sprint("warm ", i), level), nil)
				require.NoError(t, err)
				before := len(w.Sent())
				cmd := writes(fmt.Sprint("op ", i), level)
				first, err := metered.Do[any](ctx, c, cmd, nil)
				require.NoError(t, err)
				require.Len(t, w.Sent(), before+1)
				require.False(t, first.Replayed)
				require.Len(t, first.Receipt.Entries, 1)
				rows += 4
				require.Equal(t, rows, count(t, owner, "uploads"))

				again, err := metered.Do[any](ctx, c, cmd, nil)
				require.NoError(t, err)
				require.True(t, again.Replayed)
				require.Equal(t, first.At, again.At)
				require.Equal(t, first.Receipt.Entries[0].Seq, again.Receipt.Entries[0].Seq)
				other := cmd
				other.Input = 2
				_, err = metered.Do[any](ctx, c, other, nil)
				require.ErrorIs(t, err, budget.ErrConflict)

				refused := writes(fmt.Sprint("refused ", i), level)
				refused.Charges[0].Amount = 1001
				_, err = metered.Do[any](ctx, c, refused, nil)
				require.ErrorIs(t, err, budget.ErrExceeded)

				failing := writes(fmt.Sprint("failing ", i), level)
				failing.Statements.Queue("insert into uploads values ($1)", cmd.ID)
				_, err = metered.Do[any](ctx, c, failing, nil)
				var of *metered.StatementError
				require.ErrorAs(t, err, &of)
				require.Equal(t, 2, of.Index)
				var pg *pgconn.PgError
				require.ErrorAs(t, err, &pg)
				require.Equal(t, "23505", pg.Code)
				wrong := writes(fmt.Sprint("wrong ", i), level)
				wrong.Statements.Queue("insert into nowhere values (1)")
				_, err = metered.Do[any](ctx, c, wrong, nil)
				require.ErrorAs(t, err, &of)
				require.Equal(t, 2, of.Index)
				require.Equal(t, rows, count(t, owner, "uploads"))
				for _, id := range []string{refused.ID, failing.ID, wrong.ID} {
					_, err = c.Lookup(ctx, owner, "", id)
					require.ErrorIs(t, err, metered.ErrUnknownOperation)
				}
			}
			require.EqualValues(t, rows/2, used(t, owner, c, "statements"))
			pgtest.RequireUsable(t, c, "after")
		})
	}
}

// Whatever becomes of the flush, the command has run once, with statements or without.
func TestStatements_AnUnknownOutcomeIsResolved(t *testing.T) {
	t.Parallel()
	owner, w, c, _ := onWire(t, metered.Config{}, nil)
	ctx := t.Context()
	rows, charged := 0, int64(0)
	for what, test := range map[string]struct {
		fault    func(*pgtest.Flush)
		replayed bool
		answer   string
	}{
		"the answer is lost":         {(*pgtest.Flush).LoseAnswer, true, ""},
		"the flush is lost":          {(*pgtest.Flush).Lose, false, ""},
		"the backend is terminated":  {func(f *pgtest.Flush) { f.Terminate(t, owner) }, false, ""},
		"an ERROR, though committed": {func(f *pgtest.Flush) { f.AnswerInDoubt("XX000", true) }, true, ""},
		"an ERROR, not committed":    {func(f *pgtest.Flush) { f.AnswerInDoubt("XX000", false) }, false, "XX000"},
	} {
		for _, level := range isolationLevels {
			for _, bare := range []bool{false, true} {
				cmd, wrote := writes(fmt.Sprint(what, level, bare), level), 2
				if bare {
					cmd.Statements, wrote, cmd.Isolation = nil, 0, ""
				}
				w.Once(func(f *pgtest.Flush) bool {
					return f.Last() && f.Has("begin_command_plain") || f.Has("run_command_plain")
				}, test.fault)
				out, err := metered.Do[any](ctx, c, cmd, nil)
				if test.answer != "" {
					require.ErrorContains(t, err, test.answer)
				} else {
					require.NoError(t, err, what)
					require.Equal(t, test.replayed, out.Replayed, what)
					rows += wrote
					charged++
				}
				require.Equal(t, rows, count(t, owner, "uploads"), what)
				require.Equal(t, charged, used(t, owner, c, "statements"), what)
			}
		}
	}
}

// Of calls with one id at once one runs, and all have its answer.
func TestStatements_OfOneIDRunOnce(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	for _, level := range isolationLevels {
		var group sync.WaitGroup
		var at [6]time.Time
		for i := range at {
			group.Go(func() {
				out, err := metered.Do[any](t.Context(), c, writes("op "+string(level), level), nil)
				if err == nil {
					at[i] = out.At
				} else {
					t.Error(err)
				}
			})
		}
		group.Wait()
		for _, other := range at {
			require.Equal(t, at[0], other)
		}
	}
	require.Equal(t, 2*len(isolationLevels), count(t, pool, "uploads"))
	require.EqualValues(t, len(isolationLevels), used(t, pool, c, "statements"))
}

// A statement that waits gives up with the context, and nothing was done: the same id runs once the way is free.
func TestStatements_AreTakenBackWhenTheContextEnds(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	for _, level := range isolationLevels {
		cmd := writes("op "+string(level), level)
		blocking, err := pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = blocking.Exec(t.Context(), "insert into uploads values ($1)", cmd.ID)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, err = metered.Do[any](ctx, c, cmd, nil)
		cancel()
		require.Error(t, err)
		require.True(t, metered.Retryable(err), err)
		require.NoError(t, blocking.Rollback(t.Context()))
		out, err := metered.Do[any](t.Context(), c, cmd, nil)
		require.NoError(t, err)
		require.Len(t, out.Receipt.Entries, 1)
	}
	require.Equal(t, 2*len(isolationLevels), count(t, pool, "uploads"))
	require.EqualValues(t, len(isolationLevels), used(t, pool, c, "statements"))
}

// rewritten is a statement whose text is made when it is sent.
type rewritten string

func (r rewritten) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	return string(r), nil, nil
}

// No statement ends the transaction, has an answer, or is two. A command with a function sends its own.
func TestStatements_AreRefusedWhereTheyCannotBeAllOrNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for i, queue := range []func(*pgx.Batch){
		func(b *pgx.Batch) { b.Queue("commit") },
		func(b *pgx.Batch) { b.Queue("rollback") },
		func(b *pgx.Batch) { b.Queue("close metered_command") },
		func(b *pgx.Batch) { b.Queue("select '") },
		func(b *pgx.Batch) { b.Queue("select 'rewritten'", rewritten("commit")) },
	} {
		cmd := writes(fmt.Sprint("control ", i), "")
		queue(cmd.Statements)
		_, err := metered.Do[any](ctx, c, cmd, nil)
		require.ErrorIs(t, err, guardtx.ErrControl)
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := metered.DoTx[any](ctx, c, tx, cmd, nil)
			require.ErrorIs(t, err, guardtx.ErrControl)
			return nil
		}))
	}
	for i, queue := range []func(*pgx.Batch){
		func(b *pgx.Batch) { b.Queue("select 1; commit") },
		func(b *pgx.Batch) { b.Queue("select 1").QueryRow(func(pgx.Row) error { return nil }) },
	} {
		cmd := writes(fmt.Sprint("argument ", i), "")
		queue(cmd.Statements)
		_, err := metered.Do[any](ctx, c, cmd, nil)
		require.ErrorIs(t, err, budget.ErrArgument)
		require.ErrorContains(t, err, "Command.Statements[2]")
	}
	_, err := metered.Do(ctx, c, writes("function", ""), func(context.Context, *metered.Tx) (int, error) { return 1, nil })
	require.ErrorIs(t, err, budget.ErrArgument)
	require.Zero(t, count(t, pool, "uploads"))
	require.Zero(t, count(t, pool, "metered.operations"))
}

// Where one flush will not do, the statements come after the claim, as a function's would.
func TestStatements_GoWithWhateverElseACommandHas(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for what, with := range map[string]func(*metered.Command){
		"token":         func(cmd *metered.Command) { cmd.Token = redeem(mint(t, pool, c)) },
		"sticky":        func(cmd *metered.Command) { cmd.Sticky = []budget.Charge{charge("sticky", 1, 100)} },
		"early release": func(cmd *metered.Command) { cmd.EarlyRelease = true },
		"order":         func(cmd *metered.Command) { cmd.Newest = metered.Order{Key: "k", At: monday} },
	} {
		cmd := writes(what, "")
		with(&cmd)
		for range 2 {
			_, err := metered.Do[any](ctx, c, cmd, nil)
			require.NoError(t, err, what)
		}
		cmd = writes("failing "+what, "")
		cmd.Statements.Queue("insert into uploads values ($1)", what)
		if what != "token" && what != "order" {
			with(&cmd)
		}
		_, err := metered.Do[any](ctx, c, cmd, nil)
		var of *metered.StatementError
		require.ErrorAs(t, err, &of, what)
		require.Equal(t, 2, of.Index)
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx[any](ctx, c, tx, writes("lent", ""), nil)
		return err
	}))
	require.Equal(t, 10, count(t, pool, "uploads"))
	require.EqualValues(t, 5, used(t, pool, c, "statements"))
}

// In one flush the server does not guard the transaction. A statement that was prepared under a name can be a
// COMMIT, so it goes the guarded way.
func TestStatements_APreparedCommitIsRefused(t *testing.T) {
	t.Parallel()
	pool, _, c, _ := onWire(t, metered.Config{}, func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Prepare(ctx, "finish", "commit")
			_, again := conn.Prepare(ctx, "finish it", "commit")
			_, own := conn.Prepare(ctx, "upload", "insert into uploads values ($1)")
			return errors.Join(err, again, own)
		}
	})
	for _, name := range []string{"finish", "finish it"} {
		cmd := writes(name, "")
		cmd.Statements.Queue(name)
		_, err := metered.Do[any](t.Context(), c, cmd, nil)
		require.ErrorContains(t, err, "the command of this transaction is not complete")
	}
	cmd := writes("rewritten", "")
	cmd.Statements.Queue("select 1", rewritten("finish"))
	_, err := metered.Do[any](t.Context(), c, cmd, nil)
	require.Error(t, err)
	require.Zero(t, count(t, pool, "uploads"))
	require.Zero(t, count(t, pool, "metered.operations where id = 'rewritten'"))
	cmd = writes("named", "")
	cmd.Statements.Queue("upload", "by name")
	_, err = metered.Do[any](t.Context(), c, cmd, nil)
	require.NoError(t, err)
	require.Equal(t, 3, count(t, pool, "uploads"))
}
