package notary

import (
	"cmp"
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// Receipt shows that an entry is in the log of a head. Its JSON can be checked offline, by whoever
// knows the signer's key: docs/notary.md has the program.
type Receipt struct {
	// Head is the signed note of a head.
	Head string `json:"head"`

	// Leaf is the number of the entry in the log, from 0 on.
	Leaf int64 `json:"leaf"`

	// Record is the text of the leaf: see docs/notary.md.
	Record string `json:"record"`

	// Proof are the hashes that lead from the leaf to the head.
	Proof []tlog.Hash `json:"proof"`

	// Scope is the name of the scope. The record's second line is the SHA-256 of Salt and Scope.
	Scope string `json:"scope"`

	// Salt shows that the record is of Scope. It is empty once the name was taken out.
	Salt []byte `json:"salt,omitempty"`
}

const receiptSQL = `
select h.size, h.head, r.first + l.seq - r.seq, s.commitment, coalesce(s.salt, ''), ` + columns + `
from metered.notary_scopes s
cross join lateral (select x.* from metered.notary_runs x where x.scope_no = s.no and x.seq <= $2 order by x.seq desc limit 1) r
join metered.ledger l on l.scope = s.scope and l.seq = $2
cross join lateral (select x.* from metered.notary_heads x order by x.size desc limit 1) h
where s.scope = $1 and r.seq + r.entries > $2`

// Receipt returns the receipt of an entry, for the last head. It needs metered.GrantReportingSQL.
//
// Errors: ErrUnknown, of an entry that is not in the log yet, or that was purged.
func (n *Notary) Receipt(ctx context.Context, db querier, scope string,
	seq int64) (Receipt, error) {
	err := cmp.Or(n.made(), fault.NotNil(errArgument, "db", db),
		fault.Text(errArgument, "scope", scope, maxScope))
	if err != nil {
		return Receipt{}, err
	}
	var size int64
	var e entry
	r := Receipt{Scope: scope}
	rows, _ := answer.Query(ctx, db, n.name.SQL(receiptSQL), scope, seq)
	_, err = pgx.CollectExactlyOneRow(rows,
		func(row pgx.CollectableRow) (none struct{}, err error) {
			return none, row.Scan(append([]any{&size, &r.Head, &r.Leaf, &e.commitment, &r.Salt},
				e.scan()...)...)
		})
	if errors.Is(err, pgx.ErrNoRows) {
		return Receipt{}, ErrUnknown
	}
	if err != nil {
		return Receipt{}, failed("receipt", err)
	}
	r.Record = string(e.record(nil))
	hashes := newLog(ctx, db, n.name, size)
	proof, err := tlog.ProveRecord(size, r.Leaf, hashes)
	r.Proof = proof
	if err == nil {
		var root tlog.Hash
		if root, err = tlog.TreeHash(size, hashes); err == nil {
			err = tlog.CheckRecord(proof, size, root, r.Leaf, tlog.RecordHash([]byte(r.Record)))
		}
	}
	return r, failed("receipt: the entry is not as it was taken down", err)
}
