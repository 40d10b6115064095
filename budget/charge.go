package budget

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/ledger"
)

// Charge takes an amount from a scope if all Limits admit it.
type Charge struct {
	// Scope is the budget to charge: 1 to 255 bytes of UTF-8. It needs no creation, unless
	// MustExist is set.
	Scope string `json:"scope"`

	// Amount is how many units the charge takes, from 1 to 2^53.
	Amount int64 `json:"amount"`

	// Limits are up to 16 limits, all of which must let the amount in. A charge without limits is
	// always let in, and recorded. Once one of a scope had to wait for others, later ones of that
	// scope do not wait at READ COMMITTED, so a total of all users is no queue (docs/scale.md). A
	// wallet's charges, those for a Use and those with MustExist still wait for their turn.
	Limits []Limit `json:"limits,omitempty"`

	// Note is stored with the entry.
	Note Note `json:"note,omitzero"`

	// MustExist refuses a scope that was not created (ErrScopeUnknown) or was retired
	// (ErrScopeRetired).
	MustExist bool `json:"must_exist,omitempty"`

	// NoStandings leaves Posted.Standings out, which makes the charge faster.
	NoStandings bool `json:"no_standings,omitempty"`

	// UpTo takes the largest amount that the limits admit, from 1 to Amount. Posted.Amount has it.
	// If one charge of a call has UpTo, all of them have it, with equal amounts and different
	// scopes, and each scope is charged the same. If not even 1 fits, the *ExceededError has the
	// limits that refuse 1. It is for Ledger.Charge, ChargeNow and metered.Tx.Charge.
	UpTo bool `json:"up_to,omitempty"`

	// Lots asks for Posted.Lots, which cost a look at the wallet's lots. It is for the calls that
	// UpTo is for.
	Lots bool `json:"lots,omitempty"`
}

// Receipt lists the entries of a call.
type Receipt struct {
	// Entries are the written entries: one for each charge, in the order of the call.
	Entries []Posted `json:"entries"`

	// Crossed are the thresholds that the call reached, in the order of their entries.
	Crossed []Crossing `json:"crossed,omitempty"`
}

// Posted is a written entry.
type Posted struct {
	// Scope is the scope that the entry is of.
	Scope string `json:"scope"`

	// Seq names the entry, together with Scope. It is 0 for units spent from a lease, and less than
	// 0 for a charge without limits that did not wait for others: Refund takes it all the same.
	Seq int64 `json:"seq"`

	// Lease is the number of the lease that the units were spent from, or 0 (see package leases).
	Lease int64 `json:"lease,omitempty"`

	// Amount are the units that were charged. With Charge.UpTo it may be less than the charge asked
	// for.
	Amount int64 `json:"amount"`

	// At is the time of the entry, by the database's clock.
	At time.Time `json:"at"`

	// Standings are the limits as they are after the charge.
	Standings []Standing `json:"standings,omitempty"`

	// Lots are the lots of a wallet that paid, in order, after a call with Charge.Lots or
	// Charge.UpTo. In a wallet, what they lack of Amount is overdrawn.
	Lots []LotMove `json:"lots,omitempty"`

	// Replayed says that the event was counted before, by this entry.
	Replayed bool `json:"replayed,omitempty"`
}

// Standing is the state of a limit after a charge or at a check. At PeriodEnd the next period
// begins.
type Standing struct {
	// Limit is the limit of the charge or the check.
	Limit Limit `json:"limit"`

	// Used are the units that count, without held ones. It is negative where credit is left.
	Used int64 `json:"used"`

	// Held are the units of open holds and leases.
	Held int64 `json:"held"`

	// Available is the most that the limit still lets in.
	Available int64 `json:"available"`

	// Over says that a limit with Observe would have refused the charge.
	Over bool `json:"over,omitempty"`

	// Unknown says that a limit with Observe reaches entries that were purged. Nobody knows its
	// Used, Available and Over then, and they are zero.
	Unknown bool `json:"unknown,omitempty"`

	// PeriodStart is when the present period began. It is zero for a limit that has no Period.
	PeriodStart time.Time `json:"period_start,omitzero"`

	// PeriodEnd is when the next period begins. It is zero for a limit that has no Period.
	PeriodEnd time.Time `json:"period_end,omitzero"`
}

const chargeSQL = `
select seqs, ats, used, held, refused, periods, crossed
from metered.charge($1::metered.new_charge[], $2::interval, $3::int, $4::bool)`

// chargePlainSQL is chargeSQL the short way.
const chargePlainSQL = `
select metered.charge_plain($1::text, $2::bigint, $3::bigint, $4::bigint, $5::interval, $6::timestamptz, $7::timestamptz,
    $8::jsonb, $9::text, $10::bool, $11::interval, $12::int)`

// chargeTotalSQL is chargePlainSQL for a charge with a limit, and one without.
const chargeTotalSQL = `
select metered.charge_total($1::text, $2::bigint, $3::bigint, $4::bigint, $5::interval, $6::timestamptz, $7::timestamptz,
    $8::jsonb, $9::text, $10::bool, $11::text, $12::bigint, $13::bigint, $14::jsonb, $15::bool, $16::interval, $17::int)`

// prepareCharge validates charges as Charge does. They go the short way, if there is one.
func (l *Ledger) prepareCharge(charges ...Charge) (*ledger.Call[Receipt], error) {
	if slices.ContainsFunc(charges, Charge.special) {
		return l.prepareLots(charges...)
	}
	c, err := l.prepare(charges...)
	if err != nil {
		return nil, err
	}
	call := &ledger.Call[Receipt]{Locks: c.Locks, Queries: c.Queries}
	sql, _ := c.Short(l.sql.chargePlain, l.sql.chargeTotal, nil, false)
	if sql == "" {
		call.SQL, call.Scan = l.sql.charge, c.Scan
		call.Args = func(s ledger.Sending) []any {
			return []any{ledger.Summed(ledger.Telling(c.Charges, s.Telling)), c.Tolerance,
				s.WaitMS, c.Standing}
		}
		return call, nil
	}
	call.SQL = sql
	call.Args = func(s ledger.Sending) []any {
		_, args := c.Short(l.sql.chargePlain, l.sql.chargeTotal, make([]any, 0, 17), s.Telling)
		return append(args, c.Tolerance, s.WaitMS)
	}
	call.Scan = func(row pgx.Row) (Receipt, error) {
		var answer []byte
		var a ledger.Answer
		if err := row.Scan(&answer); err != nil {
			return Receipt{}, c.Failed(err)
		}
		if err := a.ScanPlain(answer, &c.Charging); err != nil {
			return Receipt{}, c.Failed(err)
		}
		return c.Receipt(a)
	}
	return call, nil
}

const chargeLotsSQL = `
select coalesce(amount, 0), seqs, ats, used, held, refused, periods, crossed, lots
from metered.charge_lots($1::metered.new_charge[], $2::bool, $3::interval, $4::int, $5::bool, $6::metered.origin)`

// special reports whether a charge is sent by chargeLotsSQL.
func (c Charge) special() bool { return c.UpTo || c.Lots }

// prepareLots validates charges some of which have UpTo or Lots, without any SQL.
func (l *Ledger) prepareLots(charges ...Charge) (*ledger.Call[Receipt], error) {
	plain := slices.Clone(charges)
	for i := range plain {
		plain[i].UpTo, plain[i].Lots = false, false
	}
	charged, err := l.prepare(plain...)
	if err != nil {
		return nil, err
	}
	upTo := slices.ContainsFunc(charges, func(c Charge) bool { return c.UpTo })
	for i, c := range charges {
		switch {
		case !upTo:
		case !c.UpTo:
			return nil, invalid(index("charges", i, ".UpTo"), "is not set, and that of another charge is")
		case c.Amount != charges[0].Amount:
			return nil, invalid(index("charges", i, ".Amount"),
				"%d is not that of the first charge, %d", c.Amount, charges[0].Amount)
		case i == len(charged.Charges) || charged.Charges[i].Scope != c.Scope:
			return nil, invalid(index("charges", i, ".Scope"), "%q has a charge already", c.Scope)
		}
	}
	call := &ledger.Call[Receipt]{SQL: l.sql.chargeLots, Locks: charged.Locks, Queries: charged.Queries}
	call.Args = func(s ledger.Sending) []any {
		return []any{ledger.Charges(ledger.Telling(charged.Charges, s.Telling)), upTo, charged.Tolerance,
			s.WaitMS, charged.Standing, s.Origin("")}
	}
	var a ledger.Answer
	call.Scan = func(row pgx.Row) (Receipt, error) {
		a = ledger.Answer{}
		var lots []byte
		if err := row.Scan(&a.Amount, &a.Seqs, &a.Ats, &a.Used, &a.Held, &a.Refused, &a.Periods,
			&a.Crossed, &lots); err != nil {
			return Receipt{}, charged.Failed(err)
		}
		r, err := charged.Receipt(a)
		if err != nil {
			return r, err
		}
		var paid [][]LotMove
		if err := json.Unmarshal(lots, &paid); err != nil || len(paid) != len(r.Entries) {
			return Receipt{}, fmt.Errorf("budget: read lots %q: %w", lots, err)
		}
		for i := range r.Entries {
			r.Entries[i].Lots = paid[i]
		}
		return r, nil
	}
	call.Cross = func(ctx context.Context, tx pgx.Tx) error {
		return charged.Cross(ctx, tx, a.Crossed)
	}
	return call, nil
}

// Charge charges all scopes or none, in one round trip. Charges of one scope become one entry, with
// one Note.
func (l *Ledger) Charge(ctx context.Context, tx pgx.Tx, charges ...Charge) (r Receipt, err error) {
	if err := notNil("tx", tx); err != nil {
		return Receipt{}, err
	}
	call, err := l.prepareCharge(charges...)
	if err != nil {
		return Receipt{}, err
	}
	ctx, span := l.begin(ctx, "budget.charge")
	defer func() { l.ended(ctx, span, err) }()
	if len(call.Queries) > 0 {
		lock := ledger.LockAllArgs(l.waitMS(), call.Locks)
		if err := ledger.Ask(ctx, tx, l.sql.lockAll, lock, call.Queries,
			func(err error) error { return failed("charge", err) }); err != nil {
			return Receipt{}, err
		}
	}
	return ledger.SilentlyIn(ctx, tx, "budget", func(tx pgx.Tx, telling bool) (Receipt, error) {
		r, err := call.Scan(answer.QueryRow(ctx, tx, call.SQL,
			call.Args(ledger.Sending{WaitMS: l.waitMS(), Telling: telling})...))
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
		rows, _ := answer.Query(ctx, db, q.SQL, q.Args...) // its error is that of the rows, too
		if err := q.Read(rows, true, func(err error) error { return failed("check", err) }); err != nil {
			return Receipt{}, err
		}
	}
	var a ledger.Answer
	row := answer.QueryRow(ctx, db, l.sql.check, ledger.Charges(call.Charges), call.Tolerance)
	if err := row.Scan(&a.Used, &a.Held, &a.Refused, &a.Periods); err != nil {
		return Receipt{}, failed("check", err)
	}
	return call.Receipt(a)
}
