// Package jobs enqueues River jobs in the caller's transaction, once per key.
//
// The first Enqueue of a (queue, key) makes the job. Later ones return its id with Created false,
// whatever became of it, until Purge removes the key. Without a key it is River's insert. Workers,
// queues, retries and hooks stay River's. Reads take no lock.
//
// NewWorker makes River's worker of jobs whose cost is known at their end, and NewCleanupWorker one
// for holds that are due.
//
// docs/operations.md has the grants on River's tables.
package jobs
