package budget

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/ledger"
)

// Bounds of a call.
const (
	MaxAmount     = 1 << 53                // of one entry: exact as a JSON number
	MaxLimit      = 1 << 62                // of Limit.Max
	MaxWindow     = 36525 * 24 * time.Hour // of Limit.Window, about a century
	MaxScopeBytes = 255                    // of a scope, in UTF-8
	MaxScopes     = 64                     // distinct scopes in one call
	MaxLimits     = 16                     // of one scope in one call
	MaxQueries    = 1024                   // in one call of Usage
	MaxBatch      = 1000                   // charges in one call of ChargeEach, events in one of Ingest
)

// Charge is an amount to take from a scope, if all of its Limits admit it.
type Charge struct {
	Scope     string  // the scope to charge, 1 to MaxScopeBytes bytes of UTF-8
	Amount    int64   // in units of yours, from 1 to MaxAmount
	Limits    []Limit // must all be kept, up to MaxLimits. Without any, the charge is only recorded
	Note      Note    // is stored with the entry. Defaults to none
	MustExist bool    // refuses a scope never created, or retired (*ScopeError). Defaults to Config.MustExist
	// NoStandings leaves Posted.Standings out. If no charge of a call asks for them, a window with room to spare is
	// decided without a sum over its entries: faster, and as exact (docs/model.md). Check has them
	// in any case, and a refusal has all its numbers. Defaults to Config.NoStandings.
	NoStandings bool
}

// Receipt lists the entries of a call, in the order in which scopes first appear.
type Receipt struct {
	Entries []Posted `json:"entries"`
	// Crossed are the thresholds that the call crossed. Config.OnThreshold received them.
	Crossed []Crossing `json:"crossed,omitempty"`
}

// Posted is one entry of a Receipt.
type Posted struct {
	Scope     string     `json:"scope"`
	Seq       int64      `json:"seq"`             // with Scope it names the entry, for Refund. 0 for units that were spent from a lease
	Lease     int64      `json:"lease,omitempty"` // the lease that it was spent from (package leases), without Standings
	Amount    int64      `json:"amount"`
	At        time.Time  `json:"at"`                  // by the database's clock
	Standings []Standing `json:"standings,omitempty"` // the scope's limits after the charge, unless NoStandings left them out
	Replayed  bool       `json:"replayed,omitempty"`  // of an event: it was counted before, by this entry, and has no Standings
}

// Standing is the state of a limit after a charge or at a check.
type Standing struct {
	Limit     Limit `json:"limit"`
	Used      int64 `json:"used"`      // counts against the limit, without holds. Negative while there is credit
	Held      int64 `json:"held"`      // units of the scope that open holds and leases keep
	Available int64 `json:"available"` // the largest amount that the limit still admits, >= 0
	// The period of a limit by period that the charge is in. Zero for others.
	PeriodStart time.Time `json:"period_start,omitzero"` // its first moment
	PeriodEnd   time.Time `json:"period_end,omitzero"`   // the first moment of the next
}

const chargeSQL = `
select seqs, ats, used, held, refused, periods, crossed
from metered.charge($1::metered.new_charge[], $2::interval, $3::int, $4::bool)`

// Charge charges every scope named, or none, in one round trip. If a limit refuses, the error is *ExceededError,
// and with *ScopeError for a scope that must exist: nothing is written. Charges of one scope are added up to one entry;
// their notes must agree.
func (l *Ledger) Charge(ctx context.Context, tx pgx.Tx, charges ...Charge) (r Receipt, err error) {
	if err := notNil("tx", tx); err != nil {
		return Receipt{}, err
	}
	p, err := l.prepare(charges...)
	if err != nil {
		return Receipt{}, err
	}
	ctx, span := l.begin(ctx, "budget.charge")
	defer func() { l.ended(ctx, span, err) }()
	call := p.Call
	if len(call.Queries) > 0 {
		lock := ledger.LockAllArgs(l.waitMS(), call.Locks)
		if err := ledger.Ask(ctx, tx, l.sql.lockAll, lock, call.Queries, func(err error) error { return failed("charge", err) }); err != nil {
			return Receipt{}, err
		}
	}
	return ledger.SilentlyIn(ctx, tx, "budget", func(tx pgx.Tx, telling bool) (Receipt, error) {
		r, err := call.Scan(tx.QueryRow(ctx, call.SQL, call.Args(ledger.Sending{WaitMS: l.waitMS(), Telling: telling})...))
		if err == nil {
			err = l.tellCrossings(ctx, tx, r.Crossed)
		}
		return r, err
	})
}

const checkSQL = `
select used, held, refused, periods
from metered.check_charge($1::metered.new_charge[], $2::interval)`

// Check returns the answer that Charge would give now, without a lock or a write, on a replica too. Only a charge is
// authoritative. It returns the entries that would be made, without Seq and At, or the errors of Charge, except
// ErrBusy, ErrOverflow and those of a transaction's end.
func (l *Ledger) Check(ctx context.Context, db Querier, charges ...Charge) (Receipt, error) {
	if err := notNil("db", db); err != nil {
		return Receipt{}, err
	}
	call, err := l.prepare(charges...)
	if err != nil {
		return Receipt{}, err
	}
	for _, q := range call.Queries {
		rows, _ := db.Query(ctx, q.SQL, q.Args...) // its error is that of the rows, too
		if err := q.Read(rows, true, func(err error) error { return failed("check", err) }); err != nil {
			return Receipt{}, err
		}
	}
	var a ledger.Answer
	row := db.QueryRow(ctx, l.sql.check, ledger.Charges(call.Charges), call.Tolerance)
	if err := row.Scan(&a.Used, &a.Held, &a.Refused, &a.Periods); err != nil {
		return Receipt{}, failed("check", err)
	}
	return call.Receipt(a)
}

// Charged is a charge that was made, as a metered.Notice carries it.
type Charged struct {
	Scope  string `json:"scope"`
	Amount int64  `json:"amount"`
	Note   Note   `json:"note,omitzero"`
}
