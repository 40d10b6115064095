package leases

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sweep"
)

// Errors of carving. They leave the transaction usable.
var (
	// ErrCarved says that the child was carved before, from another scope or with another amount.
	ErrCarved error = fault.New("carve_conflict", "leases: the child was carved before, from another scope or with another amount")

	// ErrChildUsed says that the child has entries already.
	ErrChildUsed error = fault.New("carve_child_used", "leases: the child has entries already")

	// ErrUnknownChild says that there is no such child.
	ErrUnknownChild error = fault.New("carve_unknown", "leases: no such child")
)

// maxTTL bounds Carving.TTL.
const maxTTL = 3660 * 24 * time.Hour

// Carver gives part of a scope to a child scope for a time.
//
// While the child is open, all its units count as held at the parent. End captures its charges,
// less refunds, there, and frees the rest. Charge the child with budget.Prepaid: otherwise it can
// spend more, and the parent is charged for that. A child can be the parent of others, which end no
// later and are settled before it.
//
// Above READ COMMITTED calls can fail with SQLSTATE 40001. Package carvejobs carves for a child on
// another Postgres cluster.
type Carver struct {
	ledger *budget.Ledger
	wait   int32
	sql    carveStatements
	owner  string
}

// NewCarver makes a Carver that carves the scopes of the Ledger's schema. It sends no SQL.
func NewCarver(l *budget.Ledger) (*Carver, error) {
	if err := notNil("ledger", l); err != nil {
		return nil, err
	}
	name, wait, _ := inBudget.Settings(l)
	if err := fault.Made(errArgument, "ledger", name != schema.Name{}); err != nil {
		return nil, err
	}
	return &Carver{ledger: l, wait: int32(wait / time.Millisecond), sql: renderCarve(name), owner: owner()}, nil
}

// Carving is a child to make.
type Carving struct {
	// Child is the scope that gets the units. It must have no entries, and is used for this
	// carving alone. Required.
	Child string

	// From names the parent scope, the units, and the limits that must let them in. It can have no
	// MaxFrom. Required.
	From budget.Charge

	// TTL is how long the child lives, from 1ms to 3,660 days. Until then it can be charged, and
	// after it Sweep ends it. Required.
	TTL time.Duration

	// Away says that the child is on another cluster. Then only SettleAway and WriteOff end it on
	// this one.
	Away bool
}

// Carve gives the child its units, all or none. tx may be a *metered.Tx. A second call with the
// same child, parent and amount returns the lease as it is.
//
// It locks the scopes of parent and child until tx ends. A later charge of another scope can
// deadlock (40P01, which metered.Do retries). Errors: ErrCarved, ErrChildUsed, and those of
// budget.Ledger.Charge at the parent.
func (c *Carver) Carve(ctx context.Context, tx pgx.Tx, g Carving) (Lease, error) {
	if err := cmp.Or(c.made(), notNil("tx", tx), checkChild("Carving.Child", g.Child)); err != nil {
		return Lease{}, err
	}
	switch {
	case g.TTL < time.Millisecond || g.TTL > maxTTL:
		return Lease{}, invalid("Carving.TTL", "%v is not from 1ms to %v", g.TTL, maxTTL)
	case g.Child == g.From.Scope && !g.Away:
		return Lease{}, invalid("Carving.Child", "is the parent itself")
	case g.From.Note.Use != "":
		return Lease{}, invalid("Carving.From.Note.Use",
			"is for draws, charges and holds: a child has units for anything")
	}
	call, err := inBudget.Charges(c.ledger, g.From)
	if err != nil {
		return Lease{}, err
	}
	if len(call.Queries) > 0 {
		return Lease{}, invalid("Carving.From.Limits",
			"cannot have a MaxFrom: read it under budget.Ledger.Lock")
	}
	terms := ledger.LeaseTerms{Mode: "carved", Owner: c.by(g.From.Note), Least: 1, Share: 1,
		TTL: g.TTL, Child: g.Child}
	if g.Away {
		terms.Mode = "away"
	}
	return ledger.SilentlyIn(ctx, tx, "leases", func(tx pgx.Tx, telling bool) (Lease, error) {
		var refused, crossed []byte
		charges := ledger.Charges(ledger.Telling(call.Charges, telling))
		l, status, err := c.scan(answer.QueryRow(ctx, tx, c.sql.carve, charges, terms.String(),
			call.Tolerance, c.wait), &refused, &crossed)
		switch {
		case err != nil:
			return Lease{}, call.Failed(err)
		case status == "refused":
			return Lease{}, call.Refused(refused)
		case status == "conflict":
			return Lease{}, of(ErrCarved, g.Child)
		case status == "used":
			return Lease{}, of(ErrChildUsed, g.Child)
		}
		return l, call.Cross(ctx, tx, crossed)
	})
}

// End ends a child: from tx's commit on it refuses every charge, hold, credit and refund
// (budget.ErrScopeClosed). Its Usage still shows the freed units.
//
// Units that it still holds can yet be captured: the Lease then has no SettledAt, and the parent
// keeps all until End or Sweep finds none held. A second call for a settled child does nothing.
// Where more than 25 holds of a child that is closed are due, it is budget.ErrBusy: Client.RunTx
// and Sweep end them in steps first.
// Locks: the scopes of parent and child.
func (c *Carver) End(ctx context.Context, tx pgx.Tx, child string, note budget.Note) (Lease, error) {
	if err := cmp.Or(c.checkNote(note), notNil("tx", tx), checkChild("child", child)); err != nil {
		return Lease{}, err
	}
	l, _, err := c.close(ctx, tx, child, c.by(note))
	return l, err
}

func (c *Carver) close(ctx context.Context, tx pgx.Tx, child, by string) (l Lease, status string, err error) {
	l, status, err = c.scan(answer.QueryRow(ctx, tx, c.sql.close, child, by, c.wait))
	if err == nil && status == "unknown" {
		return l, status, of(ErrUnknownChild, child)
	}
	return l, status, failed("close a child", err)
}

// of names the child that an error is about.
func of(err error, child string) error { return fmt.Errorf("%w: %q", err, child) }

// Receive credits a child on this cluster with the units that another cluster carved for it in the
// lease from: Child, Granted and EndsAt count. With Granted 0, or after EndsAt by this cluster's
// clock, the child never gets any: the Lease has SettledAt and 0 Spent. A second call returns the
// lease. After End, Lease.Spent is the units for SettleAway. Errors: ErrChildUsed.
func (c *Carver) Receive(ctx context.Context, tx pgx.Tx, from Lease, note budget.Note) (Lease, error) {
	if err := cmp.Or(c.checkNote(note), notNil("tx", tx), checkChild("from.Child", from.Child)); err != nil {
		return Lease{}, err
	}
	if from.Granted < 0 || from.Granted > bounds.MaxAmount {
		return Lease{}, invalid("from.Granted", "%d is not from 0 to %d", from.Granted, int64(bounds.MaxAmount))
	}
	l, status, err := c.scan(answer.QueryRow(ctx, tx, c.sql.receive, from.Child, from.Granted,
		from.EndsAt, c.by(note), inBudget.NoteJSON(note), c.wait))
	if err == nil && status == "used" {
		return Lease{}, of(ErrChildUsed, from.Child)
	}
	return l, failed("receive units", err)
}

// SettleAway settles the parent's side of a Carving that is Away, with used units spent. A second
// call returns the settled lease. Then call it on the child's cluster, where a purge keeps the
// child's row until then.
func (c *Carver) SettleAway(ctx context.Context, tx pgx.Tx, child string, used int64,
	note budget.Note) (Lease, error) {
	if used < 0 {
		return Lease{}, invalid("used", "%d is negative", used)
	}
	return c.settleAway(ctx, tx, child, &used, note)
}

// WriteOff settles the parent's side of a Carving that is Away as spent in full: the child's
// cluster is lost for good.
func (c *Carver) WriteOff(ctx context.Context, tx pgx.Tx, child string, note budget.Note) (Lease, error) {
	return c.settleAway(ctx, tx, child, nil, note)
}

func (c *Carver) settleAway(ctx context.Context, tx pgx.Tx, child string, used *int64,
	note budget.Note) (Lease, error) {
	if err := cmp.Or(c.checkNote(note), notNil("tx", tx), checkChild("child", child)); err != nil {
		return Lease{}, err
	}
	l, status, err := c.scan(answer.QueryRow(ctx, tx, c.sql.settle, child, used, c.by(note), c.wait))
	if err == nil && status == "unknown" {
		return Lease{}, of(ErrUnknownChild, child)
	}
	return l, failed("settle a child", err)
}

// Get returns a child's lease, or ErrUnknownChild.
func (c *Carver) Get(ctx context.Context, db budget.Querier, child string) (Lease, error) {
	if err := cmp.Or(c.made(), notNil("db", db), checkChild("child", child)); err != nil {
		return Lease{}, err
	}
	l, _, err := c.scan(answer.QueryRow(ctx, db, c.sql.get, pgx.QueryExecModeExec, child))
	if errors.Is(err, pgx.ErrNoRows) {
		return Lease{}, of(ErrUnknownChild, child)
	}
	return l, failed("get a child", err)
}

// sweep takes the newest first: a child of a child is newer.
func (c *Carver) sweep(ctx context.Context, db *pgxpool.Pool, report *SweepReport) error {
	const page = 100
	for before, n := int64(1<<63-1), page; n == page; {
		rows, err := answer.Query(ctx, db, c.sql.due, pgx.QueryExecModeExec, before, page)
		if err != nil {
			return failed("list children", err)
		}
		var children []string
		var no int64
		var child string
		if _, err = pgx.ForEachRow(rows, []any{&no, &child},
			func() error {
				before, children = no,
					append(children, child)
				return nil
			}); err != nil {
			return failed("list children", err)
		}
		for _, child := range children {
			var status string
			name, wait, _ := inBudget.Settings(c.ledger)
			err := sweep.Through(ctx, db, name, wait, func() error {
				return retried(ctx, inBudget.Observer(c.ledger), db, func(tx pgx.Tx) (err error) {
					_, status, err = c.close(ctx, tx, child, c.owner)
					return err
				})
			})
			switch {
			case errors.Is(err, fault.ErrBusy):
				report.Busy++
			case errors.Is(err, ErrUnknownChild): // purged since
			case err != nil:
				return err
			case status == "settled":
				report.Settled++
			case status == "open":
				report.Held++
			}
		}
		n = len(children)
	}
	return nil
}

func (c *Carver) made() error { return fault.Made(errArgument, "carver", c != nil && c.ledger != nil) }

// by is the actor in the history of the lease.
func (c *Carver) by(note budget.Note) string { return cmp.Or(note.Actor, c.owner) }

func checkChild(field, child string) error {
	if child == "" {
		return invalid(field, "is empty")
	}
	return fault.Text(errArgument, field, child, bounds.MaxScopeBytes)
}

// checkNote checks a note as the ledger does, and the Carver.
func (c *Carver) checkNote(note budget.Note) error {
	if err := c.made(); err != nil {
		return err
	}
	_, err := inBudget.Credit(c.ledger, budget.Credit{Scope: "-", Amount: 1, Note: note})
	return err
}

// carveStatements are the SQL of a Carver, rendered for one schema.
type carveStatements struct{ carve, close, receive, settle, due, get string }

const (
	returnedSQL   = `select status, pg_catalog.to_jsonb(lease)`
	carveSQL      = returnedSQL + `, refused, crossed from metered.carve(($1::metered.new_charge[])[1], $2::metered.lease_terms, $3::interval, $4::int)`
	closeSQL      = returnedSQL + ` from metered.end_child($1::text, $2::text, $3::int)`
	receiveSQL    = returnedSQL + ` from metered.receive_child($1::text, $2::bigint, $3::timestamptz, $4::text, $5::text, $6::int)`
	settleAwaySQL = returnedSQL + ` from metered.settle_away($1::text, $2::bigint, $3::text, $4::int)`
	dueChildSQL   = `
select no, child from metered.leases
where settled_at is null and mode = 'c' and ends_at <= metered.clock() and no < $1 order by no desc limit $2`
	getChildSQL = `
select '', pg_catalog.to_jsonb(l) from metered.leases l where l.child = $1 order by l.mode = 'r' desc limit 1`
)

func renderCarve(n schema.Name) carveStatements {
	return carveStatements{
		carve: n.SQL(carveSQL), close: n.SQL(closeSQL), receive: n.SQL(receiveSQL),
		settle: n.SQL(settleAwaySQL),
		due:    n.SQL(dueChildSQL), get: n.SQL(getChildSQL),
	}
}

// scan reads a lease that a call returned, and the columns after it.
func (c *Carver) scan(row pgx.Row, more ...any) (l Lease, status string, err error) {
	var raw []byte
	if err = row.Scan(append([]any{&status, &raw}, more...)...); err == nil && raw != nil {
		err = json.Unmarshal(raw, &l) // its fields have the names of the columns
	}
	l.Mode = map[string]string{"s": "rows", "m": "memory", "c": "carved", "r": "away", "g": "received"}[l.Mode]
	for _, at := range []*time.Time{&l.OpenedAt, &l.EndsAt, &l.SettledAt} {
		*at = at.UTC()
	}
	return l, status, err
}

// retried runs f in a transaction at READ COMMITTED, again where it met others.
func retried(ctx context.Context, to *observed.To, db *pgxpool.Pool, f func(pgx.Tx) error) error {
	return pause.Collided(ctx, to, "leases", maxTries, func() error {
		return commit.InTx(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, f)
	})
}
