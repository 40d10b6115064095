package metered

import "github.com/pgmetered/metered/internal/fault"

// Errors of set-up and of arguments.
var (
	// ErrInvalid is the identity of every refused argument of this package. The
	// error itself is an *ArgumentError that names the argument.
	ErrInvalid error = errInvalid

	// ErrSchemaVersion means that the database's schema is newer than this build.
	ErrSchemaVersion error = fault.New("schema_version", "metered: schema version")
)

var errInvalid = fault.New("invalid_argument", "metered: invalid argument")

// ArgumentError says which argument was refused, and why, before any SQL ran.
type ArgumentError = fault.Argument

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errInvalid, field, format, args...)
}

// Code returns the stable code of err ("budget_exceeded", "token_invalid", …),
// for metrics, logs and programs on the other side of a wire. It is "" for nil
// and for errors that are not this library's.
func Code(err error) string { return fault.Code(err) }
