package budget

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func init() { lend.Lend("budget", internals{}) }

// internals are lent to holds, wallet, leases and metered.
type internals struct{}

// Charges prepares Ledger.Charge.
func (internals) Charges(l *Ledger, charges ...Charge) (*ledger.ChargeCall[Receipt], error) {
	return l.prepare(charges...)
}

// ChargeLots prepares Ledger.Charge where charges have UpTo or Lots. It is nil where none has.
func (internals) ChargeLots(l *Ledger, charges ...Charge) (*ledger.Call[Receipt], error) {
	if !slices.ContainsFunc(charges, Charge.special) {
		return nil, nil
	}
	return l.prepareLots(charges...)
}

// Credit prepares Ledger.Credit.
func (internals) Credit(l *Ledger, c Credit) (*ledger.Call[Posted], error) { return l.prepareCredit(c) }

// Refund prepares Ledger.Refund.
func (internals) Refund(l *Ledger, r Refund) (*ledger.Call[Posted], error) { return l.prepareRefund(r) }

// Settings are the ledger's schema, its timeout for locks, and whether each write names an actor.
func (internals) Settings(l *Ledger) (name schema.Name, wait time.Duration, actor bool) {
	return l.schema, l.wait, l.actor
}

// Period is a period as it is sent, after its checks.
func (internals) Period(field string, p Period) (ledger.Period, error) {
	if p.IsZero() {
		return ledger.Period{}, nil
	}
	return p.sent(), p.check(field)
}

// Observer is the ledger's, or nil.
func (internals) Observer(l *Ledger) *observed.To { return l.observer }

// TellRefused reports the limits that refused, if err is their refusal.
func (internals) TellRefused(ctx context.Context, to *observed.To, err error) {
	tellRefused(ctx, to, err)
}

// TellCrossings calls Config.OnThreshold.
func (internals) TellCrossings(ctx context.Context, l *Ledger, tx pgx.Tx, all []Crossing) error {
	return l.tellCrossings(ctx, tx, all)
}

// TellsSpent reports whether a limit has thresholds on spending alone, and whether its Max is
// known.
func (internals) TellsSpent(l Limit) (tells, known bool) {
	return l.tells() && l.sentThresholds().spent, l.query == nil
}

// Failed maps an error of a statement to that of Ledger.Charge.
func (internals) Failed(doing string, err error) error { return failed(doing, err) }

// NoteJSON is a note as it is stored.
func (internals) NoteJSON(n Note) string { return n.json() }

// SplitScope inverts ScopeKey.
func (internals) SplitScope(scope string) (kind, key, slot string, err error) {
	return splitScope(scope)
}

// Content is a scope with a use, if there is one, as the content of an id has it. A scope has no
// zero byte.
func (internals) Content(scope, use string) string {
	if use == "" {
		return scope
	}
	return scope + "\x00" + use
}

// merged are the charges of a call, one for each distinct scope, and their answers.
type merged struct {
	ledger.ChargeCall[Receipt]
	limits [][]Limit // by charge, as they were given
	quiet  []bool    // by charge: without standings
	at     map[string]int
	ledger *Ledger

	room struct { // of one charge with one limit, as most calls have: it needs no memory beside
		charges [1]ledger.Charge
		sent    [1]ledger.Limit
		limits  [1][]Limit
		limit   [1]Limit
		quiet   [1]bool
		key     [1]int64
		scope   [1]string
	}
}

// prepare validates charges as Charge does, without any SQL.
func (l *Ledger) prepare(charges ...Charge) (*ledger.ChargeCall[Receipt], error) {
	if err := l.made(); err != nil {
		return nil, err
	}
	if len(charges) == 0 {
		return nil, invalid("charges", "are none")
	}
	m := &merged{ledger: l}
	m.Answering, m.Receipts = m, m
	m.Charges, m.limits, m.quiet = m.room.charges[:0], m.room.limits[:0], m.room.quiet[:0]
	m.Locks = ledger.Locks{Keys: m.room.key[:0], Scopes: m.room.scope[:0]}
	if len(charges) > 1 {
		m.at = make(map[string]int, len(charges))
	}
	for i := range charges {
		c := &charges[i]
		if err := located("charges", i, l.checkCharge(c)); err != nil {
			return nil, err
		}
		if err := m.add(i, c); err != nil {
			return nil, err
		}
	}
	for i, limits := range m.limits {
		c := &m.Charges[i]
		if i == 0 {
			c.Limits = m.room.sent[:0]
		}
		for j := range limits {
			c.Limits = append(c.Limits, limits[j].sent())
			if limits[j].query != nil {
				m.Queries = append(m.Queries, m.query(i, j))
			}
		}
		if err := checkKeys(limits); err != nil {
			return nil, within(fmt.Sprintf("scope %q: ", c.Scope), err)
		}
		c.Key, c.MustExist = l.LockKey(c.Scope), c.MustExist || l.mustExist
		m.quiet[i] = m.quiet[i] || l.quiet
		m.Locks.Keys, m.Locks.Scopes = append(m.Locks.Keys, c.Key), append(m.Locks.Scopes, c.Scope)
	}
	// In the order of the keys, not of the names: two names may share a key.
	slices.Sort(m.Locks.Keys)
	m.Locks.Keys = slices.Compact(m.Locks.Keys)
	m.Tolerance, m.Standing, m.Spans = interval(l.tolerance), slices.Contains(m.quiet, false), &l.spans
	return &m.ChargeCall, nil
}

// query is the query of a limit. Until it is answered the limit admits everything.
func (m *merged) query(i, j int) *ledger.Query {
	limit := &m.limits[i][j]
	q := limit.query
	limit.query = nil // the answer to the caller has the number
	set := func(most int64) { limit.Max, m.Charges[i].Limits[j] = most, limit.sentWith(most) }
	return &ledger.Query{
		SQL: q.sql, Args: q.args, Forget: func() { set(bounds.MaxLimit) },
		Set: func(most *int64, err error) error {
			where := fmt.Sprintf("of scope %q", m.Charges[i].Scope)
			switch {
			case err != nil:
				return fmt.Errorf("%w %s: %w", errLimitQuery, where, err)
			case most == nil:
				return fmt.Errorf("%w %s: it answered nothing, want an integer from 0 to %d",
					errLimitQuery, where, int64(bounds.MaxLimit))
			case *most < 0 || *most > bounds.MaxLimit:
				return fmt.Errorf("%w %s: %d is not from 0 to %d", errLimitQuery, where, *most,
					int64(bounds.MaxLimit))
			}
			set(*most)
			return nil
		},
	}
}

// add merges c into the charge of the same scope, or appends it.
func (m *merged) add(i int, c *Charge) error {
	j, seen := m.at[c.Scope]
	if !seen {
		if len(m.Charges) == bounds.MaxScopes {
			return invalid("charges", "name more than %d scopes", bounds.MaxScopes)
		}
		if m.at != nil {
			m.at[c.Scope] = len(m.Charges)
		}
		var room []Limit
		if len(m.Charges) == 0 {
			room = m.room.limit[:0]
		}
		m.Charges = append(m.Charges, ledger.Charge{Scope: c.Scope, Amount: c.Amount,
			Note: c.Note.json(), Use: c.Note.Use, MustExist: c.MustExist})
		m.limits, m.quiet = append(m.limits, append(room, c.Limits...)), append(m.quiet, c.NoStandings)
		return nil
	}
	if m.Charges[j].Amount += c.Amount; m.Charges[j].Amount > bounds.MaxAmount {
		return invalid(index("charges", i, ".Amount"),
			"the charges of scope %q add up to more than %d", c.Scope, int64(bounds.MaxAmount))
	}
	if m.Charges[j].Note != c.Note.json() {
		return invalid(index("charges", i, ".Note"), "differs from that of another charge of scope %q", c.Scope)
	}
	m.Charges[j].MustExist = m.Charges[j].MustExist || c.MustExist
	m.quiet[j] = m.quiet[j] && c.NoStandings
	for _, limit := range c.Limits {
		if !slices.Contains(m.limits[j], limit) {
			m.limits[j] = append(m.limits[j], limit)
		}
	}
	if len(m.limits[j]) > bounds.MaxLimits {
		return invalid(index("charges", i, ".Limits"), "scope %q has more than %d", c.Scope, bounds.MaxLimits)
	}
	return nil
}

// checkCharge names fields by ".Scope" and so on.
func (l *Ledger) checkCharge(c *Charge) error {
	if err := checkScope(".Scope", c.Scope); err != nil {
		return err
	}
	if err := checkAmount(".Amount", c.Amount); err != nil {
		return err
	}
	if c.UpTo {
		return invalid(".UpTo", "is for budget.Ledger.Charge, ChargeNow and metered.Tx.Charge")
	}
	if c.Lots {
		return invalid(".Lots", "are for budget.Ledger.Charge, ChargeNow and metered.Tx.Charge")
	}
	if len(c.Limits) > bounds.MaxLimits {
		return invalid(".Limits", "are %d, want at most %d", len(c.Limits), bounds.MaxLimits)
	}
	for j, limit := range c.Limits {
		if err := located(".Limits", j, limit.check("")); err != nil {
			return err
		}
		if limit.tells() && l.onThreshold == nil {
			return located(".Limits", j, invalid(".Tell", "needs Config.OnThreshold, which reports thresholds"))
		}
	}
	return l.checkNote(".Note", c.Note)
}

func checkAmount(field string, amount int64) error {
	if amount < 1 || amount > bounds.MaxAmount {
		return invalid(field, "%d is not from 1 to %d", amount, int64(bounds.MaxAmount))
	}
	return nil
}

func checkWindow(field string, window time.Duration) error {
	if window < 0 || window > bounds.MaxWindow {
		return invalid(field, "%v is not from 0 to %v", window, bounds.MaxWindow)
	}
	if window%time.Microsecond != 0 {
		return invalid(field, "%v is not a whole number of microseconds", window)
	}
	return nil
}

// Scan reads the row of chargeSQL, with the errors of Ledger.Charge.
func (m *merged) Scan(row pgx.Row) (Receipt, error) {
	var a ledger.Answer
	if err := row.Scan(&a.Seqs, &a.Ats, &a.Used, &a.Held, &a.Refused, &a.Periods, &a.Crossed); err != nil {
		return Receipt{}, m.Failed(err)
	}
	return m.Receipt(a)
}

// Failed turns an error of Postgres into that of Ledger.Charge: *ExceededError or *ScopeError where
// the caller asked the function _write_charges of the schema to raise its refusal.
func (m *merged) Failed(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == sqlstate.Exceeded {
		return m.Refused([]byte(pgErr.Detail))
	}
	if err = failed("charge", err); sqlstate.Of(err) == sqlstate.LeaseClosed {
		if closed := (*ledger.ClosedError)(nil); errors.As(m.Refused([]byte(pgErr.Detail)), &closed) {
			return &ledger.ClosedError{Lease: closed.Lease, Cause: err}
		}
	}
	return err
}

// Receipt makes the answer of Ledger.Charge from that of the schema's functions.
func (m *merged) Receipt(a ledger.Answer) (Receipt, error) {
	if len(a.Refused) > 0 {
		return Receipt{}, m.Refused(a.Refused)
	}
	r := Receipt{Entries: make([]Posted, len(m.Charges))}
	n := 0
	for i, c := range m.Charges {
		e := Posted{Scope: c.Scope, Amount: cmp.Or(a.Amount, c.Amount)}
		if a.Seqs != nil {
			e.Seq, e.At = a.Seqs[i], a.Ats[i]
		}
		if c.Lease != nil {
			e.Lease = c.Lease.No
			r.Entries[i] = e
			continue
		}
		for _, limit := range m.limits[i] {
			n++
			var start, end time.Time
			if !limit.Period.IsZero() {
				start, end = a.Periods.Next()
			}
			if m.quiet[i] && a.Seqs != nil { // Check has them in any case
				continue
			}
			s := limit.standing(a.Used[n-1], e.Amount, a.Held[i])
			s.PeriodStart, s.PeriodEnd = start, end
			e.Standings = append(e.Standings, s)
		}
		r.Entries[i] = e
	}
	var err error
	r.Crossed, err = m.crossings(a.Crossed)
	return r, err
}

// Refused makes the error of a refusal, which _check_limits (internal/schema/sql/limits.sql) or
// _admit wrote as JSON. All ways of a refusal lead here.
func (m *merged) Refused(refused []byte) error {
	var rows []struct {
		Limit   int    `json:"limit"`
		Used    int64  `json:"used"`
		Held    int64  `json:"held"`
		Own     int64  `json:"own"`
		Leased  int64  `json:"leased"`
		Lease   int64  `json:"lease"`
		RetryUS int64  `json:"retry_us"`
		DueUS   *int64 `json:"due_us"`
		Period  ledger.Periods
		Absent  string `json:"absent"`

		Crossing bool `json:"crossing"`
	}
	if err := json.Unmarshal(refused, &rows); err != nil {
		return failed("read a refusal", err)
	}
	switch {
	case len(rows) > 0 && rows[0].Crossing:
		return ledger.ErrCrossing
	case len(rows) > 0 && rows[0].Absent != "":
		return absentScopes(refused)
	case len(rows) > 0 && rows[0].Lease != 0:
		return &ledger.ClosedError{Lease: rows[0].Lease}
	}
	e := &ExceededError{}
	for _, row := range rows {
		scope, limit := m.limitAt(row.Limit)
		r := Refusal{
			Scope: m.Charges[scope].Scope, Limit: limit,
			Used: row.Used, Held: row.Held, OwnHeld: row.Own, Leased: row.Leased,
			Requested:  m.Charges[scope].Amount,
			Available:  available(limit.Max, row.Used, row.Held+row.Own+row.Leased),
			RetryAfter: Never,
		}
		r.PeriodStart, r.PeriodEnd = row.Period.Next()
		if row.RetryUS >= 0 {
			r.RetryAfter = time.Duration(row.RetryUS) * time.Microsecond
		}
		if row.DueUS != nil {
			r.HoldDue = max(0, time.Duration(*row.DueUS)*time.Microsecond)
		}
		e.Refusals = append(e.Refusals, r)
	}
	return e
}

// Crossed is a receipt of crossings alone.
func (m *merged) Crossed(crossed []byte) (r Receipt, err error) {
	r.Crossed, err = m.crossings(crossed)
	return r, err
}

// limitAt returns the n-th limit of the call and the scope it belongs to.
func (m *merged) limitAt(n int) (scope int, limit Limit) {
	for m.Charges[scope].Lease != nil || n >= len(m.limits[scope]) {
		if m.Charges[scope].Lease == nil { // units of a lease are sent without limits
			n -= len(m.limits[scope])
		}
		scope++
	}
	return scope, m.limits[scope][n]
}

// do carries out a credit or a refund in tx.
func do[E any](ctx context.Context, tx pgx.Tx, l *Ledger, name string,
	prepare func(*Ledger, E) (*ledger.Call[Posted], error), e E) (p Posted, err error) {
	call, err := prepare(l, e)
	if err != nil {
		return Posted{}, err
	}
	if err := notNil("tx", tx); err != nil {
		return Posted{}, err
	}
	ctx, span := l.begin(ctx, name)
	defer func() { span.End(err) }()
	return call.Scan(answer.QueryRow(ctx, tx, call.SQL, call.Args(ledger.Sending{WaitMS: l.waitMS()})...))
}

// standing is that of a limit after a charge of amount units. before is its use before the charge.
func (l Limit) standing(before, amount, held int64) Standing {
	if before == ledger.UnknownUse {
		return Standing{Limit: l, Held: held, Unknown: true}
	}
	used := before + amount
	return Standing{Limit: l, Used: used, Held: held, Available: available(l.Max, used, held),
		Over: l.Observe && used > l.Max-held}
}

// available is the amount that a limit still admits. Where a scope has so much credit that it would
// overflow, it is as much as an int64 can say.
func available(limit, used, held int64) int64 {
	if used < 0 && limit > math.MaxInt64+used {
		return math.MaxInt64 - held
	}
	if limit-used < held {
		return 0
	}
	return limit - used - held
}

func interval(d time.Duration) pgtype.Interval {
	return pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}
}
