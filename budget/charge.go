package budget

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/ledger"
)

// Bounds of a call.
const (
	// MaxAmount is the largest amount of one entry, 2^53: exact as a JSON number.
	MaxAmount = 1 << 53
	// MaxLimit is the largest Limit.Max.
	MaxLimit = 1 << 62
	// MaxWindow is the longest Limit.Window, about a century.
	MaxWindow = 36525 * 24 * time.Hour
	// MaxScopes is the largest number of distinct scopes in one call.
	MaxScopes = 64
	// MaxLimits is the largest number of limits of one scope in one call.
	MaxLimits = 16
)

// Charge is an amount to take from a scope, and the limits it must stay within.
type Charge struct {
	// Scope is what is charged, 1 to MaxScopeBytes bytes of UTF-8.
	Scope string
	// Amount is in units of yours, from 1 to MaxAmount.
	Amount int64
	// Limits must all be kept, up to MaxLimits. Without any the charge is only recorded.
	Limits []Limit
	// Note is stored with the entry. Defaults to none.
	Note Note
	// MustExist denies the charge with *ScopeError unless Ledger.Create was called for the scope. Defaults to
	// Config.MustExist.
	MustExist bool
}

// Receipt is what a call charged, in the order in which its scopes first appear.
type Receipt struct {
	Entries []Posted `json:"entries"`
}

// Posted is one entry of a Receipt.
type Posted struct {
	Scope  string    `json:"scope"`
	Seq    int64     `json:"seq"` // with Scope it names the entry, for Refund
	Amount int64     `json:"amount"`
	At     time.Time `json:"at"` // by the database's clock

	// Standings are the scope's limits after the charge.
	Standings []Standing `json:"standings,omitempty"`
}

// Standing is what a limit stands at.
type Standing struct {
	Limit Limit `json:"limit"`
	// Used counts against the limit, holds aside; negative while there is credit.
	Used int64 `json:"used"`
	// Held is what open holds keep of the scope.
	Held int64 `json:"held"`
	// Available is the largest amount that the limit still admits, >= 0.
	Available int64 `json:"available"`
}

const chargeSQL = `
select seqs, ats, used, held, denied
from metered.charge($1::metered.new_charge[], $2::interval, $3::int)`

// Charge charges every scope named, or none. If a limit refuses, it is denied with *ExceededError and writes nothing.
// Charges of one scope are added up and recorded as one entry; their notes must agree. One round trip, however many.
//
// Rolling tx back takes the charge back. There is no idempotency: a second call charges again (metered.Do remembers).
//
// Locks: an advisory lock on each scope, in the order of their keys, until tx ends. Call it last in tx.
//
// Errors: *ArgumentError before any SQL; *ExceededError, *ScopeError; and those of every write (see the package comment).
func (l *Ledger) Charge(ctx context.Context, tx pgx.Tx, charges ...Charge) (Receipt, error) {
	if err := notNil("tx", tx); err != nil {
		return Receipt{}, err
	}
	p, err := l.prepare(charges...)
	if err != nil {
		return Receipt{}, err
	}
	call := p.Call
	return call.Scan(tx.QueryRow(ctx, call.SQL, call.Args(ledger.Sending{WaitMS: l.waitMS()})...))
}

const checkSQL = `
select used, held, denied
from metered.check_charge($1::metered.new_charge[], $2::interval)`

// Check tells what Charge would answer now, without a lock or a write. Only a charge is authoritative. It also runs on
// a replica. It returns the entries that would be made, without Seq and At, or the errors of Charge, except ErrBusy,
// ErrOverflow and those of a transaction's end.
func (l *Ledger) Check(ctx context.Context, db Querier, charges ...Charge) (Receipt, error) {
	if err := notNil("db", db); err != nil {
		return Receipt{}, err
	}
	call, err := l.prepare(charges...)
	if err != nil {
		return Receipt{}, err
	}
	var a ledger.Answer
	row := db.QueryRow(ctx, l.sql.check, ledger.Charges(call.Charges), call.Tolerance)
	if err := row.Scan(&a.Used, &a.Held, &a.Denied); err != nil {
		return Receipt{}, failed("check", err)
	}
	return call.Receipt(a)
}
