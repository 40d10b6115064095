package replica_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/replica"
)

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	pool := new(pgxpool.Pool)
	niltest.Func(t, "CommitLSN", replica.CommitLSN, pool)
	niltest.Func(t, "ReadLSN", replica.ReadLSN, pool)
	niltest.Func(t, "ReadAt", replica.ReadAt, pool, replica.LSN(1), time.Second, func(context.Context, *pgx.Conn) error { return nil })
}
