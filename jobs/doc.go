// Package jobs enqueues River jobs in the caller's transaction, once per key.
//
// Enqueue inserts through your own river.Client: typed workers, queues, retries,
// hooks and middleware stay River's. What it adds is the key. The first Enqueue of
// a (queue, key) makes the job; every later one returns that job's id with Created
// false, whatever has become of the job, for as long as the key is retained.
// Without a key it is River's insert, with a tenant if you like.
//
//	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
//	    Plugins: []rivertype.Plugin{jobs.Plugin()}, // needed for keys
//	    …
//	})
//	enqueuer, err := jobs.New(client, jobs.Config{})
//	result, err := enqueuer.Enqueue(ctx, tx, ProcessAsset{ID: 42}, &jobs.Options{Key: "asset/42"})
//
// # Why not River's unique jobs
//
// They answer another question: is there such a job now? They lock and rewrite
// the job row that they find, which makes every duplicate wait for the worker's
// own update of it and leaves a dead row behind; they make a new job once the
// first one was cancelled or discarded, since those states do not count; and they
// forget when River's cleaner deletes the job, a day after it was completed by
// default. A command that is retried a week later must not run its job again, so
// keys are kept in a table of this library's, for as long as you choose. For "no
// two of these at once" River's unique jobs are right, and are there without a key.
//
// # How it works
//
// A keyed Enqueue is one round trip more than River's insert. The first claims
// the key, in metered.job_keys, with a job id taken from River's sequence; the
// second is River's insert, in which Plugin gives the job that id. Neither row has
// to be touched again. The job's NOTIFY is River's and transactional, so nobody hears of
// a job before it is committed, or ever of one that was rolled back.
//
// # Retention
//
// A key is remembered until Purge removes it. After that it looks new, and an
// Enqueue of it makes a second job, even if the first is still scheduled. Retain
// keys for longer than a caller may retry and longer than any job is scheduled
// ahead.
//
// # Rights
//
// An application needs what metered.GrantSQL gives, and on River's tables what
// River's own insert needs: select, insert and update on river_job and usage on
// river_job_id_seq. Purge needs what metered.GrantMaintenanceSQL gives.
package jobs
