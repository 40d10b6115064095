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

// Token is a secret that grants something to whoever presents it. Printed, logged or encoded it is redacted:
// "acme_upload_REDACTED". Reveal returns the text. Compare Tokens with Equal, not ==. The zero Token is no token. The
// text is behind a func, because fmt prints unexported fields without asking their methods.
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

// Digest is the SHA-256 of a token's text, the key of its row: in psql sha256('…'). It does not give the token away,
// so use it in logs and for Revoke.
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
