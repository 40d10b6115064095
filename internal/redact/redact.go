// Package redact gives a type the methods by which it prints, logs and encodes as a text that gives
// nothing away.
package redact

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
)

// Text is the text that a value prints, logs and encodes as. A type that embeds it under an
// unexported name has its methods, and keeps the secret behind a func, since fmt prints unexported
// fields without asking their methods. The zero Text is "REDACTED".
type Text struct{ text string }

// As returns a Text.
func As(text string) Text { return Text{text} }

func (t Text) String() string {
	if t.text == "" {
		return "REDACTED"
	}
	return t.text
}

// GoString is for %#v.
func (t Text) GoString() string { return t.String() }

// Format is for every verb of fmt.
func (t Text) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, t.String()) }

// LogValue is for log/slog.
func (t Text) LogValue() slog.Value { return slog.StringValue(t.String()) }

// MarshalJSON is for encoding/json.
func (t Text) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

// MarshalText is for XML, keys of maps in JSON, and others.
func (t Text) MarshalText() ([]byte, error) { return []byte(t.String()), nil }
