package jobs

import (
	"crypto/sha256"
	"encoding/binary"
)

// digestVersion is the first byte of every digest. A new encoding gets a new
// version, and must go on comparing with the digests that the old one left.
const digestVersion = 1

// digest returns the version byte and the SHA-256 of kind, its length first so that
// kind and args cannot run into each other, and args as River stores them.
func digest(kind string, encodedArgs []byte) []byte {
	h := sha256.New()
	h.Write([]byte("metered/job"))
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(kind)))
	h.Write(length[:])
	h.Write([]byte(kind))
	h.Write(encodedArgs)
	return h.Sum([]byte{digestVersion})
}
