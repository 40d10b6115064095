package pgtest

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// InTx runs fn in a transaction of its own, which commits if fn returns no error.
func InTx[R any](ctx context.Context, pool *pgxpool.Pool, fn func(pgx.Tx) (R, error)) (r R, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err = fn(tx)
		return err
	})
	return r, err
}
