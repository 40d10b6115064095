package orders

import (
	"context"

	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

const (
	ok    = "ok"
	again = "again" // a failure that says: run the transaction again

	level = 60 // units at which the threshold reports
	rearm = 10
)

// need is a part of a world that a call wants to be there.
type need int

const (
	aHold  need = 1 << iota // a live hold of 20 units
	aDue                    // a hold of 30 units whose time is over
	aToken                  // with one use
	aWallet
	aLease // of 20 units, 5 of them spent
	aChild // carved with 20 units, 5 of them charged
	aJob   // of 20 units, whose hold is placed
	parked // a job that fits when units are freed
	rested // a job whose next attempt may start, and needs as many units
	aged   // 40 charges that have left every window
	jumped // the last entry is ahead of the clock

	nobody need = -1 // of an empty database
)

// pieces are the library's parts, as a program would have them.
type pieces struct {
	ledger *budget.Ledger
	book   *holds.Book
	wallet *wallet.Book
	carver *leases.Carver
	tokens *tokens.Store
	jobs   *jobs.Enqueuer
}

// makePieces makes them on a database, which gets River's tables.
func makePieces(ctx context.Context, db *pgxpool.Pool) (p pieces, err error) {
	wait := 30 * time.Minute // gates wait as well
	p.ledger, err = budget.New(budget.Config{LockTimeout: wait, OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		_, err := tx.Exec(ctx, "insert into reports values ($1)", c.Scope)
		return err
	}})
	if err == nil {
		p.book, err = holds.New(p.ledger, holds.Config{})
	}
	if err == nil {
		p.wallet, err = wallet.New(p.ledger, wallet.Config{})
	}
	if err == nil {
		p.carver, err = leases.NewCarver(p.ledger)
	}
	if err == nil {
		p.tokens, err = tokens.New(tokens.Config{LockTimeout: wait})
	}
	var migrator *rivermigrate.Migrator[pgx.Tx]
	if err == nil {
		migrator, err = rivermigrate.New(riverpgxv5.New(db), nil)
	}
	if err == nil {
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	}
	var client *river.Client[pgx.Tx]
	if err == nil {
		client, err = river.NewClient(riverpgxv5.New(db), &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	}
	if err == nil {
		p.jobs, err = jobs.New(client, jobs.Config{Holds: p.book, LockTimeout: wait})
	}
	return p, err
}

// work is a job.
type work struct{}

func (work) Kind() string { return "work" }

// world is the data of one order: names of its own, and their state at the beginning.
type world struct {
	pieces
	name  string
	first int64 // seq of the charge that can be refunded
	token string
	due   time.Time // the deadline of the hold that is due
	lease struct{ no, fence int64 }
	job   string // the id of its hold
	model *model

	sessions map[*metered.Client]*metered.Session[int]
}

// clone is the world with a model and sessions of its own.
func (w *world) clone() *world {
	c := *w
	c.model, c.sessions = w.model.clone(), map[*metered.Client]*metered.Session[int]{}
	return &c
}

func (w *world) scope(name string) string { return w.name + "/" + name }

var hour = budget.PerWindow(limit, time.Hour)

func (w *world) charge(scope string, amount int64) budget.Charge {
	return budget.Charge{Scope: w.scope(scope), Amount: amount, Limits: []budget.Limit{hour}}
}

// openLease and the like are the statements of package leases, for which a Pool would choose the moment.
const (
	openLease = `select o.no, o.fence from metered.open_lease(
		row($1::text, null, 20, 0, array[row(100, '1 hour', null, null, null, null)::metered.charge_limit], null, null, null, null)::metered.new_charge,
		row('rows', 'me', 20, 1, '1 hour', null)::metered.lease_terms, '1 min', 1800000) o`
	spendLease = `select refused is null from metered.charge_leased(
		array[row($1::text, $2::bigint, 5, 0, '{}', null, null, $3::bigint, $4::bigint)::metered.new_charge], '1 min', 1800000, null, 'answer', true)`
	settleLease = `select status from metered.settle_lease($1, 'me', null, 1800000, null, null)`
)

// build makes a world with the data that the calls need. advance moves the clock.
func (p pieces) build(ctx context.Context, db *pgxpool.Pool, name string, needs need, advance func(time.Duration)) (*world, error) {
	w := &world{pieces: p, name: name, sessions: map[*metered.Client]*metered.Session[int]{}, model: &model{
		scopes: map[string]*sums{"s": {}, "t": {}, "w": {}, "child": {}}, holds: map[string]string{}, held: map[string]int64{}, done: map[string]bool{}}}
	m := w.model
	before := func(tx pgx.Tx) error {
		var b steps
		if needs&aged != 0 {
			b.do(func() error {
				charges := make([]budget.Charge, 40)
				for i := range charges {
					charges[i] = budget.Charge{Scope: w.scope("s"), Amount: 1}
				}
				_, err := w.ledger.ChargeEach(ctx, tx, charges...)
				m.scopes["s"].spent, m.aged = 40, 40
				return err
			})
		}
		if needs&aDue != 0 {
			b.do(func() error {
				m.holds["due"] = "x"
				return w.place(ctx, tx, "due", 30, time.Minute)
			})
		}
		if needs&aWallet != 0 {
			b.do(func() error {
				_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: w.scope("w"), Amount: 20, For: time.Minute, Reference: "ended"})
				return err
			})
		}
		return b.err
	}
	if needs&(aged|aDue|aWallet) != 0 {
		if err := pgx.BeginFunc(ctx, db, before); err != nil {
			return nil, err
		}
		advance(2 * time.Hour)
	}
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		var b steps
		b.do(func() error {
			r, err := w.ledger.Charge(ctx, tx, budget.Charge{Scope: w.scope("s"), Amount: 40})
			if err == nil {
				w.first = r.Entries[0].Seq
				m.scopes["s"].spent += 40
				m.left = 40
			}
			return err
		})
		if needs&aHold != 0 {
			b.do(func() error { m.hold("capture", 20); return w.place(ctx, tx, "capture", 20, time.Hour) })
		}
		if needs&aToken != 0 {
			b.do(func() error { m.uses, m.minted = 1, true; return w.mint(ctx, tx) })
		}
		if needs&aWallet != 0 {
			b.do(func() error {
				m.lots = []lot{{"a", 1, 60, ""}, {"u", 4, 30, "images"}}
				_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: w.scope("w"), Amount: 60, For: time.Hour, Reference: "a"})
				return err
			})
			b.do(func() error {
				_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: w.scope("w"), Amount: 30, For: 4 * time.Hour, Reference: "u", Uses: []string{"images"}})
				return err
			})
		}
		if needs&aLease != 0 {
			b.do(func() error {
				m.lease, m.leased = "open", 5
				m.scopes["s"].held += 20
				return tx.QueryRow(ctx, openLease, w.scope("s")).Scan(&w.lease.no, &w.lease.fence)
			})
			b.do(func() error {
				_, err := tx.Exec(ctx, spendLease, w.scope("s"), w.lease.fence, w.lease.no, 0)
				return err
			})
		}
		if needs&aChild != 0 {
			b.do(func() error {
				m.child = "open"
				m.scopes["s"].held += 20
				m.scopes["child"].credited, m.scopes["child"].spent = 20, 5
				_, err := w.carver.Carve(ctx, tx, w.carving())
				return err
			})
			b.do(func() error {
				_, err := w.ledger.Charge(ctx, tx, budget.Charge{Scope: w.scope("child"), Amount: 5, Limits: []budget.Limit{budget.Prepaid(0)}})
				return err
			})
		}
		if needs&aJob != 0 {
			b.do(func() error {
				m.job, m.started = "h", 1
				m.scopes["s"].held += 20
				var err error
				w.job, err = w.failed(ctx, tx, 20, "2100-01-01")
				return err
			})
		}
		if needs&rested != 0 {
			b.do(func() error {
				m.resting = 1
				hold, err := w.failed(ctx, tx, limit-m.use("s"), "2000-01-01")
				m.wants = limit - m.use("s")
				return errors.Join(err, w.rest(ctx, tx, hold))
			})
		} else {
			m.wants = limit - m.use("s") + 5
		}
		if needs&parked != 0 {
			b.do(func() error { m.park(); _, err := w.enqueue(ctx, tx, m.wants); return err })
		}
		return b.err
	})
	return w, err
}

// failed enqueues a job whose first attempt has failed, and returns its hold. Its next attempt is at a time of River's clock.
func (w *world) failed(ctx context.Context, tx pgx.Tx, amount int64, at string) (hold string, err error) {
	r, err := w.enqueue(ctx, tx, amount)
	if err != nil {
		return "", err
	}
	_, err = tx.Exec(ctx, "update river_job set state = 'retryable', attempt = 1, scheduled_at = $2::text::timestamptz where id = $1", r.JobID, at)
	return jobs.HoldOf(r.Job), err
}

// rest gives the units of a job back that failed.
func (w *world) rest(ctx context.Context, tx pgx.Tx, hold string) error {
	return jobs.Internals(lend.Key{}).Rest(ctx, w.jobs, tx, w.name, []string{hold})
}

// enqueue enqueues a job that holds units until it ends, or until it fails.
func (w *world) enqueue(ctx context.Context, tx pgx.Tx, amount int64) (jobs.Result, error) {
	return w.jobs.Enqueue(ctx, tx, work{}, &jobs.Options{Tenant: w.name, GiveBack: true, Hold: w.holding("s", amount)})
}

func (w *world) holding(scope string, amount int64) *holds.Request {
	return &holds.Request{Lines: []holds.Line{{Scope: w.scope(scope), Amount: amount, Limits: []budget.Limit{hour}}}}
}

// steps runs functions until one fails.
type steps struct{ err error }

func (s *steps) do(f func() error) {
	if s.err == nil {
		s.err = f()
	}
}

func (w *world) place(ctx context.Context, tx pgx.Tx, id string, amount int64, ttl time.Duration) error {
	h, err := w.book.Place(ctx, tx, holds.Request{Tenant: w.name, ID: id, TTL: ttl,
		Lines: []holds.Line{{Scope: w.scope("s"), Amount: amount, Limits: []budget.Limit{hour}}}})
	if id == "due" {
		w.due = h.Deadline
	}
	return err
}

func (w *world) mint(ctx context.Context, tx pgx.Tx) error {
	secret, err := tokens.Derive([]byte("a key of thirty-two bytes and so"), w.name)
	if err != nil {
		return err
	}
	minted, err := w.tokens.Mint(ctx, tx, tokens.Mint{Purpose: "order", Subject: w.name, Secret: secret})
	if err == nil {
		w.token = minted.Token.Reveal()
	}
	return err
}

func (w *world) reservation(id string, amount int64) metered.Reservation {
	return metered.Reservation{ID: id, Tenant: w.name, TTL: time.Hour, Lines: []holds.Line{{Scope: w.scope("s"), Amount: amount, Limits: []budget.Limit{hour}}}}
}

// open opens a session of a client.
func (w *world) open(ctx context.Context, c *metered.Client, id string) (err error) {
	w.sessions[c], err = metered.Open[int](ctx, c, w.reservation(id, 10))
	if err == nil {
		w.model.scopes["s"].held += 10
	}
	return err
}

func (w *world) carving() leases.Carving {
	return leases.Carving{Child: w.scope("child"), From: w.charge("s", 20), TTL: time.Hour}
}

// answer is the word of a call's error, as the documentation has it.
func answer(err error) string {
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return ok
	case errors.As(err, &pg) && pg.Code == "MT003": // of a statement that no package sends for the test
		return "budget_clock"
	case metered.Retryable(err):
		if errors.As(err, &pg) && pg.Code == "40P01" {
			return "deadlock"
		}
		return again
	case metered.Code(err) != "":
		return metered.Code(err)
	}
	return err.Error()
}

// stateSQL reads the state of a world, and looks whether each entry follows from the one before.
const stateSQL = `
with chain as (
    select scope, seq, kind, amount, at, spent, refunded, credited, held, epoch,
        lag(seq) over p as seq0, lag(spent) over p as spent0, lag(refunded) over p as refunded0, lag(held) over p as held0, lag(at) over p as at0, lag(epoch) over p as epoch0
    from metered.ledger where scope = any (array[$1 || '/s', $1 || '/t', $1 || '/w', $1 || '/child'])
    window p as (partition by scope order by seq)),
tips as (select distinct on (scope) * from chain order by scope, seq desc),
sums as (
    select n.name, coalesce(t.spent, 0) spent, coalesce(t.refunded, 0) refunded, coalesce(t.credited, 0) credited,
        coalesce(t.held, 0) - coalesce((select sum(l.open) from metered.hold_lines l where l.scope = t.scope and l.due <= metered.clock()), 0) held
    from (values ('s'), ('t'), ('w'), ('child')) n(name) left join tips t on t.scope = $1 || '/' || n.name)
select
    (select string_agg(case name when 'w' then format('w spent=%s; ', spent)
        else format('%s spent=%s refunded=%s credited=%s held=%s; ', name, spent, refunded, credited, held) end, '' order by array_position('{s,t,w,child}', name)) from sums)
    || (select string_agg(format('%s=%s ', i.id, case when h.state = 'h' and h.due <= metered.clock() then 'x' else h.state::text end), '' order by i.n)
        from (values (1, 'capture'), (2, 'due'), (3, 'place')) i(n, id) left join metered.holds h on h.tenant = $1 and h.id = i.id)
    || format('jobs=%s,%s uses=%s revoked=%s lots=%s,%s,%s done=%s lease=%s reports=%s',
        (select count(*) from metered.holds h where h.tenant = $1 and h.id like 'job/%' and h.state = 'h'),
        (select count(distinct j.job_id) from metered.parked_jobs j where j.tenant = $1),
        (select coalesce(sum(t.uses - t.used) filter (where t.ended_at is null), 0) from metered.tokens t where t.subject = $1),
        (select count(*) from metered.tokens t where t.subject = $1 and t.revoked),
        (select coalesce(sum(l.rest), 0) from metered.lots l left join metered.lots f on f.no = l.from_lot where l.scope = $1 || '/w' and coalesce(f.reference, l.reference) = 'a' and l.expires_at > metered.clock()),
        (select coalesce(sum(l.rest), 0) from metered.lots l where l.scope = $1 || '/w' and l.reference = 'c' and l.expires_at > metered.clock()),
        (select coalesce(sum(l.kept), 0) from metered.lots l where l.scope = $1 || '/w' and l.reference = 'u' and l.expires_at > metered.clock()),
        (select count(*) from metered.operations o where o.tenant = $1) + (select count(*) from metered.job_keys k where k.tenant = $1),
        (select coalesce(max(case when l.settled_at is null then 'open' else 'settled' end), '') || '/' ||
            coalesce(sum((select coalesce(sum(x.amount), 0) from metered.lease_spends x where x.lease = l.no)), 0) from metered.leases l where l.scope = $1 || '/s' and l.owner = 'me'),
        (select count(*) from reports r where r.scope = any (array[$1 || '/s', $1 || '/t', $1 || '/w', $1 || '/child']))),
    (select count(*) from chain where seq0 > 1 and (seq <> seq0 + 1 or epoch < epoch0 or epoch = epoch0 and at < at0
        or spent <> spent0 + case when kind in ('c', 'u') then amount else 0 end
        or refunded <> refunded0 + case when kind = 'r' then amount else 0 end
        or held < 0)),
    (select count(*) from metered.parked_jobs j where j.scope = $1 || '/s')`

// stuckSQL counts jobs that fit, in a line that nobody is to look at.
const stuckSQL = `
select count(*) from metered.parked_scopes p, metered.parked_jobs j, metered.check_charge(j.charges::metered.new_charge[], '1 minute') c
where p.scope = $1 and j.scope = $1 and p.wake_at > metered.clock() and c.refused is null`

func (w *world) state(ctx context.Context, db *pgxpool.Pool) (text string, err error) {
	var broken, parked, stuck int64
	if err := db.QueryRow(ctx, stateSQL, w.name).Scan(&text, &broken, &parked); err != nil {
		return "", err
	}
	if broken > 0 {
		text += fmt.Sprintf(" and %d entries do not follow from the ones before", broken)
	}
	if parked == 0 {
		return text, nil
	}
	if err := db.QueryRow(ctx, stuckSQL, w.scope("s")).Scan(&stuck); err != nil && answer(err) != "budget_clock" {
		return "", err
	}
	if stuck > 0 {
		text += fmt.Sprintf(" and %d jobs fit that nobody will look at", stuck)
	}
	return text, nil
}
