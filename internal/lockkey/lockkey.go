// Package lockkey derives the keys of advisory locks.
package lockkey

import (
	"crypto/sha256"
	"encoding/binary"
)

// Of returns the first 8 bytes of the SHA-256 of space, a zero byte and name, as Postgres's bigint.
// All programs share the advisory locks of a database: space keeps ours apart. With 32 bits or a
// weak hash a tenant could choose a name whose lock is another tenant's, and block it. A collision
// costs a wait, never a wrong answer. space must not contain a zero byte.
func Of(space, name string) int64 {
	var room [256]byte // most names need no memory
	return of(append(append(append(room[:0], space...), 0), name...))
}

func of(name []byte) int64 {
	sum := sha256.Sum256(name)
	return int64(binary.BigEndian.Uint64(sum[:]))
}

// OfTenant is the key of a tenant, in a cell.
func OfTenant(schema, tenant string) int64 { return Of("metered/tenant/"+schema, tenant) }

// OfOperation is the key of an operation's id, in a schema. Tenant and id cannot run into each
// other.
func OfOperation(schema, tenant, id string) int64 {
	var room [256]byte
	b := append(append(append(room[:0], "metered/operation/"...), schema...), 0)
	b = append(binary.BigEndian.AppendUint64(b, uint64(len(tenant))), tenant...)
	return of(append(binary.BigEndian.AppendUint64(b, uint64(len(id))), id...))
}
