package budget_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

func TestUsage_AnswersManyQueriesInTheOrderAsked(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	const scopes = 32
	var charges []budget.Charge
	for i := range scopes {
		charges = append(charges, budget.Charge{Scope: fmt.Sprint(i), Amount: int64(i + 1)})
	}
	for range 2 {
		_, err := l.Charge(ctx, autocommit{Querier: pool}, charges...)
		require.NoError(t, err)
		clock.Advance(time.Minute)
	}
	var queries []budget.Query
	var want []budget.Usage
	for n := range budget.MaxQueries {
		i := n * 7 % (scopes + 1)
		u := budget.Usage{Query: budget.Query{Scope: fmt.Sprint(i), Window: time.Duration(n%3) * time.Minute}}
		if amount := int64(i + 1); i < scopes {
			u.Used = amount * []int64{2, 0, 1}[n%3]
			u.Spent, u.Seq = 2*amount, 2
		}
		queries, want = append(queries, u.Query), append(want, u)
	}
	got, err := l.Usage(ctx, pool, queries...)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// In a REPEATABLE READ transaction the answers are those of its snapshot, and
// nothing waits for a lock.
func TestUsage_AndCheckNeitherWaitNorWrite(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustCharge(t, pool, l, "a", 1)
	occupy(t, pool, l, "a")
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(ctx)) }()
	require.Equal(t, int64(1), usage(t, tx, l, "a", time.Hour).Used)
	r, err := l.Check(ctx, tx, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{budget.Lifetime(5)}})
	require.NoError(t, err)
	require.Equal(t, budget.Standing{Limit: budget.Lifetime(5), Used: 2, Available: 3}, r.Entries[0].Standings[0])
	var locks int
	require.NoError(t, tx.QueryRow(ctx, `select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'`).Scan(&locks))
	require.Zero(t, locks)
}
