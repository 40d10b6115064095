package holds

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// placed is what a hold's history says of its beginning.
type placed struct {
	Tenant     string     `json:"tenant,omitempty"`
	Holder     string     `json:"holder,omitempty"`
	GraceUS    int64      `json:"grace_us,omitempty"`
	LifetimeUS int64      `json:"lifetime_us"`
	Claim      string     `json:"claim,omitempty"`
	Lines      []HeldLine `json:"lines"`
}

// heldLines are the lines of a hold that was just placed, in the order of their
// scopes.
func heldLines(scopes []string, held []int64) []HeldLine {
	var lines []HeldLine
	for i, scope := range scopes {
		if held[i] > 0 {
			lines = append(lines, HeldLine{Scope: scope, Amount: held[i], Open: held[i]})
		}
	}
	slices.SortFunc(lines, func(a, b HeldLine) int { return cmp.Compare(a.Scope, b.Scope) })
	return lines
}

const fingerprintVersion = 1

// fingerprint is a version byte and the SHA-256 of the request's content, each part
// preceded by its length in 8 bytes, big-endian.
func (r *Request) fingerprint(scopes []string, held, amounts []int64) []byte {
	h := sha256.New()
	part := func(b []byte) {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(b))))
		h.Write(b)
	}
	part([]byte(r.Holder))
	part([]byte(r.claim))
	if r.claim == "" {
		part(r.Metadata) // of a claim, which is not made by its id, the first counts
	}
	order := make([]int, len(scopes))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(scopes[a], scopes[b]) })
	for _, i := range order {
		part([]byte(scopes[i]))
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(held[i])))
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(amounts[i]-held[i])))
	}
	return h.Sum([]byte{fingerprintVersion})
}
