// Package uuidv7 makes ids that carry their time, and reads it.
package uuidv7

import (
	"crypto/rand"
	"encoding/binary"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// New returns a UUID of version 7 (RFC 9562): 48 bits of Unix time in
// milliseconds, then random bits.
func New() string {
	id := pgtype.UUID{Valid: true}
	_, _ = rand.Read(id.Bytes[:]) // never fails, as of Go 1.24
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(time.Now().UnixMilli()))
	copy(id.Bytes[:6], ms[2:])
	id.Bytes[6] = id.Bytes[6]&0x0f | 0x70
	id.Bytes[8] = id.Bytes[8]&0x3f | 0x80
	return id.String()
}

// Time is the time that id carries, nil if it is no UUID of version 7: 48 bits of
// Unix time in ms, the version in the 7th byte, the variant in the 9th.
func Time(id string) *time.Time {
	var u pgtype.UUID
	if len(id) != 36 || strings.Count(id, "-") != 4 || u.Scan(id) != nil || u.Bytes[6]>>4 != 7 || u.Bytes[8]>>6 != 0b10 {
		return nil
	}
	t := time.UnixMilli(int64(binary.BigEndian.Uint64(u.Bytes[:8]) >> 16))
	return &t
}
