package budget

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Credit is a top-up, with fields as in a Charge.
type Credit struct {
	// Scope is the scope that gets the units, as in a Charge.
	Scope string

	// Amount are the units of the credit, from 1 to 2^53.
	Amount int64

	// Note is stored with the entry.
	Note Note

	// MustExist refuses a scope that was not created, as in a Charge.
	MustExist bool
}

const creditSQL = `
select coalesce(seq, 0), coalesce(at, 'epoch'), refused
from metered.credit($1::text, $2::bigint, $3::bigint, $4::bool, $5::int, $6::metered.origin, $7::bool)`

// Credit adds units, which count for lifetime limits only.
func (l *Ledger) Credit(ctx context.Context, tx pgx.Tx, c Credit) (Posted, error) {
	return do(ctx, tx, l, "budget.credit", (*Ledger).prepareCredit, c)
}

// prepareCredit validates a credit as Credit does, without any SQL.
func (l *Ledger) prepareCredit(c Credit) (*ledger.Call[Posted], error) {
	if err := l.made(); err != nil {
		return nil, err
	}
	if err := checkScope("Credit.Scope", c.Scope); err != nil {
		return nil, err
	}
	if err := checkAmount("Credit.Amount", c.Amount); err != nil {
		return nil, err
	}
	if err := l.checkNote("Credit.Note", c.Note); err != nil {
		return nil, err
	}
	key := l.LockKey(c.Scope)
	return &ledger.Call[Posted]{
		SQL: l.sql.credit, Locks: ledger.Locks{Keys: []int64{key}},
		Args: func(s ledger.Sending) []any {
			return []any{c.Scope, key, c.Amount, c.MustExist || l.mustExist, s.WaitMS,
				s.Origin(c.Note.json()), s.Raising}
		},
		Scan: func(row pgx.Row) (Posted, error) {
			p := Posted{Scope: c.Scope, Amount: c.Amount}
			var refused []byte
			err := row.Scan(&p.Seq, &p.At, &refused)
			var pgErr *pgconn.PgError
			if errors.As(err, &pgErr) && pgErr.Code == sqlstate.Exceeded {
				refused = []byte(pgErr.Detail)
			}
			if len(refused) > 0 {
				return Posted{}, absentScopes(refused)
			}
			return p, failed("credit", err)
		},
	}, nil
}
