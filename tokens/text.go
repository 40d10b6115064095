package tokens

import (
	"hash/crc32"
	"math/big"
	"strings"

	"github.com/pgmetered/metered/internal/redact"
)

const (
	base        = 62
	secretLen   = 43 // the fewest digits that hold 256 bits: 62^43 > 2^256 > 62^42
	checksumLen = 6  // the fewest that hold 32 bits
)

// Parse reads a token's text, exactly as Reveal returned it, without a query. Other text is
// ErrInvalid.
func (s *Store) Parse(text string) (Token, error) {
	if err := s.made(); err != nil {
		return Token{}, err
	}
	body, ok := strings.CutPrefix(text, s.prefix+"_")
	if !ok || len(body) != secretLen+checksumLen {
		return Token{}, refuse("malformed")
	}
	sum := text[len(text)-checksumLen:]
	secret, ok := fromBase62(body[:secretLen])
	if !ok || sum != checksum(text[:len(text)-checksumLen]) || weak(secret[:]) {
		return Token{}, refuse("malformed")
	}
	return s.token(text), nil
}

// Token returns the token of a secret, minted or not: after ErrExists, or for a replay.
func (s *Store) Token(secret Secret) (Token, error) {
	if err := s.made(); err != nil {
		return Token{}, err
	}
	if secret.isZero() {
		return Token{}, invalid("Secret", "is the zero Secret: use NewSecret or Derive")
	}
	return s.encode(secret.reveal()), nil
}

func (s *Store) encode(secret [secretBytes]byte) Token {
	text := s.prefix + "_" + toBase62(secret[:], secretLen)
	text += checksum(text)
	return s.token(text)
}

func (s *Store) token(text string) Token {
	return Token{redact.As(s.prefix + "_REDACTED"), func() string { return text }}
}

// checksum is the CRC-32 (IEEE) of the text before it, prefix and all. It detects
// every change within four neighbouring characters, for certain. A hash cut to
// the same length would do so nearly always.
func checksum(text string) string {
	sum := crc32.ChecksumIEEE([]byte(text))
	return toBase62([]byte{byte(sum >> 24), byte(sum >> 16), byte(sum >> 8), byte(sum)}, checksumLen)
}

// toBase62 returns b, a big-endian number, in digits 0-9, a-z, A-Z.
func toBase62(b []byte, digits int) string {
	text := new(big.Int).SetBytes(b).Text(base)
	return strings.Repeat("0", digits-len(text)) + text
}

// fromBase62 is false for numbers above 256 bits, so that no secret has two
// texts, and for the signs that SetString would take.
func fromBase62(text string) (secret [secretBytes]byte, ok bool) {
	for i := range len(text) {
		if c := text[i]; (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
			return secret, false
		}
	}
	n, ok := new(big.Int).SetString(text, base)
	if !ok || n.BitLen() > 8*secretBytes {
		return secret, false
	}
	n.FillBytes(secret[:])
	return secret, true
}
