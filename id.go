package metered

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"time"
)

// NewID returns a UUID of version 7 for Command.ID: random, and carrying its time,
// so that it cannot look new again after retention. Make it where the command
// begins, at the client, and send it again with each repetition.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, as of Go 1.24
	// RFC 9562, 5.7: 48 bits of Unix time in ms, then the version, and the variant
	// in the 9th byte; the rest is random.
	ms := binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixMilli())<<16)
	copy(b[:6], ms)
	b[6] = b[6]&0x0f | 0x70
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
