// Package observe is how a program watches what the library does: for metrics, traces and logs. Set an [Observer] as
// metered.Config.Observer, which hands it to all pieces, or in the Config of budget, tokens or jobs where these are used
// alone; holds and leases have that of their ledger. Module otelmetered is one for OpenTelemetry.
//
// An Observer is called in the goroutine that does the work, and that waits for it. So it should do no more than count:
// what it sends, it sends elsewhere. While it is called in Do, a command may have claimed its id and spent its token, but has
// no scope locked, unless it asks limits of the database (budget.Limit.MaxFrom) or has subscribers. A call in a
// transaction of the caller's has what that transaction locked.
//
// An Observer that panics changes nothing: the panic is recovered, the first one is written to slog.Default, and the call goes
// on. Without an Observer nothing is called, measured or allocated.
//
// Names are the program's own words (of commands, limits, queues) or the library's. Scopes, subjects, keys and amounts of
// customers are never told, but for Op.ID and Op.Namespace, which are for traces and not for labels.
package observe

import (
	"context"
	"time"
)

// Observer is told what the library does. It is called by many goroutines at once.
type Observer interface {
	// Start is told that a piece of work begins. It returns the context for what belongs to it, which is ctx or made from
	// it, and what is told of the end, once, or nil.
	Start(ctx context.Context, op Op) (context.Context, func(End))
	// Event is told what happened.
	Event(ctx context.Context, e Event)
}

// Work is a kind of work.
type Work string

// What has a beginning and an end. In quotes are the Names that there are.
const (
	Command  Work = "command"  // metered.Do or DoTx, with all its attempts; Name is Command.Name
	Connect  Work = "connect"  // waits for a connection of the pool
	Flush    Work = "flush"    // one round trip of a command: see the Flush constants
	Function Work = "function" // the command's function; what it sends and enqueues is inside
	Call     Work = "call"     // a call of a piece, as "budget.charge" or "holds.place", with its round trips
	Enqueue  Work = "enqueue"  // jobs.Enqueue or EnqueueMany; Name is the kind of the first job
	Batch    Work = "batch"    // one transaction of a budget.Batcher; End.Rows are the charges that it made
	Sweep    Work = "sweep"    // holds.Book.Sweep; End.Rows are the holds that were announced
	Purge    Work = "purge"    // "entries" "operations" "holds" "tokens" "job_keys" "leases"; End.Rows were deleted
	Lease    Work = "lease"    // "open" or "settle" a lease, or charge for Allow without one ("direct")
)

// The Names of a Flush. Each but the last two waits for locks on the server, which a client cannot see: how long a flush
// takes is the wait, one round trip, and the work. A flush that ends with Code "busy" waited for the lock timeout.
const (
	FlushBegin    = "begin"    // BEGIN; waits for the operation's id and the token's row
	FlushOpen     = "open"     // the same for the token, after sticky charges
	FlushSticky   = "sticky"   // sticky charges, in a transaction of their own; waits for their scopes
	FlushLock     = "lock"     // waits for all scopes and holds, and asks limits (budget.Limit.MaxFrom)
	FlushComplete = "complete" // the steps and the charges; waits for scopes and holds; with COMMIT, or before subscribers
	FlushCommit   = "commit"   // COMMIT alone, after subscribers
	FlushReplay   = "replay"   // waits until the record that was found is durable
)

// Op is a piece of work.
type Op struct {
	Work Work
	Name string // as Work says; bounded, as far as the program's own names are

	Namespace, ID string // of a Command: unbounded, and perhaps personal
}

// Outcome is what became of a Command.
type Outcome string

// The outcomes of a Command. Nothing but what is Committed has happened; Code says more.
const (
	Committed  Outcome = "committed"
	Open       Outcome = "open"       // DoTx: done, in a transaction that is the caller's to commit
	Replayed   Outcome = "replayed"   // an earlier call did it
	Refused    Outcome = "refused"    // by a budget, a token, a hold or a scope; also a refusal on record
	Conflict   Outcome = "conflict"   // the id belongs to another command, or its time is too old or too new
	Indefinite Outcome = "indefinite" // whether it committed is not known
	Failed     Outcome = "failed"     // anything else: nothing was written
)

// End is the end of a piece of work.
type End struct {
	Err  error  // nil if it succeeded; its text may have scopes and amounts
	Code string // metered.Code(Err): bounded; "" for errors that are not the library's

	Outcome    Outcome // of a Command
	Attempts   int     // of a Command: how often it was tried
	RoundTrips int     // of a Command: those of its flushes, in all attempts; not those of its function
	Rows       int64   // as Work says
	Jobs       []int64 // of Enqueue: the ids, new or not
}

// Kind is a kind of event.
type Kind string

// What happens. In quotes are the Names that there are.
const (
	// Retried: a transaction runs again, since it met others: "serialization" "deadlock" "lease_closed".
	Retried Kind = "retried"
	// CommitLost: the answer to a COMMIT was lost. N are the commands or charges in it.
	CommitLost Kind = "commit_lost"
	// CommitResolved is told once for each of N: "committed", "not_committed", or "unknown", which is an ErrIndefinite or
	// ErrCommitUnknown.
	CommitResolved Kind = "commit_resolved"

	// Denied: a limit refused. Name is the limit's, or else "lifetime", "credit", its window, as "1h0m0s", or its period, as
	// "month (UTC)". A denial by two limits is told twice.
	Denied Kind = "denied"
	// Threshold: a charge crossed a threshold, and told of it. Name is the limit's, as of Denied, a slash, and the threshold's. Pending.
	Threshold Kind = "threshold"

	TokenConsumed Kind = "token_consumed"
	TokenRefused  Kind = "token_refused" // Name is the tokens.Reason

	Hold Kind = "hold" // N holds changed: Name is a holds.EventKind, as "placed", "captured", "released", "expired"
	Job  Kind = "job"  // N jobs are "created", or were there under their key: "existing"

	// SweepLag: when a sweep began, the oldest hold that was due and not swept was so late: Lag, 0 without one.
	SweepLag  Kind = "sweep_lag"
	SweepLeft Kind = "sweep_left" // N holds were left for the next sweep: "skipped" (in use), "failed" (a subscriber)
	Purged    Kind = "purged"     // N rows of a Purge's Name are deleted; told after each batch

	LeaseOpened   Kind = "lease_opened"   // N units are out in this process
	LeaseEnded    Kind = "lease_ended"    // N units, as they were opened, are not any more
	LeaseSpent    Kind = "lease_spent"    // N units of a lease that this process settled, whoever had it
	LeaseReturned Kind = "lease_returned" // and N units of it that were free again
	LeaseRecalled Kind = "lease_recalled" // this process asked all for their slices of a scope, after a denial
)

// Event is something that happened.
type Event struct {
	Kind Kind
	Name string // as Kind says
	N    int64  // how many, 1 or more
	// Pending: it was done in a transaction that is open, and is taken back if that rolls back: an attempt. Otherwise it is
	// committed, or an answer that nothing takes back, as a denial. Of a command with metered.Do, tokens and holds are told
	// when they are committed. Jobs are always pending.
	Pending bool
	Lag     time.Duration // of SweepLag
}
