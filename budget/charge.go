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

// Receipt lists the entries of a call.
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

// Standing is the state of a limit after a charge or at a check. At PeriodEnd the next period begins.
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

// Charge charges all scopes or none, in one round trip. Charges of one scope become one entry, with one Note.
func (l *Ledger) Charge(ctx context.Context, tx pgx.Tx, charges ...Charge) (Receipt, error) {
	return l.charge(ctx, tx, "budget.charge", (*Ledger).prepare, charges)
}

const upToSQL = `
select coalesce(amount, 0), seqs, ats, used, held, refused, periods, crossed
from metered.charge_up_to($1::metered.new_charge[], $2::interval, $3::int, $4::bool, $5::metered.origin)`

// ChargeUpTo charges each scope the same amount: that of the charges, or else the largest that all limits admit, at least 1. Posted.Amount
// has it.
//
// Amounts are equal, and scopes differ. If not even 1 fits, the *ExceededError has the limits that refuse 1.
func (l *Ledger) ChargeUpTo(ctx context.Context, tx pgx.Tx, charges ...Charge) (Receipt, error) {
	return l.charge(ctx, tx, "budget.charge_up_to", (*Ledger).prepareUpTo, charges)
}

// prepareUpTo validates charges as ChargeUpTo does, without any SQL.
func (l *Ledger) prepareUpTo(charges ...Charge) (*ledger.ChargeCall[Receipt], error) {
	call, err := l.prepare(charges...)
	if err != nil {
		return nil, err
	}
	for i, c := range charges {
		if c.Amount != charges[0].Amount {
			return nil, invalid(index("charges", i, ".Amount"), "%d is not that of the first charge, %d", c.Amount, charges[0].Amount)
		}
		if i == len(call.Charges) || call.Charges[i].Scope != c.Scope {
			return nil, invalid(index("charges", i, ".Scope"), "%q has a charge already", c.Scope)
		}
	}
	plain := call.Call.Args
	call.Call.SQL = l.sql.upTo
	call.Call.Args = func(s ledger.Sending) []any { return append(plain(s), s.Origin("")) }
	var a ledger.Answer
	call.Call.Scan = func(row pgx.Row) (Receipt, error) {
		a = ledger.Answer{}
		if err := row.Scan(&a.Amount, &a.Seqs, &a.Ats, &a.Used, &a.Held, &a.Refused, &a.Periods, &a.Crossed); err != nil {
			return Receipt{}, call.Failed(err)
		}
		return call.Receipt(a)
	}
	call.Call.Cross = func(ctx context.Context, tx pgx.Tx) error { return call.Cross(ctx, tx, a.Crossed) }
	return call, nil
}

// charge carries out a call of charges in tx.
func (l *Ledger) charge(ctx context.Context, tx pgx.Tx, name string, prepare func(*Ledger, ...Charge) (*ledger.ChargeCall[Receipt], error),
	charges []Charge) (r Receipt, err error) {
	if err := notNil("tx", tx); err != nil {
		return Receipt{}, err
	}
	p, err := prepare(l, charges...)
	if err != nil {
		return Receipt{}, err
	}
	ctx, span := l.begin(ctx, name)
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
