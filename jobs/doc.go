// Package jobs enqueues River jobs in the caller's transaction, once per key.
//
//	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
//	    Plugins: []rivertype.Plugin{jobs.Plugin()}, // needed for keys
//	    …
//	})
//	enqueuer, err := jobs.New(client, jobs.Config{})
//	result, err := enqueuer.Enqueue(ctx, tx, ProcessAsset{ID: 42}, &jobs.Options{Key: "asset/42"})
//
// The first Enqueue of a (queue, key) makes the job. Every later one returns that job's id with Created false, whatever has become of the
// job, until Purge removes the key. Without a key it is River's insert. Workers, queues, retries and hooks stay River's.
//
// River's unique jobs forget a job that was cancelled, discarded or cleaned up, so a command that is retried a week later would run its job
// again. For "no two of these at once" use them, without a key.
//
// An application needs the grants of metered.GrantSQL, and select, insert and update on river_job and usage on river_job_id_seq.
package jobs
