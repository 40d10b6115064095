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

// Token is a secret that grants something to the client that presents it. Printed, logged or encoded it is redacted:
// "acme_upload_REDACTED". Reveal is the only way to its text, which is behind a func, because fmt prints unexported
// fields without asking their methods. Compare Tokens with Equal, not ==. The zero Token is no token.
type Token struct{ reveal func() string }

// Reveal returns the token's text.
func (t Token) Reveal() string {
	if t.reveal == nil {
		return ""
	}
	return t.reveal()
}

func (t Token) Digest() Digest { return sha256.Sum256([]byte(t.Reveal())) }

// Equal reports whether both are the same token, in constant time.
func (t Token) Equal(other Token) bool {
	return subtle.ConstantTimeCompare([]byte(t.Reveal()), []byte(other.Reveal())) == 1
}

func (t Token) IsZero() bool { return t.reveal == nil }

func (t Token) String() string {
	if t.reveal == nil {
		return redacted
	}
	text := t.reveal()
	return text[:len(text)-secretLen-checksumLen] + redacted
}

const redacted = "REDACTED"

func (t Token) GoString() string { return t.String() }

func (t Token) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, t.String()) }

func (t Token) LogValue() slog.Value { return slog.StringValue(t.String()) }

func (t Token) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

func (t Token) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Digest is the SHA-256 of a token's text, the key of its row: in psql sha256('…'). It does not give the token away, so
// use it in logs and for Revoke. As text it is 64 hexadecimal digits. Reading anything else is ErrArgument.
type Digest [sha256.Size]byte

func (d Digest) String() string { return hex.EncodeToString(d[:]) }

func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

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
