package jobs

import (
	"cmp"
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

const findSQL = `
select queue, key, job_id, kind, tenant, created_at
from metered.find_job_key($1, $2)`

// Find returns the job of a key, or ErrNotFound. queue "" means "default".
func (e *Enqueuer) Find(ctx context.Context, db querier, queue, key string) (Enqueued, error) {
	if err := cmp.Or(e.made(), notNil("db", db)); err != nil {
		return Enqueued{}, err
	}
	queue = cmp.Or(queue, river.QueueDefault)
	switch {
	case len(queue) > 64 || !queuePattern.MatchString(queue):
		return Enqueued{}, invalid("queue", "%.80q is no name of a queue", queue)
	case key == "" || len(key) > maxKeyBytes || !storable(key):
		return Enqueued{}, invalid("key", "want 1 to %d bytes of UTF-8 without NUL", maxKeyBytes)
	}
	var r Enqueued
	err := answer.QueryRow(ctx, db, e.findSQL, queue, key).
		Scan(&r.Queue, &r.Key, &r.ID, &r.Kind, &r.Tenant, &r.ClaimedAt)
	if errors.Is(err, pgx.ErrNoRows) {
		return Enqueued{}, ErrNotFound
	}
	if err != nil {
		return Enqueued{}, fault.Failed("jobs", "find key", err)
	}
	return r, nil
}
