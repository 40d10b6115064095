// Package uuidv7 makes ids that carry their time, and reads it.
package uuidv7

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// New returns a UUID of version 7 (RFC 9562): 48 bits of Unix time in
// milliseconds, then random bits.
func New() string {
	return made().String()
}

// shortBytes are those of a short id: the time, version and variant in 6 bits, and 42 random ones,
// which keep apart what is made for one name within a millisecond.
const shortBytes = 12

// NewShort is the beginning of New in 16 characters: its bytes in base64 of URLs.
func NewShort() string {
	id := made()
	return base64.RawURLEncoding.EncodeToString(id.Bytes[:shortBytes])
}

func made() pgtype.UUID {
	id := pgtype.UUID{Valid: true}
	_, _ = rand.Read(id.Bytes[:]) // never fails, as of Go 1.24
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(time.Now().UnixMilli()))
	copy(id.Bytes[:6], ms[2:])
	id.Bytes[6] = id.Bytes[6]&0x0f | 0x70
	id.Bytes[8] = id.Bytes[8]&0x3f | 0x80
	return id
}

// TimeOfShort is the time that an id of NewShort carries, nil if it is none.
func TimeOfShort(id string) *time.Time {
	var u pgtype.UUID
	if len(id) != base64.RawURLEncoding.EncodedLen(shortBytes) {
		return nil
	}
	n, err := base64.RawURLEncoding.Decode(u.Bytes[:shortBytes], []byte(id))
	if err != nil || n != shortBytes || !carriesTime(u) {
		return nil
	}
	t := timeOf(u)
	return &t
}

// carriesTime reports whether u has the version in its 7th byte, and the variant in its 9th.
func carriesTime(u pgtype.UUID) bool { return u.Bytes[6]>>4 == 7 && u.Bytes[8]>>6 == 0b10 }

// timeOf is the time of the first 48 bits.
func timeOf(u pgtype.UUID) time.Time {
	return time.UnixMilli(int64(binary.BigEndian.Uint64(u.Bytes[:8]) >> 16))
}

// Time is the time that id carries, nil if it is no UUID of version 7: 48 bits of Unix time in ms,
// the version in the 7th byte, the variant in the 9th. A UUID may be in lower or upper case, in
// braces, after "urn:uuid:", and without hyphens.
//
// Without hyphens it may be any 16 bytes, such as a hash or a trace id, and one in 64 of those has
// these bits. So the time must also lie between earliest and a day from now. One hash in 300,000
// passes both.
func Time(id string) *time.Time {
	const urn = "urn:uuid:"
	switch {
	case len(id) > len(urn) && strings.EqualFold(id[:len(urn)], urn):
		id = id[len(urn):]
	case len(id) > 2 && id[0] == '{' && id[len(id)-1] == '}':
		id = id[1 : len(id)-1]
	}
	bytes, ok := parse(id)
	u := pgtype.UUID{Bytes: bytes, Valid: ok}
	if !ok || !carriesTime(u) {
		return nil
	}
	t := timeOf(u)
	if len(id) == 32 && (t.Before(earliest) || t.After(time.Now().Add(24*time.Hour))) {
		return nil
	}
	return &t
}

// parse reads 32 hexadecimal digits, with hyphens as a UUID has them or without any.
func parse(id string) (u [16]byte, ok bool) {
	var digits [32]byte
	switch {
	case len(id) == 32:
		copy(digits[:], id)
	case len(id) == 36 && id[8] == '-' && id[13] == '-' && id[18] == '-' && id[23] == '-':
		n := copy(digits[:], id[:8])
		for _, part := range [...]string{id[9:13], id[14:18], id[19:23], id[24:]} {
			n += copy(digits[n:], part)
		}
	default:
		return u, false
	}
	_, err := hex.Decode(u[:], digits[:])
	return u, err == nil
}

// earliest is before the first program that could have used this package.
var earliest = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)
