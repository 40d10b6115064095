package budget

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/savepoint"
)

// Result is the answer to one of several charges or events.
type Result struct {
	// Posted is the written entry, if Err is nil.
	Posted Posted

	// Err is a refusal, or an error of this charge alone, such as ErrClock. It is nil if the
	// charge was made.
	Err error

	// Crossed are the thresholds that the charge reached.
	Crossed []Crossing
}

// ChargeEach makes up to 1,000 charges in one round trip (docs/scale.md), in order: a refusal is in
// its Result, and stops no other. Its own error aborts tx, unless a Limit has thresholds, which
// need a savepoint. More than 64 scopes wait for room in the server's lock table: ErrBusy after
// Config.LockTimeout.
func (l *Ledger) ChargeEach(ctx context.Context, tx pgx.Tx, charges ...Charge) ([]Result, error) {
	if err := cmp.Or(l.made(), notNil("tx", tx), checkBatch("charges", len(charges))); err != nil {
		return nil, err
	}
	items := make([]*item, len(charges))
	for i, c := range charges {
		var err error
		if items[i], err = l.newItem(c); err != nil {
			return nil, located("charges", i, err)
		}
	}
	return l.observedEach(ctx, "budget.charge_each",
		func(ctx context.Context) ([]Result, error) { return l.eachIn(ctx, tx, items) })
}

// eachIn makes charges in a transaction of a caller's: if some have thresholds in a savepoint,
// whose two round trips a batch can bear.
func (l *Ledger) eachIn(ctx context.Context, tx pgx.Tx, items []*item) ([]Result, error) {
	if !slices.ContainsFunc(items, func(a *item) bool { return slices.ContainsFunc(a.limits, Limit.tells) }) {
		return l.eachOnce(ctx, tx, items, false, false)
	}
	return savepoint.In(ctx, tx, "budget", func(sub pgx.Tx) ([]Result, error) {
		results, err := l.eachOnce(ctx, sub, items, false, true)
		for i := 0; err == nil && i < len(results); i++ {
			err = l.tellCrossings(ctx, sub, results[i].Crossed)
		}
		return results, err
	})
}

func checkBatch(field string, n int) error {
	if n < 1 || n > bounds.MaxBatch {
		return invalid(field, "are %d, want 1 to %d", n, bounds.MaxBatch)
	}
	return nil
}

// item is a validated charge of a batch.
type item struct {
	charge ledger.Charge
	limits []Limit
	event  *ledger.Event // nil for none
}

func (l *Ledger) newItem(c Charge) (*item, error) {
	if err := l.checkCharge(&c); err != nil {
		return nil, err
	}
	a := &item{limits: c.Limits, charge: ledger.Charge{
		Scope: c.Scope, Key: l.LockKey(c.Scope), Amount: c.Amount, Note: c.Note.json(),
		MustExist: c.MustExist || l.mustExist,
		Limits:    make([]ledger.Limit, len(c.Limits)),
	}}
	for i, limit := range c.Limits {
		if limit.query != nil {
			return nil, located(".Limits", i,
				invalid(".MaxFrom", "is not for a batch: its scopes are locked and charged in one statement"))
		}
		a.charge.Limits[i] = limit.sent()
	}
	if err := checkKeys(c.Limits); err != nil {
		return nil, within(".Limits: ", err)
	}
	return a, nil
}

const eachSQL = `
select nth, coalesce(seq, 0), coalesce(at, 'epoch'), used, coalesce(held, 0), refused, coalesce(status, ''), periods, crossed
from metered.charge_each($1::metered.new_charge[], $2::metered.new_event[], $3::interval, $4::interval, $5::interval, $6::int, $7::bool)`

// each makes charges. With skipBusy those whose lock is not free get ErrBusy, and nobody waits.
func (l *Ledger) each(ctx context.Context, db Querier, items []*item, skipBusy,
	telling bool) ([]Result, error) {
	charges, events := make([]ledger.Charge, len(items)), make([]*ledger.Event, len(items))
	for i, a := range items {
		charges[i], events[i] = a.charge, a.event
	}
	rows, err := answer.Query(ctx, db, l.sql.each, ledger.Charges(ledger.Telling(charges, telling)),
		ledger.Events(events),
		interval(l.tolerance), interval(l.late), interval(l.future), l.waitMS(), skipBusy)
	if err != nil {
		return nil, failed("charge each", err)
	}
	var row eachRow
	results := make([]Result, len(items))
	left := len(items)
	_, err = pgx.ForEachRow(rows, row.dest(), func() error {
		if row.nth < 1 || row.nth > len(items) {
			return fmt.Errorf("budget: the schema answers charge %d of %d", row.nth, len(items))
		}
		left--
		results[row.nth-1] = items[row.nth-1].result(&row)
		return nil
	})
	switch {
	case err != nil:
		return nil, failed("charge each", err)
	case left != 0:
		return nil, fmt.Errorf("budget: the schema answers %d charges of %d", len(items)-left, len(items))
	}
	return results, nil
}

// eachRow is metered.each_answer.
type eachRow struct {
	nth     int
	seq     int64
	at      time.Time
	used    []int64
	held    int64
	refused []byte
	status  string

	periods ledger.Periods
	crossed []byte
}

func (r *eachRow) dest() []any {
	return []any{&r.nth, &r.seq, &r.at, &r.used, &r.held, &r.refused, &r.status, &r.periods, &r.crossed}
}

var statusErrors = map[string]error{
	"conflict": ErrConflict, "retired": ErrRetired, "future": ErrFuture, "late": ErrLate, "busy": ErrBusy,
}

// merged is the item's charge, as a call of its own has it.
func (a *item) merged() *merged {
	m := &merged{limits: [][]Limit{a.limits}}
	m.Charges = []ledger.Charge{a.charge}
	return m
}

func (a *item) result(row *eachRow) Result {
	posted := Posted{Scope: a.charge.Scope, Amount: a.charge.Amount, Seq: row.seq, At: row.at,
		Replayed: row.status == "replay"}
	switch kind := statusErrors[row.status]; {
	case kind != nil && a.event != nil:
		return Result{Err: fmt.Errorf("%w: event %q of tenant %q", kind, a.event.ID, a.event.Tenant)}
	case kind != nil:
		return Result{Err: fmt.Errorf("%w: scope %q", kind, a.charge.Scope)}
	case posted.Replayed:
		return Result{Posted: posted}
	case row.status != "":
		var detail string
		_ = json.Unmarshal(row.refused, &detail) // null without one
		return Result{Err: failed("charge",
			&pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: row.status,
				Message: "refused in a batch", Detail: detail})}
	case len(row.refused) > 0:
		return Result{Err: a.merged().Refused(row.refused)}
	}
	if len(a.limits) > 0 {
		posted.Standings = make([]Standing, len(a.limits))
	}
	for i, limit := range a.limits {
		posted.Standings[i] = limit.standing(row.used[i], posted.Amount, row.held)
		if !limit.Period.IsZero() {
			posted.Standings[i].PeriodStart, posted.Standings[i].PeriodEnd = row.periods.Next()
		}
	}
	crossed, err := a.merged().crossings(row.crossed)
	return Result{Posted: posted, Crossed: crossed, Err: err}
}

// replays is the answer to another delivery of the same event in the same batch.
func (r Result) replays() Result {
	if r.Err == nil {
		r.Posted.Replayed, r.Posted.Standings, r.Crossed = true, nil, nil
	}
	return r
}

// outcome is err, of a statement that had its own transaction, as ErrCommitUnknown unless it is
// certain that it was not committed. A refusal that came as a row was read, and wrote nothing.
func outcome(conn *pgx.Conn, err error) error {
	var answer *pgconn.PgError
	refused := (fault.Refused(err) || errors.Is(err, ledger.ErrCrossing)) && !errors.As(err, &answer)
	if fault.Unreadable(err) && !errors.As(err, &answer) && !conn.IsClosed() { // answer.Whole read all before it
		return fmt.Errorf("%w: %w", fault.ErrUnread, err)
	}
	if refused || commit.Of(conn.PgConn(), "", err) == commit.NotCommitted {
		return err
	}
	return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
}
