package inspect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// Explanation is the answer to a charge now, and the usage that counts against it.
type Explanation struct {
	Now    time.Time `json:"now"`
	Scope  string    `json:"scope"`
	Amount int64     `json:"amount"`
	Use    string    `json:"use,omitempty"` // of the charge: lots for it pay, too
	Fits   bool      `json:"fits"`          // it would be let in
	// Reason is the error of the charge, if it does not fit: a limit, a scope that is closed or
	// must exist, a window that reaches purged entries, a clock that is ahead. Code is its code.
	Reason string `json:"reason,omitempty"`
	Code   string `json:"code,omitempty"`
	// FitsAfter is how long until it fits if nothing else happens, budget.Never if waiting does not
	// help, 0 if it fits.
	FitsAfter time.Duration    `json:"fits_after_ns"`
	FitsAt    time.Time        `json:"fits_at,omitzero"` // zero for never, and if it fits
	Limits    []ExplainedLimit `json:"limits"`           // in the order of the charge
	Usage     budget.Usage     `json:"usage"`            // over the scope's lifetime
	Holds     []holds.Hold     `json:"holds,omitempty"`  // the scope's open holds, first due first, up to 20
	Leases    []leases.Lease   `json:"leases,omitempty"` // the scope's open leases, first to end first, up to 20
	Wallet    *Wallet          `json:"wallet,omitempty"` // the lots that remain, if the scope is a wallet
}

// ExplainedLimit is one limit of the charge.
type ExplainedLimit struct {
	Limit     budget.Limit    `json:"limit"`
	Used      int64           `json:"used"` // counts against it, holds and leases aside
	Held      int64           `json:"held"`
	Leased    int64           `json:"leased"`
	Available int64           `json:"available"`         // the largest amount that it admits
	Refusal   *budget.Refusal `json:"refusal,omitempty"` // nil if it lets the charge in
	// Oldest are the first entries inside the window or period, up to 20: they leave a window
	// first. None of a lifetime.
	Oldest    []budget.Entry `json:"oldest,omitempty"`
	PeriodEnd time.Time      `json:"period_end,omitzero"` // of a limit by period: its end
	Purged    bool           `json:"purged,omitempty"`    // the window reaches purged entries: its usage is not known
}

// Explain predicts the answer to a charge. It is not binding: it takes no lock, and the next charge
// may change it. Of Charge.Note the Use matters: lots for it pay for the charge. NoStandings does
// not. Limit.MaxFrom is refused, since it runs SQL of the caller's.
func (r *Reader) Explain(ctx context.Context, charge budget.Charge) (Explanation, error) {
	e := Explanation{Scope: charge.Scope, Amount: charge.Amount, Use: charge.Note.Use}
	charge.Limits = slices.Clone(charge.Limits)
	for i, l := range charge.Limits {
		l = l.WithThresholds() // without thresholds, which a look does not cross
		charge.Limits[i] = l
		if l != (budget.Limit{Max: l.Max, Window: l.Window, Period: l.Period, Lifetime: l.Lifetime, Prepaid: l.Prepaid, Name: l.Name}) {
			return e, invalid(fmt.Sprintf("charge.Limits[%d].MaxFrom", i), "is a query, which Explain does not run")
		}
	}
	var err error
	if e.Now, err = r.now(ctx); err != nil {
		return e, err
	}
	refused := r.apart(ctx, func(db DB) error {
		_, err := r.Ledger.Check(ctx, db, charge)
		return err
	})
	if refused != nil && !fault.Refused(refused) && !errors.Is(refused, budget.ErrWindowPurged) && !errors.Is(refused, budget.ErrClock) {
		return Explanation{}, refused
	}
	usages, err := r.Ledger.Usage(ctx, r.DB, budget.Query{Scope: charge.Scope})
	if err != nil {
		return e, err
	}
	e.Usage = usages[0]
	if e.Fits = refused == nil; !e.Fits {
		e.Reason, e.Code, e.FitsAfter = refused.Error(), fault.Code(refused), budget.Never
	}
	var exceeded *budget.ExceededError
	if errors.As(refused, &exceeded) {
		if e.FitsAfter = exceeded.RetryAfter(); e.FitsAfter != budget.Never {
			e.FitsAt = e.Now.Add(e.FitsAfter)
		}
	}
	if e.Wallet, err = r.Wallet(ctx, charge.Scope); err != nil {
		return e, err
	}
	for _, l := range charge.Limits {
		explained, err := r.explainLimit(ctx, charge.Scope, l, e.Now)
		if err != nil {
			return e, err
		}
		if e.Use != "" && e.Wallet != nil && (l.Lifetime || l.Prepaid) {
			explained.pay(e.Wallet.KeptFor(e.Use))
		}
		if exceeded != nil {
			for i := range exceeded.Refusals {
				if sameLimit(exceeded.Refusals[i].Limit, l) {
					explained.Refusal = &exceeded.Refusals[i]
				}
			}
		}
		e.Limits = append(e.Limits, explained)
	}
	held, err := r.heldOf(ctx, HoldFilter{Scope: charge.Scope}, explained)
	if err != nil {
		return e, err
	}
	leased, err := r.Leases(ctx, LeaseFilter{Scope: charge.Scope, State: LeaseOpen, Limit: explained})
	e.Holds, e.Leases = held.Holds, leased.Leases
	return e, err
}

// pay counts the units of lots for a use. They pay no overdraft that others drew: as in _raised.
func (l *ExplainedLimit) pay(kept int64) {
	overdrawn := max(0, l.Used+l.Held+l.Leased-l.Limit.Max)
	l.Used -= kept + overdrawn
	l.Available = max(0, l.Limit.Max-l.Used-l.Held-l.Leased)
}

// ForUse says that lots for some uses have units, which a charge without a use does not draw.
func (e Explanation) ForUse() bool {
	return e.Use == "" && e.Wallet != nil && slices.ContainsFunc(e.Wallet.Lots, func(l wallet.Lot) bool { return l.Uses != nil && l.Units > 0 })
}

// apart runs a function that may fail in a savepoint, so that a transaction around it stays usable.
func (r *Reader) apart(ctx context.Context, f func(DB) error) error {
	if tx, ok := r.DB.(pgx.Tx); ok {
		return pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error { return f(sub) })
	}
	return f(r.DB)
}

// Usages is Ledger.Usage, in a savepoint: a transaction around it stays usable if it fails.
func (r *Reader) Usages(ctx context.Context, queries ...budget.Query) (usages []budget.Usage, err error) {
	err = r.apart(ctx, func(db DB) (err error) {
		usages, err = r.Ledger.Usage(ctx, db, queries...)
		return err
	})
	return usages, err
}

// explained is how many holds, and how many leases, an Explanation shows.
const explained = 20

func sameLimit(a, b budget.Limit) bool {
	return a.Max == b.Max && a.Window == b.Window && a.Period == b.Period && a.Name == b.Name
}

// windowSQL is the last entry before a time, as in ratesSQL: the entries after it are in the
// window.
const windowSQL = `
select coalesce((
    select b.seq
    from (select l.epoch from metered.ledger l where l.scope = $1 order by l.seq desc limit 1) t,
         lateral (select pg_catalog.generate_series(greatest(0, t.epoch - 15), t.epoch::int) limit 16) g(e),
         lateral (select l.seq from metered.ledger l
          where l.scope = $1 and l.epoch = g.e and l.at <= $2 and (l.seq & 15::bigint = 1 or l.kind = 'k')
          order by l.at desc, l.seq desc limit 1) k,
         lateral (select l.seq from metered.ledger l
          where l.scope = $1 and l.seq between k.seq and k.seq + 15 and l.epoch = g.e and l.at <= $2
          order by l.seq desc limit 1) b
    order by g.e desc limit 1), 0)`

func (r *Reader) explainLimit(ctx context.Context, scope string, l budget.Limit, now time.Time) (ExplainedLimit, error) {
	out := ExplainedLimit{Limit: l}
	usages, err := r.Usages(ctx, budget.Query{Scope: scope, Window: l.Window, Period: l.Period})
	switch {
	case errors.Is(err, budget.ErrWindowPurged):
		out.Purged = true
		return out, nil
	case err != nil:
		return out, err
	}
	u := usages[0]
	out.Used, out.Held, out.Leased, out.Available = u.Used, u.Held, u.Leased, u.Available(l.Max)
	if l.Lifetime || l.Prepaid || u.Seq == 0 {
		return out, nil
	}
	since := now.Add(-l.Window)
	if !l.Period.IsZero() {
		since, out.PeriodEnd = u.PeriodStart.Add(-time.Microsecond), u.PeriodEnd // its first moment belongs to it
	}
	var base int64
	if err := r.row(ctx, windowSQL, scope, since).Scan(&base); err != nil {
		return out, failed("explain", err)
	}
	for entry, err := range r.Ledger.Entries(ctx, r.DB, scope, budget.EntriesOptions{After: base, Max: explained}) {
		if err != nil {
			return out, err
		}
		out.Oldest = append(out.Oldest, entry)
	}
	return out, nil
}
