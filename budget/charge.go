package budget

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/ledger"
)

// Charge takes an amount from a scope if all Limits admit it.
type Charge struct {
	Scope       string  `json:"scope"`            // 1 to 255 bytes of UTF-8
	Amount      int64   `json:"amount"`           // units, 1 to 2^53
	Limits      []Limit `json:"limits,omitempty"` // up to 16. Without any, it is only recorded
	Note        Note    `json:"note,omitzero"`
	MustExist   bool    `json:"must_exist,omitempty"`   // refuses a scope not created, or retired
	NoStandings bool    `json:"no_standings,omitempty"` // leaves Posted.Standings out, which is faster
}

// Receipt lists the entries of a call, by the first charge of each scope.
type Receipt struct {
	Entries []Posted   `json:"entries"`
	Crossed []Crossing `json:"crossed,omitempty"`
}

// Posted is a written entry.
type Posted struct {
	Scope     string     `json:"scope"`
	Seq       int64      `json:"seq"`             // names the entry, with Scope. 0 if spent from a lease
	Lease     int64      `json:"lease,omitempty"` // it was spent from (package leases)
	Amount    int64      `json:"amount"`
	At        time.Time  `json:"at"`
	Standings []Standing `json:"standings,omitempty"` // after the charge
	Replayed  bool       `json:"replayed,omitempty"`  // the event was counted before, by this entry
}

// Standing is the state of a limit after a charge or at a check. The PeriodEnd of a limit by period is where the next begins.
type Standing struct {
	Limit       Limit     `json:"limit"`
	Used        int64     `json:"used"`           // units that count, without held ones. Negative with credit
	Held        int64     `json:"held"`           // of open holds and leases
	Available   int64     `json:"available"`      // the most that the limit still admits
	Over        bool      `json:"over,omitempty"` // a limit with Observe would have refused the charge
	PeriodStart time.Time `json:"period_start,omitzero"`
	PeriodEnd   time.Time `json:"period_end,omitzero"`
}

const chargeSQL = `
select seqs, ats, used, held, refused, periods, crossed
from metered.charge($1::metered.new_charge[], $2::interval, $3::int, $4::bool)`

// Charge charges all scopes or none, in one round trip. Charges of one scope become one entry, and must have the same Note.
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

// Check returns the answer of Charge now, without Seq and At.
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
