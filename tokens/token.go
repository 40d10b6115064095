package tokens

import (
	"crypto/sha256"
	"encoding/hex"

	"github.com/pgmetered/metered/internal/redact"
)

// Token is a secret for a client. Reveal returns its text. It prints, logs and encodes as
// "acme_upload_REDACTED". Compare Digests, not Tokens. Zero is none.
type Token struct {
	redacted
	reveal func() string
}

// redacted has the methods by which a type prints, logs and encodes.
type redacted = redact.Text

// Reveal returns the text of the token, to hand it to its subject. It is the only way to the text.
// The zero Token has none, and Reveal returns "".
func (t Token) Reveal() string {
	if t.reveal == nil {
		return ""
	}
	return t.reveal()
}

// Digest returns the SHA-256 of the token's text, under which the database knows it. It reveals
// nothing.
func (t Token) Digest() Digest { return sha256.Sum256([]byte(t.Reveal())) }

// Digest is the SHA-256 of a token's text, for Revoke and logs. It prints as 64 hexadecimal digits.
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
