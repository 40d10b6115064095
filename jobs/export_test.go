package jobs

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Drop drops jobs that have waited for too long, as Run and Release do.
func Drop(ctx context.Context, e *Enqueuer, pool *pgxpool.Pool) error {
	_, err := e.drop(ctx, pool, &tally{})
	return err
}

// EndAll releases holds of jobs that River has ended, as Run does when it hears of their ends.
func EndAll(ctx context.Context, e *Enqueuer, pool *pgxpool.Pool, ids ...string) (int64, error) {
	var all []ofJob
	for _, id := range ids {
		all = append(all, ofJob{id: id})
	}
	return e.endAll(ctx, pool, all)
}

// TakeOut takes a job out of its lines whose row of River had changed when it had that hold, as Run
// does.
func TakeOut(ctx context.Context, e *Enqueuer, pool *pgxpool.Pool, id int64, hold string) error {
	return e.takeOut(ctx, pool, id, hold)
}

// Apart has wait in place of the time that Run keeps between looks which notices cause.
func Apart(e *Enqueuer, wait func(atLeast time.Duration) <-chan time.Time) {
	e.apart = func(_ time.Time, atLeast time.Duration) <-chan time.Time { return wait(atLeast) }
}

// ConflictError lets tests see the fields of an ErrConflict.
type ConflictError = conflictError
