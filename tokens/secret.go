package tokens

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
)

// Secret is the 32 bytes in a token. It prints, logs and encodes as "REDACTED". Zero is none.
type Secret struct {
	redacted
	reveal func() [secretBytes]byte // a func for the reason given at Token
}

func newSecret(b [secretBytes]byte) Secret {
	return Secret{reveal: func() [secretBytes]byte { return b }}
}

// NewSecret makes a Secret of 32 bytes from a cryptographic source. Bytes plainly not random are
// budget.ErrArgument.
func NewSecret(b []byte) (Secret, error) {
	switch {
	case len(b) != secretBytes:
		return Secret{}, invalid("Secret", "%d bytes: want %d", len(b), secretBytes)
	case weak(b):
		return Secret{}, invalid("Secret", "too regular to be random")
	case printable(b):
		return Secret{}, invalid("Secret", "is text: decode it, or give it to Derive as the key")
	}
	return newSecret([secretBytes]byte(b)), nil
}

// Derive returns the HMAC-SHA-256 of parts, for commands that return the same token when they run
// again: make the parts from the operation's tenant and id, and the token's place. The key is 32 to
// 1024 random bytes. There are 1 to 16 parts, together up to 4096 bytes.
func Derive(key []byte, parts ...string) (Secret, error) {
	if len(key) < minKeyLen || len(key) > maxKeyLen {
		return Secret{}, invalid("key", "%d bytes: want %d to %d", len(key), minKeyLen, maxKeyLen)
	}
	if weak(key) {
		return Secret{}, invalid("key", "too regular to be random")
	}
	if len(parts) == 0 || len(parts) > maxDeriveParts {
		return Secret{}, invalid("parts", "%d parts: want 1 to %d", len(parts), maxDeriveParts)
	}
	mac := hmac.New(sha256.New, key)
	total := 0
	write := func(part string) {
		var length [8]byte
		binary.BigEndian.PutUint64(length[:], uint64(len(part)))
		mac.Write(length[:])
		mac.Write([]byte(part))
	}
	write(deriveLabel)
	for _, part := range parts {
		total += len(part)
		if total > maxDeriveLen {
			return Secret{}, invalid("parts", "more than %d bytes together", maxDeriveLen)
		}
		write(part)
	}
	return newSecret([secretBytes]byte(mac.Sum(nil))), nil
}

// deriveLabel keeps these secrets apart from whatever else the key is used for.
const deriveLabel = "metered/tokens/secret/1"

// drawSecret draws until the result is one that Parse accepts: in practice, once.
func drawSecret() [secretBytes]byte {
	for {
		var b [secretBytes]byte
		_, _ = rand.Read(b[:]) // never fails: it would crash the program first
		if !weak(b[:]) {
			return b
		}
	}
}

// minDistinct is far below the 30 distinct bytes that 32 random ones have on average: fewer than
// 12 come up once in 10^23. Hexadecimal keys of 64 digits pass.
const minDistinct = 12

// weak reports that b is plainly not random: too few different bytes, or too few
// different steps from one byte to the next.
func weak(b []byte) bool {
	var values, steps [256]bool
	var distinctValues, distinctSteps int
	for i, v := range b {
		if !values[v] {
			values[v] = true
			distinctValues++
		}
		if i == 0 {
			continue
		}
		if step := v - b[i-1]; !steps[step] {
			steps[step] = true
			distinctSteps++
		}
	}
	return distinctValues < minDistinct || distinctSteps < minDistinct
}

func printable(b []byte) bool {
	for _, c := range b {
		if c < ' ' || c > '~' {
			return false
		}
	}
	return true
}

// isZero reports whether the Secret is the zero value, which is no secret.
func (s Secret) isZero() bool { return s.reveal == nil }
