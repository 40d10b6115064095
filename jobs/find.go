package jobs

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// Record is a key and its job.
type Record struct {
	// Queue is the queue of the job.
	Queue string `json:"queue"`

	// Key is the key that names the job within Queue.
	Key string `json:"key"`

	// JobID is the job's id in River, where the job may be deleted by now.
	JobID int64 `json:"job_id"`

	// Kind is the kind of the job.
	Kind string `json:"kind"`

	// Tenant is the tenant of the job's Options.
	Tenant string `json:"tenant,omitempty"`

	// ClaimedAt is when the key was used first.
	ClaimedAt time.Time `json:"claimed_at"`
}

const findSQL = `
select queue, key, job_id, kind, tenant, created_at
from metered.find_job_key($1, $2)`

// Find returns the record of a key, or ErrNotFound. queue "" means "default".
func (e *Enqueuer) Find(ctx context.Context, db querier, queue, key string) (Record, error) {
	if err := cmp.Or(e.made(), notNil("db", db)); err != nil {
		return Record{}, err
	}
	queue = cmp.Or(queue, river.QueueDefault)
	switch {
	case len(queue) > 64 || !queuePattern.MatchString(queue):
		return Record{}, invalid("queue", "%.80q is no name of a queue", queue)
	case key == "" || len(key) > maxKeyBytes || !storable(key):
		return Record{}, invalid("key", "want 1 to %d bytes of UTF-8 without NUL", maxKeyBytes)
	}
	var r Record
	err := answer.QueryRow(ctx, db, e.findSQL, queue, key).
		Scan(&r.Queue, &r.Key, &r.JobID, &r.Kind, &r.Tenant, &r.ClaimedAt)
	if errors.Is(err, pgx.ErrNoRows) {
		return Record{}, ErrNotFound
	}
	if err != nil {
		return Record{}, fault.Failed("jobs", "find key", err)
	}
	return r, nil
}
