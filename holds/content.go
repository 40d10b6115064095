package holds

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"github.com/pgmetered/metered/internal/ledger"
)

// placed is the content of a hold's first event.
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
func heldLines(charges []ledger.Charge, least []ledger.Used) []HeldLine {
	var lines []HeldLine
	for _, c := range charges {
		if c.Held > 0 {
			line := HeldLine{Scope: c.Scope, Amount: c.Held, Open: c.Held}
			if i := slices.IndexFunc(least, func(u ledger.Used) bool { return u.Scope == c.Scope }); i >= 0 {
				line.AtLeast = least[i].Amount
			}
			lines = append(lines, line)
		}
	}
	slices.SortFunc(lines, func(a, b HeldLine) int { return cmp.Compare(a.Scope, b.Scope) })
	return lines
}

const fingerprintVersion = 1

// fingerprint is a version byte and the SHA-256 of the request's content, each part
// preceded by its length in 8 bytes, big-endian.
func (r *Placement) fingerprint(charges []ledger.Charge) []byte {
	h := sha256.New()
	part := func(b []byte) {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(b))))
		h.Write(b)
	}
	part([]byte(r.Holder))
	part([]byte(r.claim))
	if r.claim == "" {
		part(r.Metadata) // a claim is found by its key, and keeps its first metadata
	}
	charges = slices.Clone(charges)
	slices.SortFunc(charges, func(a, b ledger.Charge) int { return cmp.Compare(a.Scope, b.Scope) })
	for _, c := range charges {
		part([]byte(inBudget.Content(c.Scope, c.Use)))
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(c.Held)))
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(c.Amount-c.Held)))
	}
	if r.UpTo { // without it there is no trace: such holds are on record from before there was one
		part([]byte("up to"))
	}
	return h.Sum([]byte{fingerprintVersion})
}
