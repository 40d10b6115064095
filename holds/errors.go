package holds

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Answers. They wrote nothing.
var (
	// ErrUnknown says that there is no such hold, or that it is another holder's (IsOthers).
	ErrUnknown error = errUnknown

	// ErrTaken says that a key has an active claim. It is a *TakenError.
	ErrTaken error = errTaken

	// ErrExcess says that a capture or return asks for more units than the line has. It is an
	// *ExcessError.
	ErrExcess error = errExcess

	// ErrCeiling says that an extension leads beyond Hold.Ceiling. Its text has the time left.
	ErrCeiling error = errCeiling

	// ErrState says that the hold's state forbids the call. It is a *StateError.
	ErrState error = errState

	// ErrRetired says that the time of the id is not after the latest that was purged: the hold may
	// have been among them.
	ErrRetired error = fault.New("hold_retired", "holds: the hold may have been purged")

	// ErrConflict says that the id was used for another hold.
	ErrConflict error = fault.New("hold_conflict", "holds: the id was used for another hold")

	// ErrNotReturnable says that a charge of the hold was purged or refunded before.
	ErrNotReturnable error = fault.New("hold_not_returnable", "holds: a charge of the hold was purged or refunded before")
)

var (
	errArgument = fault.New("invalid_argument", "holds: invalid argument")

	errUnknown = fault.New("hold_unknown", "holds: no such hold")
	errTaken   = fault.New("claim_taken", "holds: the claim is taken")
	errState   = fault.New("hold_state", "holds: the hold is in another state")
	errExcess  = fault.New("hold_excess", "holds: the amount exceeds the open units")
	errCeiling = fault.New("hold_ceiling", "holds: the extension leads past the hold's ceiling")

	// inState has the code and the text of a *StateError.
	inState = map[State]*fault.Sentinel{
		Held:     fault.New("hold_held", "holds: the hold is not captured"),
		Captured: fault.New("hold_captured", "holds: the hold was captured"),
		Released: fault.New("hold_released", "holds: the hold was released"),
		Expired:  fault.New("hold_expired", "holds: the hold has expired"),
		Returned: fault.New("hold_returned", "holds: the hold was captured and given back"),
	}
)

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

func index(list string, i int, field string) string { return fmt.Sprintf("%s[%d]%s", list, i, field) }

// unknownError is ErrUnknown. It prints and encodes the same whether the hold exists or not.
type unknownError struct{ others func() bool } // a func, so that no printer gets at it

func unknown(others bool) error { return &unknownError{func() bool { return others }} }

func (e *unknownError) Error() string { return errUnknown.Error() }

func (e *unknownError) Unwrap() error { return errUnknown }

func (e *unknownError) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, e.Error()) }

func (e *unknownError) LogValue() slog.Value { return slog.StringValue(e.Error()) }

func (e *unknownError) MarshalJSON() ([]byte, error) { return json.Marshal(e.Error()) }

// IsOthers reports whether err is ErrUnknown for another holder's hold: for logs.
func IsOthers(err error) bool {
	var e *unknownError
	return errors.As(err, &e) && e.others()
}

// StateError is a hold whose state forbids the call. Its code is "hold_" and the state.
type StateError struct {
	// ID is the hold's id.
	ID string

	// State is the state that forbids the call.
	State State

	// Hold is the hold as it stands.
	Hold Hold
}

func (e *StateError) kind() error {
	if kind := inState[e.State]; kind != nil {
		return kind
	}
	return inState[Held]
}

func (e *StateError) Error() string { return fmt.Sprintf("%v: %q", e.kind(), e.ID) }

func (e *StateError) Unwrap() []error { return []error{e.kind(), errState} }

// TakenError says that a key has an active claim.
type TakenError struct {
	// Key is the key that was to be claimed.
	Key Key

	// RetryAfter is the time until the value falls free if its holder does nothing. It is 0 if
	// Confirmed.
	RetryAfter time.Duration

	// Confirmed says that the value is taken until it is given back.
	Confirmed bool

	// By is the active claim, if Claim.Reveal is set. It is nil in a replay.
	By *Hold
}

func (e *TakenError) Error() string {
	if e.Confirmed {
		return fmt.Sprintf("%v: confirmed", errTaken)
	}
	return fmt.Sprintf("%v: for another %v", errTaken, e.RetryAfter)
}

func (e *TakenError) Unwrap() error { return errTaken }

// ExcessError is a capture or return of more than the Open units.
type ExcessError struct {
	// ID and Scope name the line of the hold.
	ID, Scope string

	// Requested are the units that the call asked for, and Open those that the line had.
	Requested, Open int64
}

func (e *ExcessError) Error() string {
	return fmt.Sprintf("%v: scope %q: requested %d, held %d", errExcess, e.Scope, e.Requested, e.Open)
}

func (e *ExcessError) Unwrap() error { return errExcess }

// failed wraps the error of a statement, and keeps the Postgres error underneath. Its Detail is
// never printed.
func failed(doing string, err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == sqlstate.HoldRefused {
		return refused([]byte(pgErr.Detail))
	}
	if sqlstate.Of(err) == sqlstate.Exceeded { // a closed scope
		return inBudget.Failed(doing, err)
	}
	return fault.Failed("holds", doing, err)
}

// refused decodes why a transition was refused.
func refused(answer []byte) error {
	var a struct {
		Status, ID, State, Scope string
		Requested, Open          int64
		LeftUS                   int64  `json:"left_us"`
		RetryUS                  *int64 `json:"retry_us"`
		Hold                     json.RawMessage
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		return fmt.Errorf("holds: read a refusal: %w", err)
	}
	switch a.Status {
	case "unknown":
		return unknown(false)
	case "holder":
		return unknown(true)
	case "retired":
		return ErrRetired
	case "conflict":
		return ErrConflict
	case "taken":
		return taken(Key{}, a.RetryUS, a.Hold)
	case "state", "returned":
		e := &StateError{ID: a.ID, State: states[a.State]}
		if err := e.Hold.decode(a.Hold); err != nil {
			return err
		}
		if e.Hold.State == Returned {
			e.State = Returned
		}
		return e
	case "line":
		return invalid("Capture.Lines", "the hold keeps nothing of scope %q", a.Scope)
	case "claim":
		return invalid("Capture.Keep", "is not for the unit of a claim: the capture that takes it confirms the claim")
	case "unconfirmed":
		return invalid("Capture.Lines", "leave out the unit of the claim, of scope %q: a capture that ends a claim takes it; else use Keep, or Release", a.Scope)
	case "excess":
		if a.Requested > 0 {
			return &ExcessError{ID: a.ID, Scope: a.Scope, Requested: a.Requested, Open: a.Open}
		}
		return ErrNotReturnable
	case "purged", "missing", "kind":
		return ErrNotReturnable
	case "left":
		return &ExcessError{ID: a.ID, Scope: a.Scope, Requested: a.Requested, Open: a.Open}
	case "claim_part":
		return invalid("Return.Lines", "leave out the unit of the claim, of scope %q: it is given back with all the rest", a.Scope)
	case "ceiling":
		return fmt.Errorf("%w: %q has %v left", errCeiling, a.ID, time.Duration(a.LeftUS)*time.Microsecond)
	}
	return fmt.Errorf("holds: the schema answers %q, which this build does not know", a.Status)
}

// taken is a *TakenError. by is the active claim as JSON, if the caller may see it.
func taken(key Key, retryUS *int64, by []byte) error {
	e := &TakenError{Key: key, Confirmed: retryUS == nil}
	if retryUS != nil {
		e.RetryAfter = time.Duration(*retryUS) * time.Microsecond
	}
	if len(by) > 0 && string(by) != "null" {
		e.By = new(Hold)
		if err := e.By.decode(by); err != nil {
			return err
		}
	}
	return e
}
