package pgtest_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

func TestWire_ReadsExecutedStatements(t *testing.T) {
	t.Parallel()
	pool, w := pgtest.Tap(t, pgtest.Open(t), nil)
	for range 2 {
		w.Each(nil)
		_, err := pool.Exec(t.Context(), "select $1::text", "x")
		require.NoError(t, err)
	}
	sent := w.Sent()
	require.Len(t, sent, 1)
	require.Equal(t, []string{"select $1::text"}, sent[0].SQL)
}

// With slow writes pgx reads in the background, and is at it when the next flush is sent.
func TestWire_HasTheAnswerAlsoWhilePgxReads(t *testing.T) {
	t.Parallel()
	pool, w := pgtest.Tap(t, pgtest.Open(t), nil)
	w.Slow.Store(int64(30 * time.Millisecond))
	_, err := pool.Exec(t.Context(), "select 1")
	require.NoError(t, err)
	var answers []byte
	w.Once(func(f *pgtest.Flush) bool { return f.Has("select 2") }, func(f *pgtest.Flush) {
		f.Deliver = func() {
			answers = f.Ask()
			f.Conn.Answer = answers
		}
	})
	_, err = pool.Exec(t.Context(), "select 2", pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	require.Contains(t, string(answers), "SELECT 1\x00")
}
