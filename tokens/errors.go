package tokens

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"

	"github.com/pgmetered/metered/internal/fault"
)

// Refusals.
var (
	// ErrInvalid is the one answer for a bad token: malformed, unknown, used, expired, revoked, or of another purpose
	// or subject. The error is an *InvalidError.
	ErrInvalid error = fault.New("token_invalid", "tokens: the token is not valid")

	// ErrExists: a token with the given Secret was minted before, and is not purged. Nothing was written.
	ErrExists error = fault.New("token_exists", "tokens: a token with this secret was minted before")
)

// Failures of the moment or of the set-up.
var (
	// ErrBusy: a lock was not free within the lock timeout. The transaction is aborted; try again.
	ErrBusy error = fault.ErrBusy

	// ErrNotMigrated: the schema is missing or incomplete.
	ErrNotMigrated error = fault.ErrNotMigrated

	// ErrNotGranted: the role lacks a right that the call needs.
	ErrNotGranted error = fault.ErrNotGranted
)

// ErrArgument is every refused argument. The error is an *ArgumentError. No SQL ran.
var ErrArgument error = errArgument

var errArgument = fault.New("invalid_argument", "tokens: invalid argument")

// ArgumentError says which argument was refused, and why. Field names it as the caller wrote it ("Mint.TTL").
type ArgumentError = fault.Argument

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// Reason says why a token was refused. It is for your logs and metrics, not for whoever presented the token.
type Reason string

// The reasons, in the order in which they are looked for.
const (
	ReasonMalformed Reason = "malformed" // not a token of this store's prefix, or mistyped; no query was made
	ReasonUnknown   Reason = "unknown"   // never minted, or purged
	ReasonPurpose   Reason = "purpose"   // minted for another purpose
	ReasonSubject   Reason = "subject"   // minted for another subject
	ReasonRevoked   Reason = "revoked"
	ReasonUsed      Reason = "used" // no uses left
	ReasonExpired   Reason = "expired"
)

// InvalidError is the error behind ErrInvalid. It prints and encodes the same for every reason, so a client may see
// it.
type InvalidError struct{ reason func() Reason } // a func, so that no printer gets at it by reflection

func refuse(r Reason) error { return &InvalidError{reason: func() Reason { return r }} }

// Reason says what was wrong with the token.
func (e *InvalidError) Reason() Reason {
	if e == nil || e.reason == nil {
		return ""
	}
	return e.reason()
}

// Error returns the text of ErrInvalid.
func (e *InvalidError) Error() string { return ErrInvalid.Error() }

// Unwrap returns ErrInvalid, for errors.Is.
func (e *InvalidError) Unwrap() error { return ErrInvalid }

// Code returns "token_invalid".
func (e *InvalidError) Code() string { return fault.Code(ErrInvalid) }

// Format prints the text of ErrInvalid, whatever the verb.
func (e *InvalidError) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, e.Error()) }

// GoString returns the text of ErrInvalid.
func (e *InvalidError) GoString() string { return e.Error() }

// LogValue returns the text of ErrInvalid. Log Reason beside it.
func (e *InvalidError) LogValue() slog.Value { return slog.StringValue(e.Error()) }

// MarshalJSON encodes the text of ErrInvalid.
func (e *InvalidError) MarshalJSON() ([]byte, error) { return json.Marshal(e.Error()) }

// MarshalText returns the text of ErrInvalid.
func (e *InvalidError) MarshalText() ([]byte, error) { return []byte(e.Error()), nil }
