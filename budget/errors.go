package budget

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Errors that the calls of every package of this module have in common. ErrArgument leaves the
// transaction usable, the others abort it.
var (
	// ErrArgument says that an argument was refused before any SQL. It is an *ArgumentError.
	ErrArgument error = errArgument

	// ErrBusy says that Config.LockTimeout has passed, or that so much is due in a scope that holds
	// with minima (Line.AtLeast) have to be swept first. A call that has a transaction of its own, and
	// metered.Client.RunTx, do that themselves.
	ErrBusy error = fault.ErrBusy

	// ErrSerialization says that the transaction collided with another one, SQLSTATE 40001 or
	// 40P01. Run it again, as metered.Client.RunTx does. A command has run it again by itself,
	// unless it is in a transaction of the caller's.
	ErrSerialization error = fault.ErrSerialization

	// ErrNotMigrated says that the schema, or a part of it, is missing or older than this build.
	ErrNotMigrated error = fault.ErrNotMigrated

	// ErrNotGranted says that the role lacks a grant.
	ErrNotGranted error = fault.ErrNotGranted
)

// Answers to charges and reads. The first four leave the transaction usable, the others abort it.
// Mistakes have a code (metered.Code) and no name here: budget_overflow, for sums of a scope beyond
// 2^62, budget_time_zone, budget_thresholds and limit_query.
var (
	// ErrExceeded says that a limit refused. It is an *ExceededError.
	ErrExceeded error = errExceeded

	// ErrScopeUnknown says that a scope that must exist was never created. It is a *ScopeError, as
	// are the next two.
	ErrScopeUnknown error = errScopeUnknown

	// ErrScopeRetired says that a scope that must exist was retired.
	ErrScopeRetired error = errScopeRetired

	// ErrScopeClosed says that the scope was carved, and has ended. Credit and Refund abort the
	// transaction with it.
	ErrScopeClosed error = errScopeClosed

	// ErrClock says that the scope's last entry is ahead of the clock: see Ledger.RepairClock.
	ErrClock error = fault.New("budget_clock", "budget: the scope's last entry is ahead of the clock")

	// ErrWindowPurged says that a window or a range begins before the entries that a purge kept. For
	// a range it is a *PurgedError.
	ErrWindowPurged error = errWindowPurged

	// ErrFeedGap says that entries of the feed are gone. It is a *FeedGapError.
	ErrFeedGap error = errFeedGap
)

// Answers to the id of an event or a command. Those of Ingest leave the transaction usable.
var (
	// ErrConflict says that the id belongs to another event or command.
	ErrConflict error = fault.New("operation_conflict", "budget: the id belongs to another event, or to a command")

	// ErrRetired says that the time of the id is not after the purged records: what it names may
	// have been counted, or may have run.
	ErrRetired error = fault.New("operation_retired", "budget: the event's time is not after the purge: perhaps it was counted before")

	// ErrFuture says that the time of the id is further ahead of the clock than Config.MaxFuture.
	ErrFuture error = fault.New("operation_future", "budget: the event's time is further ahead of the clock than Config.MaxFuture")

	// ErrLate says that an event occurred longer ago than Config.MaxLateness.
	ErrLate error = fault.New("event_late", "budget: the event occurred longer ago than Config.MaxLateness")
)

// Errors of calls that commit: ChargeNow, Batcher, metered.Client.RunTx and sqlmetered.Commit.
var (
	// ErrCommitUnknown says that the answer to COMMIT was lost: it may have taken effect.
	ErrCommitUnknown error = fault.New("commit_unknown", "budget: whether the charge was committed is not known")

	// ErrClosed says that the Batcher was closed.
	ErrClosed error = fault.New("batcher_closed", "budget: the batcher is closed")
)

// Refusals of a refund. They leave the transaction usable.
var (
	// ErrUnknownEntry says that the scope has no such entry.
	ErrUnknownEntry error = fault.New("budget_unknown_entry", "budget: no such entry")

	// ErrEntryPurged says that the charge was purged.
	ErrEntryPurged error = fault.New("budget_entry_purged", "budget: the charge was purged")

	// ErrNotCharge says that the entry is neither a charge nor a capture of a hold.
	ErrNotCharge error = fault.New("budget_not_charge", "budget: the entry is not a charge")

	// ErrRefundExceeds says that the refund is more than what is left of the charge. It is a
	// *RefundExceedsError.
	ErrRefundExceeds error = fault.New("budget_refund_exceeds", "budget: the refund exceeds the rest of the charge")
)

var (
	// errOverflow says that a sum of the scope would be more than 2^62.
	errOverflow = fault.New("budget_overflow", "budget: total would overflow")

	// errTimeZone says that the server does not know the time zone.
	errTimeZone = fault.New("budget_time_zone", "budget: the server does not know the time zone")

	errThresholds = fault.New("budget_thresholds", "budget: the scope has too many thresholds")
	errLimitQuery = fault.New("limit_query", "budget: the query of a limit")
)

var (
	errArgument     = fault.New("invalid_argument", "budget: invalid argument")
	errExceeded     = fault.New("budget_exceeded", "budget: limit exceeded")
	errWindowPurged = fault.New("budget_window_purged", "budget: window reaches purged entries")

	errFeedGap = fault.New("feed_gap", "budget: entries of the feed are not there any more")

	errScopeUnknown = fault.New("scope_unknown", "budget: no such scope was created")
	errScopeRetired = fault.New("scope_retired", "budget: the scope was retired")
	errScopeClosed  = fault.New("scope_closed", "budget: the scope is closed")
)

// ArgumentError names a refused argument, such as "Credit.Amount", in all packages of this module.
type ArgumentError = fault.Argument

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// Never is the RetryAfter of a charge that waiting cannot help.
const Never = time.Duration(math.MaxInt64)

// Refusal is a limit that refused a charge. Other fields are as in a Standing.
type Refusal struct {
	// Scope is the scope that was to be charged.
	Scope string `json:"scope"`

	// Limit is the limit that refused.
	Limit Limit `json:"limit"`

	// Used are the units that count, without held ones.
	Used int64 `json:"used"`

	// Held are the units that open holds of other transactions keep.
	Held int64 `json:"held"`

	// OwnHeld are the units that holds of this transaction keep. RetryAfter does not wait for
	// them.
	OwnHeld int64 `json:"own_held,omitempty"`

	// Leased are the units of open leases.
	Leased int64 `json:"leased,omitempty"`

	// Requested are the units that all charges of the call ask of the scope.
	Requested int64 `json:"requested"`

	// Available is the most that the limit would have let in.
	Available int64 `json:"available"`

	// RetryAfter is the time until Requested fits if nothing else happens. With open holds it is
	// the earliest such time, and with leases it is the end of the last one. Never is null in
	// JSON.
	RetryAfter time.Duration `json:"-"`

	// HoldDue is the time until an open hold may fall due, if Held is more than 0.
	HoldDue time.Duration `json:"-"`

	// PeriodStart is as in a Standing.
	PeriodStart time.Time `json:"period_start,omitzero"`

	// PeriodEnd is as in a Standing.
	PeriodEnd time.Time `json:"period_end,omitzero"`
}

func (r Refusal) text() string {
	of, help := fmt.Sprintf("limit %d per %v", r.Limit.Max, r.Limit.Window), "never fits"
	switch {
	case !r.Limit.Period.IsZero():
		of = fmt.Sprintf("limit %d per %s", r.Limit.Max, r.Limit.Period.word())
	case r.Limit.Window > 0:
	case r.Limit.Prepaid:
		of, help = "the credit left", "needs more credit"
	default: // credit and refunds count here, time does not
		of, help = fmt.Sprintf("limit %d for the lifetime", r.Limit.Max), "waiting makes no room"
	}
	if r.RetryAfter != Never {
		help = "retry after " + r.RetryAfter.String()
	}
	where := fmt.Sprintf("scope %q", r.Scope)
	if r.Limit.Name != "" {
		where += fmt.Sprintf(", limit %q", r.Limit.Name)
	}
	return fmt.Sprintf("%s: requested %d, available %d, %s, %s", where, r.Requested, r.Available, of, help)
}

// ExceededError lists every limit that refused. Its text is not for clients.
type ExceededError struct {
	// Refusals are the limits that refused, in the order of the charges and their limits.
	Refusals []Refusal `json:"refusals"`
}

func (e *ExceededError) Error() string {
	var b strings.Builder
	b.WriteString(errExceeded.Error())
	for i, r := range e.Refusals {
		b.WriteString([]string{": ", "; "}[min(i, 1)])
		b.WriteString(r.text())
	}
	return b.String()
}

func (e *ExceededError) Unwrap() error { return errExceeded }

// RetryAfter is the longest of the Refusals', perhaps Never.
func (e *ExceededError) RetryAfter() time.Duration {
	var longest time.Duration
	for _, r := range e.Refusals {
		longest = max(longest, r.RetryAfter)
	}
	return longest
}

// failed turns the error of a statement into the package's own, keeping the
// Postgres error underneath, whose Detail (scopes, limits) is never printed.
func failed(doing string, err error) error {
	var kind error
	switch sqlstate.Of(err) {
	case sqlstate.WindowPurged:
		kind = ErrWindowPurged
	case sqlstate.ClockBehind:
		return clockError(err)
	case sqlstate.Exceeded: // of a closed scope
		var pgErr *pgconn.PgError
		errors.As(err, &pgErr)
		return absentScopes([]byte(pgErr.Detail))
	case sqlstate.NumericOutOfRange:
		kind = errOverflow
	case sqlstate.UnknownZone: // its DETAIL is the zone, and the plan that needs it
		var pgErr *pgconn.PgError
		errors.As(err, &pgErr)
		return fmt.Errorf("%w: %s: %w", errTimeZone, pgErr.Detail, fault.Failed("budget", doing, err))
	case sqlstate.Thresholds:
		kind = errThresholds
	case sqlstate.FeedGap:
		return feedGap(err)
	default:
		return fault.Failed("budget", doing, err)
	}
	return fmt.Errorf("%w: %s: %w", kind, doing, err)
}

func clockError(err error) error {
	var pgErr *pgconn.PgError
	var detail struct {
		Scope   string `json:"scope"`
		AheadUS int64  `json:"ahead_us"`
	}
	if errors.As(err, &pgErr) {
		_ = json.Unmarshal([]byte(pgErr.Detail), &detail) // the schema wrote it
	}
	return fmt.Errorf("%w: scope %q by %v: %w", ErrClock, detail.Scope,
		time.Duration(detail.AheadUS)*time.Microsecond, err)
}
