package budget

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Credit is an amount to add to a scope: a top-up, prepaid money.
type Credit struct {
	// Scope is what is credited, 1 to MaxScopeBytes bytes of UTF-8.
	Scope string
	// Amount is in units of yours, from 1 to MaxAmount.
	Amount int64
	// Note is stored with the entry.
	Note Note
}

const creditSQL = `
select seq, at from metered.credit($1::text, $2::bigint, $3::bigint, $4::int, $5::text, null, null)`

// Credit adds credit to a scope. It counts for lifetime limits only: a window
// never sees it, or spending would come back when the credit ages out of it.
//
// Rolling tx back takes it back. There is no idempotency: a second call credits
// again. Locks: the scope's advisory lock, until tx ends. Errors: *ArgumentError
// before any SQL; ErrBusy; ErrOverflow; SQLSTATE 40001 and 40P01; all of which but
// the first abort tx.
func (l *Ledger) Credit(ctx context.Context, tx pgx.Tx, c Credit) (Posted, error) {
	if err := checkScope("Credit.Scope", c.Scope); err != nil {
		return Posted{}, err
	}
	if err := checkAmount("Credit.Amount", c.Amount); err != nil {
		return Posted{}, err
	}
	if err := c.Note.check("Credit.Note"); err != nil {
		return Posted{}, err
	}
	p := Posted{Scope: c.Scope, Amount: c.Amount}
	err := tx.QueryRow(ctx, l.sql.credit, c.Scope, l.LockKey(c.Scope), c.Amount, l.waitMS(), c.Note.JSON()).Scan(&p.Seq, &p.At)
	return p, failed("credit", err)
}
