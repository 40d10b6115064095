package tokens

import (
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/redact"
)

// Refusals. They leave the transaction usable.
var (
	// ErrInvalid says that a token is not valid. It is an *InvalidError, whose Reason is for logs.
	ErrInvalid error = fault.New("token_invalid", "tokens: the token is not valid")

	// ErrExists says that a token with this secret was minted before.
	ErrExists error = fault.New("token_exists", "tokens: a token with this secret was minted before")
)

var errArgument = fault.New("invalid_argument", "tokens: invalid argument")

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// InvalidError prints the same for every reason: a client may see it.
type InvalidError struct {
	redacted
	reason func() string // a func, so that no printer gets at it by reflection
}

func refuse(r string) error {
	return &InvalidError{redact.As(ErrInvalid.Error()), func() string { return r }}
}

// Reason is the first that holds, for your logs: "malformed" (another prefix, or mistyped: no query
// was made), "unknown" (never minted, or purged), "purpose", "subject", "revoked", "used" or
// "expired".
func (e *InvalidError) Reason() string {
	if e == nil || e.reason == nil {
		return ""
	}
	return e.reason()
}

func (e *InvalidError) Error() string { return ErrInvalid.Error() }

func (e *InvalidError) Unwrap() error { return ErrInvalid }
