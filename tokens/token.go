package tokens

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
)

// Token is a secret that grants something to whoever presents it. Printed,
// formatted, logged or encoded it is redacted: "acme_upload_REDACTED". Reveal
// returns the text to hand out.
//
// The text is behind a func, because fmt reads the unexported fields of a caller's
// struct without asking the values in them how they want to be printed, and so
// do debuggers' printers. For the same reason Tokens cannot be compared with ==;
// use Equal. The zero Token is no token.
type Token struct{ reveal func() string }

// Reveal returns the token's text. It is the only way to it.
func (t Token) Reveal() string {
	if t.reveal == nil {
		return ""
	}
	return t.reveal()
}

// Digest returns the SHA-256 of the token's text, by which it is stored.
func (t Token) Digest() Digest { return sha256.Sum256([]byte(t.Reveal())) }

// Equal reports whether both are the same token, in constant time.
func (t Token) Equal(other Token) bool {
	return subtle.ConstantTimeCompare([]byte(t.Reveal()), []byte(other.Reveal())) == 1
}

// IsZero reports whether t is the zero Token.
func (t Token) IsZero() bool { return t.reveal == nil }

// String returns the prefix and "_REDACTED".
func (t Token) String() string {
	if t.reveal == nil {
		return redacted
	}
	text := t.reveal()
	return text[:len(text)-secretLen-checksumLen] + redacted
}

const redacted = "REDACTED"

// GoString is String.
func (t Token) GoString() string { return t.String() }

// Format prints String, whatever the verb and its flags.
func (t Token) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, t.String()) }

// LogValue returns String, for slog.
func (t Token) LogValue() slog.Value { return slog.StringValue(t.String()) }

// MarshalJSON encodes String.
func (t Token) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

// MarshalText returns String.
func (t Token) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Digest is the SHA-256 of a token's text, over its ASCII bytes from the first
// of the prefix to the last of the checksum, and the primary key of its row. It
// identifies a token without giving it away: good for logs and audit records,
// and for Revoke. In psql it is sha256('…') of the text.
type Digest [sha256.Size]byte

// String returns 64 hexadecimal digits.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// MarshalText returns 64 hexadecimal digits.
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads 64 hexadecimal digits. Anything else is ErrArgument.
func (d *Digest) UnmarshalText(text []byte) error {
	var parsed Digest
	if len(text) != hex.EncodedLen(len(parsed)) {
		return invalid("Digest", "%d bytes: want %d hexadecimal digits", len(text), hex.EncodedLen(len(parsed)))
	}
	if _, err := hex.Decode(parsed[:], text); err != nil {
		return invalid("Digest", "want %d hexadecimal digits", hex.EncodedLen(len(parsed)))
	}
	*d = parsed
	return nil
}
