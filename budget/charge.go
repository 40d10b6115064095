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

	"github.com/pgmetered/metered/internal/sqlstate"
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

// Limit is so many units per window.
type Limit struct {
	// Max is the number of units, from 0 to MaxLimit.
	Max int64

	// Window is how far back charges count, in whole microseconds up to MaxWindow.
	// A charge counts while it is younger than this. 0 means the scope's lifetime,
	// where credits count too.
	Window time.Duration

	// Name is yours, to tell limits apart in a Refusal. Optional.
	Name string
}

// Charge is an amount to take from a scope, and the limits it must stay within.
type Charge struct {
	// Scope is what is charged, 1 to MaxScopeBytes bytes of UTF-8.
	Scope string
	// Amount is in units of yours, from 1 to MaxAmount. What costs nothing is not
	// charged: leave it out.
	Amount int64
	// Limits are all to be kept. None means that the charge is only recorded.
	Limits []Limit
	// Note is stored with the entry.
	Note Note
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
	// Available is the largest amount that the limit admits now, >= 0.
	Available int64 `json:"available"`
}

const chargeSQL = `
select seqs, ats, used, held, denied
from metered.charge($1::text[], $2::bigint[], $3::bigint[], $4::int[], $5::bigint[], $6::interval[],
    $7::interval, $8::int, $9::text[], null, null, false)`

// Charge charges every scope named, or none: it is denied, with *ExceededError,
// if any limit of any charge refuses, and has then written nothing. Charges of
// one scope in one call are added up, judged as one against all their limits and
// recorded as one entry; their notes must agree. One round trip, however many.
//
// Rolling tx back, or back to an earlier savepoint, takes the charge back. There
// is no idempotency here: a second call charges again (metered.Do remembers).
//
// Locks: an advisory lock on each scope, all taken before anything is read, in
// the order of their keys, held until tx ends. Call it as the last thing in tx.
//
// Errors: *ArgumentError before any SQL; *ExceededError; ErrBusy; ErrClock;
// ErrWindowPurged; ErrOverflow; SQLSTATE 40001 and 40P01, after which the whole
// transaction may be tried again. All but the first two abort tx.
func (l *Ledger) Charge(ctx context.Context, tx pgx.Tx, charges ...Charge) (Receipt, error) {
	call, err := l.Prepare(charges...)
	if err != nil {
		return Receipt{}, err
	}
	return call.Scan(tx.QueryRow(ctx, l.sql.charge, call.Args()...))
}

const checkSQL = `
select used, held, denied
from metered.check_charge($1::text[], $2::bigint[], $3::int[], $4::bigint[], $5::interval[], $6::interval)`

// Check tells what Charge would say now, without writing and without a lock. The
// answer may be out of date when it arrives: only a charge is authoritative. It
// runs on a read-only replica too, and is then as old as the replica.
//
// It returns the entries that would be made (without Seq and At), or the errors
// that Charge would return, except ErrBusy, ErrOverflow and those of a
// transaction's end.
func (l *Ledger) Check(ctx context.Context, db Querier, charges ...Charge) (Receipt, error) {
	call, err := l.Prepare(charges...)
	if err != nil {
		return Receipt{}, err
	}
	var used, held []int64
	var denied []byte
	args := call.Args()
	row := db.QueryRow(ctx, l.sql.check, slices.Concat(args[:1], args[2:7])...)
	if err := row.Scan(&used, &held, &denied); err != nil {
		return Receipt{}, failed("check", err)
	}
	return call.Receipt(nil, nil, used, held, denied)
}

// Prepared is a validated call of Charge, for those who send it themselves: in a
// pgx.Batch together with other statements, or inside another function.
type Prepared struct {
	scopes  []string
	keys    []int64
	amounts []int64
	notes   []string
	limits  [][]Limit

	limitScopes []int32
	maxima      []int64
	windows     []pgtype.Interval
	tolerance   pgtype.Interval
	waitMS      int32
	sql         string
}

// Prepare validates charges as Charge does, without any SQL.
func (l *Ledger) Prepare(charges ...Charge) (*Prepared, error) {
	if len(charges) == 0 {
		return nil, invalid("charges", "are none")
	}
	p := &Prepared{
		// Not nil, which would be sent as NULL: a call may have no limits.
		limitScopes: []int32{}, maxima: []int64{}, windows: []pgtype.Interval{},
		tolerance: interval(l.tolerance), waitMS: l.waitMS(), sql: l.sql.charge,
	}
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
		for _, limit := range limits {
			p.limitScopes = append(p.limitScopes, int32(i+1))
			p.maxima = append(p.maxima, limit.Max)
			p.windows = append(p.windows, interval(limit.Window))
		}
		p.keys = append(p.keys, l.lockKey(p.scopes[i]))
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
		if len(p.scopes) == MaxScopes {
			return invalid("charges", "name more than %d scopes", MaxScopes)
		}
		at[c.Scope] = len(p.scopes)
		p.scopes = append(p.scopes, c.Scope)
		p.amounts = append(p.amounts, c.Amount)
		p.notes = append(p.notes, c.Note.encode())
		p.limits = append(p.limits, slices.Clone(c.Limits))
		return nil
	}
	if p.amounts[j] += c.Amount; p.amounts[j] > MaxAmount {
		return invalid(index("charges", i, ".Amount"), "the charges of scope %q add up to more than %d", c.Scope, int64(MaxAmount))
	}
	if p.notes[j] != c.Note.encode() {
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
		field := index("charges", i, index(".Limits", j, ""))
		if limit.Max < 0 || limit.Max > MaxLimit {
			return invalid(field+".Max", "%d is not from 0 to %d", limit.Max, int64(MaxLimit))
		}
		if err := checkWindow(field+".Window", limit.Window); err != nil {
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

// Args are the first nine arguments of the function charge in schema.sql.
func (p *Prepared) Args() []any {
	return []any{p.scopes, p.keys, p.amounts, p.limitScopes, p.maxima, p.windows, p.tolerance, p.waitMS, p.notes}
}

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
	r := Receipt{Entries: make([]Posted, len(p.scopes))}
	n := 0
	for i, scope := range p.scopes {
		e := Posted{Scope: scope, Amount: p.amounts[i]}
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

// exceeded decodes the denial that the function judge in schema.sql wrote.
func (p *Prepared) exceeded(denied []byte) error {
	var rows []struct {
		Limit   int    `json:"limit"`
		Used    int64  `json:"used"`
		Held    int64  `json:"held"`
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
			Scope: p.scopes[scope], Limit: limit,
			Used: row.Used, Held: row.Held, Requested: p.amounts[scope],
			Available:  available(limit.Max, row.Used, row.Held),
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
	scope = int(p.limitScopes[n]) - 1
	for i := range scope {
		n -= len(p.limits[i])
	}
	return scope, p.limits[scope][n]
}

// available saturates where a scope has credit beyond all bounds.
func available(limit, used, held int64) int64 {
	if used < 0 && limit > math.MaxInt64+used {
		return math.MaxInt64 - held
	}
	return max(0, limit-used-held)
}

func interval(d time.Duration) pgtype.Interval {
	return pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}
}
