// Package observe lets a program watch the library. Set an Observer in metered.Config for
// everything, or in the Config of budget (for its holds and leases, too), tokens or jobs. Module
// otelmetered is one for OpenTelemetry.
//
// The work waits for its Observer: count there, and send in another goroutine. In Do the id and the
// token may be locked meanwhile, but no scope, except with subscribers or budget.Limit.MaxFrom. A
// transaction of yours keeps all its locks. An Observer's panics are recovered, and the first goes
// to slog.Default.
//
// Names are the program's own words (of commands, limits, queues) or the library's. Scopes,
// subjects, keys and amounts of customers are in End.Err, Op.ID and Op.Tenant alone: for traces and
// not for labels.
package observe

import (
	"context"
	"time"
)

// An Observer is called from many goroutines.
type Observer interface {
	// Start begins work. It returns the work's context, made from ctx, and a function for its end, or
	// nil.
	Start(ctx context.Context, op Op) (context.Context, func(End))

	// Event tells of a moment.
	Event(ctx context.Context, e Event)
}

// Work is a kind of work. Its Names are in quotes.
type Work string

const (
	// Command is metered.Do or DoTx, with all attempts. Its Name is Command.Name.
	Command Work = "command"

	// Connect waits for a connection of the pool.
	Connect Work = "connect"

	// Flush is a round trip of a command, with waits for locks: "begin" (after sticky charges
	// "open"), "sticky", "lock", "complete", "commit", "replay", or "run", which is a whole command
	// without a function.
	Flush Work = "flush"

	// Function is the command's function.
	Function Work = "function"

	// Call is a call of a package, such as "budget.charge" or "holds.place".
	Call Work = "call"

	// Enqueue is jobs.Enqueue or EnqueueMany. Its Name is the kind of the first job.
	Enqueue Work = "enqueue"

	// Batch is a transaction of a budget.Batcher. End.Rows are its charges.
	Batch Work = "batch"

	// Sweep is holds.Book.Sweep, or wallet.Book.Sweep as "lots". End.Rows are the announced holds, or
	// the ended lots.
	Sweep Work = "sweep"

	// Purge deletes "entries", "operations", "holds", "tokens", "job_keys" or "leases". End.Rows are
	// the deleted rows.
	Purge Work = "purge"

	// Lease opens ("open") or settles ("settle") a lease, or charges for Allow without one ("direct").
	Lease Work = "lease"
)

// Op is work that begins.
type Op struct {
	// Work is the kind of work that begins.
	Work Work

	// Name says which work of this kind it is. The constants of Work list the names.
	Name string

	// Tenant and ID are a command's own. They are unbounded, and perhaps personal: use them in
	// traces and not as labels of metrics.
	Tenant, ID string
}

// Outcome is how a command ended.
type Outcome string

const (
	// Committed is the only outcome with an effect.
	Committed Outcome = "committed"

	// Open is the outcome of DoTx: the caller has yet to commit.
	Open Outcome = "open"

	// Replayed says that an earlier call committed the command.
	Replayed Outcome = "replayed"

	// Refused says that a budget, token, hold or scope refused, now or on record.
	Refused Outcome = "refused"

	// Conflict says that another command has the id, or that its time is too old or too new.
	Conflict Outcome = "conflict"

	// Indefinite says that nobody knows whether the command committed.
	Indefinite Outcome = "indefinite"

	// Failed is anything else: nothing was written.
	Failed Outcome = "failed"
)

// End is how work ended.
type End struct {
	// Err is the error that the work returned, or nil.
	Err error

	// Code is metered.Code(Err).
	Code string

	// Outcome is how a command ended. Other work has none.
	Outcome Outcome

	// Attempts are the transactions that a command has tried.
	Attempts int

	// RoundTrips are those of a command in all attempts, without the round trips of its function.
	RoundTrips int

	// Rows are what the constants of Work say.
	Rows int64

	// Jobs are the ids of the jobs of an Enqueue, new or not.
	Jobs []int64
}

// Kind is a kind of event. Its Names are in quotes.
type Kind string

const (
	// Retried counts transactions that run again, by the cause: "serialization", "deadlock" or
	// "lease_closed".
	Retried Kind = "retried"

	// Commit is an answer to COMMIT that was "lost", for N commands or charges, and later what became
	// of each: "committed", "not_committed", "unknown" (ErrIndefinite, ErrCommitUnknown), or "left",
	// the same for a caller whose context was cancelled.
	Commit Kind = "commit"

	// LimitRefused counts refusals of a limit, by its Name, or else "lifetime", "credit", its window,
	// as "1h0m0s", or period, as "month (UTC)".
	LimitRefused Kind = "limit_refused"

	// Threshold counts crossings of a threshold, by the limit, as in LimitRefused, a slash, and the
	// threshold's Name.
	Threshold Kind = "threshold"

	// Token counts tokens that were "consumed", and refused ones by their tokens.InvalidError.Reason.
	Token Kind = "token"

	// Hold counts holds that changed, by the holds.EventKind.
	Hold Kind = "hold"

	// Job counts jobs that are "created", or that their keys found "existing". Some of those created
	// are "parked", then "released" or "dropped", and "troubled" at each try that failed.
	Job Kind = "job"

	// SweepLag is how late the oldest hold or lot was when a sweep of "holds" or "lots" began, or 0.
	SweepLag Kind = "sweep_lag"

	// SweepSkipped counts the N "holds" or "lots" that a sweep left for the next one, since a
	// transaction uses their scope.
	SweepSkipped Kind = "sweep_skipped"

	// SweepFailed counts the N "holds" or "lots" that a sweep left for the next one, since a
	// subscriber failed.
	SweepFailed Kind = "sweep_failed"

	// Purged counts the rows that each batch of a Purge deleted, by its Name.
	Purged Kind = "purged"

	// Slice is of leases: N units are "opened" for this process, and a slice of N "ended". Of one
	// that it settled, its own or another's, N are "spent" and N "returned". After a refusal all
	// slices of a scope are "recalled".
	Slice Kind = "slice"

	// Lots counts lots that were "granted", "revoked" (in part or whole), "reinstated", "rolled over",
	// or "ended" by a sweep.
	Lots Kind = "lots"

	// LotsLapsed counts the units of lots that lapsed (breakage). A sweep counts them, whatever call
	// ended the lots.
	LotsLapsed Kind = "lots_lapsed"

	// Session counts sessions that were "opened", "resumed", "renewed", "not_renewed" (a failed try),
	// "settled", "cancelled", "lost" or "abandoned" (only closed).
	Session Kind = "session"
)

// Event is a moment without a duration.
type Event struct {
	// Kind is the kind of event.
	Kind Kind

	// Name says which event of this kind it is. The constants of Kind list the names.
	Name string

	// N is how many things the event is about, 1 or more.
	N int64

	// Pending says that the event is gone if an open transaction rolls back. It is always set for
	// jobs, and never for the tokens and holds of metered.Do.
	Pending bool

	// Lag is how late a sweep was, for SweepLag.
	Lag time.Duration
}
