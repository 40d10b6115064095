package orders

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/pgtest"
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
	aLease   // of 20 units, 5 of them spent
	aChild   // carved with 20 units, 5 of them charged
	aJob     // of 20 units, whose hold is placed
	parked   // a job that fits when units are freed
	rested   // a job whose next attempt may start, and needs as many units
	aFailed  // of 20 units, whose hold is placed and whose next attempt may start
	full     // a hold of 60 units of "t"
	two      // a job that waits for "t", its own, and needs units of "s", too
	either   // a job that waits for "s" or "t"
	aScope   // "t" was created
	aSale    // a hold of 20 units that was captured
	aged     // 40 charges that have left every window
	jumped   // the last entry is ahead of the clock
	fed      // somebody has consumed the first entry of the feed
	aBacklog // a wallet in which all kinds of events are due
	aPile    // due holds of "p" that capture a unit each, more than one call writes

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
	since time.Time // when the wallet "d" was granted its lots
	drawn int64     // seq of the draw of them
	lease struct{ no, fence int64 }
	job   string // the id of its hold
	fails string // the same of the job that failed
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

// openLease and the like are the statements of package leases, for which a Pool would choose the
// moment.
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
				_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: w.scope("w"), Amount: 20, Ends: wallet.After(time.Minute), Reference: "ended"})
				return err
			})
		}
		if needs&aBacklog != 0 {
			b.do(func() error { return w.makeDue(ctx, tx, pgtest.Tomorrow(12)) })
		}
		if needs&aPile != 0 {
			m.scopes["p"] = &sums{spent: pile}
			for n := range pile {
				b.do(func() error {
					_, err := w.book.Place(ctx, tx, holds.Placement{Tenant: w.name, ID: fmt.Sprint("of p ", n), TTL: time.Minute,
						Lines: []holds.Line{{Scope: w.scope("p"), Amount: 2, AtLeast: 1}}})
					return err
				})
			}
		}
		return b.err
	}
	if needs&(aged|aDue|aWallet|aBacklog|aPile) != 0 {
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
		if needs&aScope != 0 {
			b.do(func() error { _, err := w.ledger.Create(ctx, tx, w.scope("t")); return err })
		}
		if needs&aSale != 0 {
			b.do(func() error { m.scopes["s"].spent += 20; return w.place(ctx, tx, "sold", 20, time.Hour) })
			b.do(func() error {
				_, err := w.book.Capture(ctx, tx, holds.Capture{Tenant: w.name, IDs: []string{"sold"}, All: true})
				return err
			})
		}
		if needs&aToken != 0 {
			b.do(func() error { m.uses, m.minted = 1, true; return w.mint(ctx, tx) })
		}
		if needs&aWallet != 0 {
			b.do(func() error {
				m.lots = []lot{{"a", 1, 60, ""}, {"u", 4, 30, "images"}}
				_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: w.scope("w"), Amount: 60, Ends: wallet.After(time.Hour), Reference: "a"})
				return err
			})
			b.do(func() error {
				_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: w.scope("w"), Amount: 30, Ends: wallet.After(4 * time.Hour), Reference: "u", Uses: []string{"images"}})
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
				m.job = "h"
				m.started++
				m.scopes["s"].held += 20
				var err error
				w.job, err = w.failed(ctx, tx, 20, "2100-01-01")
				return err
			})
		}
		if needs&aFailed != 0 {
			b.do(func() error {
				m.failed = "h"
				m.started++
				m.scopes["s"].held += 20
				var err error
				w.fails, err = w.failed(ctx, tx, 20, "2000-01-01")
				return err
			})
		}
		if needs&full != 0 {
			b.do(func() error {
				m.full = true
				m.scopes["t"].held += 60
				r := holds.Placement{Tenant: w.name, ID: "full", TTL: time.Hour, Lines: w.holding("t", 60).Lines}
				_, err := w.book.Place(ctx, tx, r)
				return err
			})
		}
		if needs&rested != 0 {
			b.do(func() error {
				m.wants = limit - m.use("s")
				m.rests(m.wants)
				hold, err := w.failed(ctx, tx, m.wants, "2000-01-01")
				return errors.Join(err, w.rest(ctx, tx, hold))
			})
		} else {
			m.wants = limit - m.use("s") + 5
		}
		if needs&two != 0 {
			b.do(func() error { m.park("own", inTwo); return w.enqueueTwo(ctx, tx) })
		}
		if needs&either != 0 {
			b.do(func() error { m.park(tenantsOwn, m.wanted(), inEither); return w.enqueueEither(ctx, tx) })
		}
		if needs&parked != 0 {
			b.do(func() error { m.park(tenantsOwn, m.wanted()); _, err := w.enqueue(ctx, tx, m.wants); return err })
		}
		return b.err
	})
	if err == nil && needs&fed != 0 {
		err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			var b steps
			another := func() error {
				_, err := w.ledger.Charge(ctx, tx, budget.Charge{Scope: w.scope("another"), Amount: 1})
				return err
			}
			b.do(another)
			b.do(another)
			b.do(func() error { return w.number(ctx, tx) })
			b.do(func() error { return w.consume(ctx, tx, 1) })
			b.do(another)
			return b.err
		})
	}
	return w, err
}

func (w *world) number(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "select metered.number_feed(10)")
	return err
}

// consume consumes entries of the feed: an entry that comes again fails.
func (w *world) consume(ctx context.Context, tx pgx.Tx, most int) error {
	entries, err := w.ledger.ConsumeFeed(ctx, tx, w.name, budget.FeedOptions{Max: most})
	for _, e := range entries {
		if err == nil {
			_, err = tx.Exec(ctx, "insert into fed values ($1, $2)", e.Scope, e.Seq)
		}
	}
	return err
}

// failed enqueues a job whose first attempt has failed, and returns its hold. Its next attempt is
// at a time of River's clock.
func (w *world) failed(ctx context.Context, tx pgx.Tx, amount int64, at string) (hold string, err error) {
	r, err := w.enqueue(ctx, tx, amount)
	if err != nil {
		return "", err
	}
	_, err = tx.Exec(ctx, "update river_job set state = 'retryable', attempt = 1, scheduled_at = $2::text::timestamptz where id = $1", r.JobID, at)
	return jobs.Of(r.Job).Hold, err
}

// rest gives the units of a job back that failed.
func (w *world) rest(ctx context.Context, tx pgx.Tx, hold string) error {
	return restHolds(ctx, w.jobs, tx, w.name, []string{hold})
}

// enqueue enqueues a job that holds units until it ends, or until it fails.
func (w *world) enqueue(ctx context.Context, tx pgx.Tx, amount int64) (jobs.Result, error) {
	return w.jobs.Enqueue(ctx, tx, work{}, &jobs.Options{Tenant: w.name, GiveBack: true, Hold: w.holding("s", amount)})
}

// inTwo is what a job needs of a cap of its own and of a pool, and inEither the second choice of
// another.
var inTwo, inEither = []part{{"t", 60}, {"s", 20}}, []part{{"t", 50}}

// wanted is what each job needs that is parked.
func (m *model) wanted() []part { return []part{{"s", m.wants}} }

func (w *world) enqueueTwo(ctx context.Context, tx pgx.Tx) error {
	hold := &jobs.Units{}
	for _, p := range inTwo {
		hold.Lines = append(hold.Lines, w.holding(p.scope, p.amount).Lines...)
	}
	_, err := w.jobs.Enqueue(ctx, tx, work{}, &jobs.Options{Tenant: w.name, FairKey: "own", Hold: hold})
	return err
}

func (w *world) enqueueEither(ctx context.Context, tx pgx.Tx) error {
	_, err := w.jobs.Enqueue(ctx, tx, work{}, &jobs.Options{
		Tenant: w.name, Hold: w.holding("s", w.model.wants), Burst: w.holding(inEither[0].scope, inEither[0].amount),
	})
	return err
}

func (w *world) holding(scope string, amount int64) *jobs.Units {
	return &jobs.Units{Lines: []holds.Line{{Scope: w.scope(scope), Amount: amount, Limits: []budget.Limit{hour}}}}
}

// steps runs functions until one fails.
type steps struct{ err error }

func (s *steps) do(f func() error) {
	if s.err == nil {
		s.err = f()
	}
}

func (w *world) place(ctx context.Context, tx pgx.Tx, id string, amount int64, ttl time.Duration) error {
	h, err := w.book.Place(ctx, tx, holds.Placement{Tenant: w.name, ID: id, TTL: ttl,
		Lines: []holds.Line{{Scope: w.scope("s"), Amount: amount, Limits: []budget.Limit{hour}}}})
	if id == "due" {
		w.due = h.Deadline
	}
	return err
}

func (w *world) claim(ctx context.Context, tx pgx.Tx, holder string) error {
	_, err := w.book.Claim(ctx, tx, holds.Claim{Tenant: w.name, Key: holds.Key{Type: "seat", Value: "1"}, Holder: holder, TTL: time.Hour})
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

// restHolds is a step that package jobs lends.
var restHolds = lend.Borrow[interface {
	Rest(ctx context.Context, e *jobs.Enqueuer, tx pgx.Tx, tenant string, ids []string) error
}]("jobs").Rest
