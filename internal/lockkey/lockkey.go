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
	h := sha256.New()
	h.Write([]byte(space))
	h.Write([]byte{0})
	h.Write([]byte(name))
	var sum [sha256.Size]byte
	return int64(binary.BigEndian.Uint64(h.Sum(sum[:0])))
}

// OfTenant is the key of a tenant, in a cell.
func OfTenant(schema, tenant string) int64 { return Of("metered/tenant/"+schema, tenant) }

// OfOperation is the key of an operation's id, in a schema. Tenant and id cannot run into each
// other.
func OfOperation(schema, tenant, id string) int64 {
	b := binary.BigEndian.AppendUint64(nil, uint64(len(tenant)))
	b = binary.BigEndian.AppendUint64(append(b, tenant...), uint64(len(id)))
	return Of("metered/operation/"+schema, string(append(b, id...)))
}
