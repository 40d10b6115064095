package jobs

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Drop drops jobs that have waited for too long, as Run and Release do.
func Drop(ctx context.Context, e *Enqueuer, pool *pgxpool.Pool) error {
	_, err := e.drop(ctx, pool)
	return err
}
