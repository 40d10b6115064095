package budget

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Prepared is a validated call of Charge, for those who send it themselves: in a
// pgx.Batch together with other statements, or inside another function.
type Prepared struct {
	charges   []ledger.Charge
	limits    [][]Limit // by charge, as they were given
	keys      []int64   // of the scopes' locks, in order
	tolerance pgtype.Interval
	waitMS    int32
	sql       string
}

// Prepare validates charges as Charge does, without any SQL.
func (l *Ledger) Prepare(charges ...Charge) (*Prepared, error) {
	if err := l.made(); err != nil {
		return nil, err
	}
	if len(charges) == 0 {
		return nil, invalid("charges", "are none")
	}
	p := &Prepared{tolerance: interval(l.tolerance), waitMS: l.waitMS(), sql: l.sql.charge}
	at := make(map[string]int, len(charges))
	for i, c := range charges {
		if err := c.check(i); err != nil {
			return nil, err
		}
		if err := p.add(at, i, c); err != nil {
			return nil, err
		}
	}
	for i, limits := range p.limits {
		c := &p.charges[i]
		for _, limit := range limits {
			c.Limits = append(c.Limits, ledger.Limit{Max: limit.Max, Window: max(limit.Window, 0)})
		}
		c.Key = l.LockKey(c.Scope)
		p.keys = append(p.keys, c.Key)
	}
	// In the order of the keys, not of the names: two names may share a key.
	slices.SortFunc(p.keys, cmp.Compare[int64])
	p.keys = slices.Compact(p.keys)
	return p, nil
}

// add merges c into the call's charge of the same scope, or appends it.
func (p *Prepared) add(at map[string]int, i int, c Charge) error {
	j, seen := at[c.Scope]
	if !seen {
		if len(p.charges) == MaxScopes {
			return invalid("charges", "name more than %d scopes", MaxScopes)
		}
		at[c.Scope] = len(p.charges)
		p.charges = append(p.charges, ledger.Charge{Scope: c.Scope, Amount: c.Amount, Note: c.Note.JSON()})
		p.limits = append(p.limits, slices.Clone(c.Limits))
		return nil
	}
	if p.charges[j].Amount += c.Amount; p.charges[j].Amount > MaxAmount {
		return invalid(index("charges", i, ".Amount"), "the charges of scope %q add up to more than %d", c.Scope, int64(MaxAmount))
	}
	if p.charges[j].Note != c.Note.JSON() {
		return invalid(index("charges", i, ".Note"), "differs from that of another charge of scope %q", c.Scope)
	}
	for _, limit := range c.Limits {
		if !slices.Contains(p.limits[j], limit) {
			p.limits[j] = append(p.limits[j], limit)
		}
	}
	if len(p.limits[j]) > MaxLimits {
		return invalid(index("charges", i, ".Limits"), "scope %q has more than %d", c.Scope, MaxLimits)
	}
	return nil
}

func (c Charge) check(i int) error {
	if err := checkScope(index("charges", i, ".Scope"), c.Scope); err != nil {
		return err
	}
	if err := checkAmount(index("charges", i, ".Amount"), c.Amount); err != nil {
		return err
	}
	if len(c.Limits) > MaxLimits {
		return invalid(index("charges", i, ".Limits"), "are %d, want at most %d", len(c.Limits), MaxLimits)
	}
	for j, limit := range c.Limits {
		if err := limit.check(index("charges", i, index(".Limits", j, ""))); err != nil {
			return err
		}
	}
	return c.Note.check(index("charges", i, ".Note"))
}

func checkAmount(field string, amount int64) error {
	if amount < 1 || amount > MaxAmount {
		return invalid(field, "%d is not from 1 to %d", amount, int64(MaxAmount))
	}
	return nil
}

func checkWindow(field string, window time.Duration) error {
	if window < 0 || window > MaxWindow {
		return invalid(field, "%v is not from 0 to %v", window, MaxWindow)
	}
	if window%time.Microsecond != 0 {
		return invalid(field, "%v is not a whole number of microseconds", window)
	}
	return nil
}

// SQL is the statement to send with Args, to be read by Scan. Its denial is a
// row, not an error of Postgres.
func (p *Prepared) SQL() string { return p.sql }

// Args are the arguments of the statement.
func (p *Prepared) Args() []any { return []any{ledger.Charges(p.charges), p.tolerance, p.waitMS} }

// Charges are the charges as they are sent, one for each distinct scope.
func (p *Prepared) Charges() []ledger.Charge { return p.charges }

// Tolerance is Config.ClockTolerance as it is sent.
func (p *Prepared) Tolerance() pgtype.Interval { return p.tolerance }

// Scopes are the distinct scopes of the call, in the order of Charges.
func (p *Prepared) Scopes() []string {
	scopes := make([]string, len(p.charges))
	for i, c := range p.charges {
		scopes[i] = c.Scope
	}
	return scopes
}

// Keys are the keys of the scopes' locks, in the order in which they are taken.
func (p *Prepared) Keys() []int64 { return p.keys }

// Scan reads the row that SQL returned, with the errors of Ledger.Charge.
func (p *Prepared) Scan(row pgx.Row) (Receipt, error) {
	var seqs, used, held []int64
	var ats []time.Time
	var denied []byte
	if err := row.Scan(&seqs, &ats, &used, &held, &denied); err != nil {
		return Receipt{}, p.Failed(err)
	}
	return p.Receipt(seqs, ats, used, held, denied)
}

// Failed turns an error of Postgres into that of Ledger.Charge: *ExceededError
// where the function charge in schema.sql was told to raise its denial.
func (p *Prepared) Failed(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == sqlstate.Exceeded {
		return p.exceeded([]byte(pgErr.Detail))
	}
	return failed("charge", err)
}

// Receipt makes the answer of Ledger.Charge from what the function charge in
// schema.sql returned.
func (p *Prepared) Receipt(seqs []int64, ats []time.Time, used, held []int64, denied []byte) (Receipt, error) {
	if len(denied) > 0 {
		return Receipt{}, p.exceeded(denied)
	}
	r := Receipt{Entries: make([]Posted, len(p.charges))}
	n := 0
	for i, c := range p.charges {
		e := Posted{Scope: c.Scope, Amount: c.Amount}
		if seqs != nil {
			e.Seq, e.At = seqs[i], ats[i]
		}
		for _, limit := range p.limits[i] {
			s := Standing{Limit: limit, Used: used[n] + e.Amount, Held: held[i]}
			s.Available = available(limit.Max, s.Used, s.Held)
			e.Standings = append(e.Standings, s)
			n++
		}
		r.Entries[i] = e
	}
	return r, nil
}

// exceeded decodes the denial that the function check_limits in schema.sql wrote.
func (p *Prepared) exceeded(denied []byte) error {
	var rows []struct {
		Limit   int    `json:"limit"`
		Used    int64  `json:"used"`
		Held    int64  `json:"held"`
		Own     int64  `json:"own"`
		RetryUS int64  `json:"retry_us"`
		DueUS   *int64 `json:"due_us"`
	}
	if err := json.Unmarshal(denied, &rows); err != nil {
		return failed("read a denial", err)
	}
	e := &ExceededError{}
	for _, row := range rows {
		scope, limit := p.limitAt(row.Limit)
		r := Refusal{
			Scope: p.charges[scope].Scope, Limit: limit,
			Used: row.Used, Held: row.Held, OwnHeld: row.Own, Requested: p.charges[scope].Amount,
			Available:  available(limit.Max, row.Used, row.Held+row.Own),
			RetryAfter: Never,
		}
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

// limitAt returns the n-th limit of the call and the scope it belongs to.
func (p *Prepared) limitAt(n int) (scope int, limit Limit) {
	for n >= len(p.limits[scope]) {
		n -= len(p.limits[scope])
		scope++
	}
	return scope, p.limits[scope][n]
}

// PreparedEntry is a validated call of Credit or Refund, for those who send it
// themselves.
type PreparedEntry struct {
	sql    string
	key    int64
	waitMS int32
	args   func(waitMS int32, namespace, operation string, raising bool) []any
	scan   func(pgx.Row) (Posted, error)
}

// Key is the key of the scope's lock.
func (p *PreparedEntry) Key() int64 { return p.key }

// SQL is the statement to send with Args, to be read by Scan.
func (p *PreparedEntry) SQL() string { return p.sql }

// Args are the statement's arguments. The statement waits at most waitMS for the scope's
// lock, and records in the entry the operation that it belongs to. A refusal is an error of
// Postgres.
func (p *PreparedEntry) Args(waitMS int32, namespace, operation string) []any {
	return p.args(waitMS, namespace, operation, true)
}

// Scan reads the row that SQL returned, with the errors of the call.
func (p *PreparedEntry) Scan(row pgx.Row) (Posted, error) { return p.scan(row) }

func (p *PreparedEntry) run(ctx context.Context, tx pgx.Tx) (Posted, error) {
	if err := notNil("tx", tx); err != nil {
		return Posted{}, err
	}
	return p.scan(tx.QueryRow(ctx, p.sql, p.args(p.waitMS, "", "", false)...))
}

// available is what a limit still admits. Where a scope has so much credit that it would
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
