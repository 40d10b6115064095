// Package fault holds the two shapes that errors of this library have in
// common: a sentinel with a stable code, and a refused argument. And it tells
// errors that may pass from those that stay.
package fault

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"
)

// Sentinel identifies a kind of failure by its code. Two packages with the same code mean the same
// failure, and errors.Is finds the one in the other's errors, under any wrapping.
type Sentinel struct{ code, text string }

// New returns a sentinel. The code is stable across releases, for metrics and for programs on the
// other side of a wire. The text is for people.
func New(code, text string) *Sentinel { return &Sentinel{code: code, text: text} }

func (s *Sentinel) Error() string { return s.text }

// Code returns the stable code.
func (s *Sentinel) Code() string { return s.code }

// Is reports whether target is a sentinel of the same code.
func (s *Sentinel) Is(target error) bool {
	other, ok := target.(*Sentinel)
	return ok && other.code == s.code
}

// Argument says which argument of a call was refused before any SQL ran.
type Argument struct {
	// Field names the argument as the caller wrote it: "Charge.Amount".
	Field string
	// Reason says why the argument is refused, and what is allowed.
	Reason string

	kind    *Sentinel
	program bool // a mistake of the program, not of its client
}

// Misuse is Invalid for a mistake of the program.
func Misuse(kind *Sentinel, field, format string, args ...any) *Argument {
	a := Invalid(kind, field, format, args...)
	a.program = true
	return a
}

// Misused reports whether err refuses an argument that the program makes up, and no client of it: a
// limit, a configuration, a nil.
func Misused(err error) bool {
	var a *Argument
	return errors.As(err, &a) && (a.program || slices.ContainsFunc(strings.Split(a.Field, "."), func(part string) bool {
		return strings.HasPrefix(part, "Limits") || strings.HasSuffix(part, "Config")
	}))
}

// Invalid returns an Argument that unwraps to kind.
func Invalid(kind *Sentinel, field, format string, args ...any) *Argument {
	return &Argument{Field: field, Reason: fmt.Sprintf(format, args...), kind: kind}
}

func (a *Argument) Error() string { return a.kind.text + ": " + a.Field + ": " + a.Reason }

// Unwrap returns the sentinel, for errors.Is.
func (a *Argument) Unwrap() error { return a.kind }

// Code returns the sentinel's stable code.
func (a *Argument) Code() string { return a.kind.code }

// Made refuses a receiver that its package's New did not make.
func Made(kind *Sentinel, receiver string, made bool) error {
	if !made {
		return Misuse(kind, receiver, "was not made by New")
	}
	return nil
}

// NotNil refuses an argument that is nil, or an interface with a nil pointer in it.
func NotNil(kind *Sentinel, field string, arg any) error {
	v := reflect.ValueOf(arg)
	if arg == nil || (v.Kind() == reflect.Pointer || v.Kind() == reflect.Func) && v.IsNil() {
		return Misuse(kind, field, "is nil")
	}
	return nil
}

// Text refuses text that Postgres cannot store, or that is longer than maxBytes.
func Text(kind *Sentinel, field, text string, maxBytes int) error {
	switch {
	case len(text) > maxBytes:
		return Invalid(kind, field, "is %d bytes long, want at most %d", len(text), maxBytes)
	case !utf8.ValidString(text):
		return Invalid(kind, field, "is not valid UTF-8")
	case strings.IndexByte(text, 0) >= 0:
		return Invalid(kind, field, "contains a zero byte")
	}
	return nil
}

// Is reports whether a sentinel of that code is in err's tree.
func Is(err error, code string) bool { return errors.Is(err, &Sentinel{code: code}) }

// ErrTooManyAttempts is metered.ErrTooManyAttempts. It has no code: the refusal beside it has.
var ErrTooManyAttempts = errors.New("metered: too many attempts")

// Code returns the code of the first sentinel in err's tree, "" for none. Code methods of other
// errors do not count.
func Code(err error) string {
	var s *Sentinel
	if errors.As(err, &s) {
		return s.code
	}
	return ""
}
