package leases

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Pauses of a slot.
const (
	directPause  = 250 * time.Millisecond // after too little was left for a slice
	recallPause  = time.Second            // after units were recalled
	failurePause = 100 * time.Millisecond // after the database could not be asked
	warmAt       = 3                      // so many charges without a slice, in warmFor, make one worth its while
	warmFor      = 250 * time.Millisecond
)

// Pool owns the leases of a process. It is safe for concurrent use. Close gives them back.
type Pool struct {
	db     *pgxpool.Pool
	ledger *budget.Ledger
	carver *Carver
	cfg    Config
	schema schema.Name
	wait   time.Duration
	sql    statements

	rows, memory sync.Map // by scope: *scope

	live context.Context // until Close
	stop context.CancelFunc
	work sync.WaitGroup // what goes on in the background

	mu      sync.Mutex
	closed  bool
	keeping bool     // the maintenance runs
	ended   []ending // slices to be settled

	recalls atomic.Int64 // nanoseconds, when the last recall was asked for
}

// scope are the slots of a scope, one for each set of limits.
type scope struct {
	mu    sync.Mutex
	slots atomic.Pointer[[]*slot]
}

type ending struct {
	slot  *slot
	slice *slice
}

// find returns the slot of a charge, or nil if no rule is for it.
func (p *Pool) find(slots *sync.Map, c *budget.Charge, memory bool) (*slot, error) {
	if found, ok := slots.Load(c.Scope); ok {
		for _, s := range *found.(*scope).slots.Load() {
			if slices.Equal(s.limits, c.Limits) {
				return s, nil
			}
		}
	}
	rule := p.rule(c.Scope)
	if rule == nil {
		return nil, nil
	}
	return p.add(slots, c, rule, memory)
}

func (p *Pool) rule(scope string) *Rule {
	for i := range p.cfg.Rules {
		if strings.HasPrefix(scope, p.cfg.Rules[i].Prefix) {
			return &p.cfg.Rules[i]
		}
	}
	return nil
}

func (p *Pool) add(slots *sync.Map, c *budget.Charge, rule *Rule, memory bool) (*slot, error) {
	call, err := prepare(p.ledger, *c)
	if err != nil {
		return nil, err
	}
	if len(call.Queries) > 0 {
		return nil, nil
	}
	fresh := new(scope)
	fresh.slots.Store(new([]*slot))
	found, _ := slots.LoadOrStore(strings.Clone(c.Scope), fresh)
	in := found.(*scope)
	in.mu.Lock()
	defer in.mu.Unlock()
	all := *in.slots.Load()
	for _, s := range all {
		if slices.Equal(s.limits, c.Limits) {
			return s, nil
		}
	}
	if len(all) >= maxSlots {
		return nil, nil
	}
	s := &slot{scope: strings.Clone(c.Scope), limits: slices.Clone(c.Limits), rule: rule, memory: memory, charge: call.Charges[0]}
	all = append(slices.Clone(all), s)
	in.slots.Store(&all)
	return s, nil
}

// maxSlots bounds the sets of limits that a scope is leased for at a time; others are charged directly.
const maxSlots = 16

// Charge is budget.Ledger.Charge, from leases where there are any: its entries then have Lease, and neither Seq nor
// Standings. What is spent counts for everybody at once, as held. A lease that was settled by somebody else meanwhile
// costs another round trip.
func (p *Pool) Charge(ctx context.Context, tx pgx.Tx, charges ...budget.Charge) (budget.Receipt, error) {
	if err := p.usable(); err != nil {
		return budget.Receipt{}, err
	}
	if err := notNil("tx", tx); err != nil {
		return budget.Receipt{}, err
	}
	for range maxTries {
		call, err := prepare(p.ledger, charges...)
		if err != nil {
			return budget.Receipt{}, err
		}
		if !p.lease(&call.Charging, charges) {
			receipt, err := p.ledger.Charge(ctx, tx, charges...)
			p.learn(err)
			return receipt, err
		}
		receipt, err := call.Call.Scan(tx.QueryRow(ctx, p.sql.charge, ledger.Charges(call.Charges), call.Tolerance, int32(p.wait/time.Millisecond)))
		if !p.dropped(err) {
			p.learn(err)
			return receipt, err
		}
	}
	return p.ledger.Charge(ctx, tx, charges...)
}

// maxTries bounds how many leases a charge finds closed before it goes to the ledger.
const maxTries = 3

// lease takes units for those of the charges that are leased, and reports whether there were any.
func (p *Pool) lease(c *ledger.Charging, charges []budget.Charge) (any bool) {
	if len(c.Queries) > 0 {
		return false
	}
	now := time.Now()
	for i := range c.Charges {
		to := &c.Charges[i]
		to.Lease = nil // of an attempt before
		at := slices.IndexFunc(charges, func(x budget.Charge) bool { return x.Scope == to.Scope })
		if p.rule(to.Scope) == nil || len(to.Limits) != len(charges[at].Limits) {
			continue // merged from several, with other limits
		}
		s, err := p.find(&p.rows, &charges[at], false)
		if err != nil || s == nil || to.MustExist != s.charge.MustExist {
			continue
		}
		from, offset, ok := s.take(p, to.Amount)
		if !ok {
			s.miss(p, now)
			continue
		}
		to.Lease, any = &ledger.Slice{No: from.no, Fence: from.fence, Offset: offset}, true
	}
	c.Locks.Scopes, c.Locks.Keys = nil, nil // of those that are charged directly
	for _, x := range c.Charges {
		if x.Lease == nil {
			c.Locks.Scopes, c.Locks.Keys = append(c.Locks.Scopes, x.Scope), append(c.Locks.Keys, x.Key)
		}
	}
	slices.Sort(c.Locks.Keys)
	c.Locks.Keys = slices.Compact(c.Locks.Keys)
	return any
}

func init() {
	lend.Lease = func(p *Pool, c *ledger.Charging, charges []budget.Charge) {
		if p.usable() == nil {
			c.Closed = p.drop
			p.lease(c, charges)
		}
	}
	lend.LeaseSchema = func(p *Pool) schema.Name { return p.schema }
	lend.LeaseRefused = (*Pool).learn
}

// dropped gives the lease back of which err says that it is closed, and reports whether it says so.
func (p *Pool) dropped(err error) bool {
	var closed *ledger.ClosedError
	if errors.As(err, &closed) {
		p.drop(closed.Lease)
	}
	return closed != nil
}

// drop gives a lease back that was found closed.
func (p *Pool) drop(no int64) { p.each(func(s *slot) { s.drop(p, no) }) }

// learn takes note of a denial: what leases keep from it is recalled.
func (p *Pool) learn(err error) {
	var denied *budget.ExceededError
	if !errors.As(err, &denied) {
		return
	}
	for _, r := range denied.Refusals {
		if r.Leased > 0 {
			p.recall(r.Scope)
		}
	}
}

// Recalled asks all processes, this one included, to give back their slices of a scope.
func (p *Pool) recall(scope string) {
	now := time.Now().UnixNano()
	last := p.recalls.Load()
	if now-last < int64(recallEvery) || !p.recalls.CompareAndSwap(last, now) {
		return
	}
	p.recalled(scope)
	if p.cfg.NoRecall {
		return
	}
	p.work.Go(func() {
		if _, err := p.db.Exec(p.live, `select pg_catalog.pg_notify($1, $2)`, p.channel(), scope); err != nil {
			p.report(failed("recall", err))
		}
	})
}

// recallEvery bounds how often a process asks for recalls.
const recallEvery = 20 * time.Millisecond

// recalled gives back what there is of a scope.
func (p *Pool) recalled(of string) {
	for _, slots := range []*sync.Map{&p.rows, &p.memory} {
		if found, ok := slots.Load(of); ok {
			for _, s := range *found.(*scope).slots.Load() {
				s.giveBack(p, recallPause)
			}
		}
	}
}

// each calls f with every slot.
func (p *Pool) each(f func(*slot)) {
	for _, slots := range []*sync.Map{&p.rows, &p.memory} {
		for _, found := range slots.Range {
			for _, s := range *found.(*scope).slots.Load() {
				f(s)
			}
		}
	}
}

func (p *Pool) usable() error {
	if err := fault.Made(errArgument, "pool", p != nil && p.db != nil); err != nil {
		return err
	}
	if p.isClosed() {
		return ErrClosed
	}
	return nil
}

func (p *Pool) isClosed() bool { return p.live.Err() != nil }

func (p *Pool) report(err error) {
	if p.cfg.OnError != nil && err != nil && !p.isClosed() {
		p.cfg.OnError(err)
	}
}

// statements are the package's SQL, rendered for one schema.
type statements struct{ charge, direct, open, settle, due, history, spends, purge string }

const (
	chargeSQL = `
select seqs, ats, used, held, denied
from metered.charge_leased($1::metered.new_charge[], $2::interval, $3::int, null, 'answer')`
	directSQL = `
select seqs, ats, used, held, denied
from metered.charge($1::metered.new_charge[], $2::interval, $3::int)`
	openSQL = `
select no, fence, granted
from metered.open_lease(($1::metered.new_charge[])[1], $2::metered.lease_terms, $3::interval, $4::int)`
	settleSQL = `select status, granted, spent from metered.settle_lease($1::bigint, $2::text, $3::bigint, $4::int)`
	dueSQL    = `
select no from metered.leases
where settled_at is null and mode in ('s', 'm') and ends_at <= metered.clock() and no > $1 order by no limit $2`
)

func render(n schema.Name) statements {
	return statements{
		charge: n.SQL(chargeSQL), direct: n.SQL(directSQL), open: n.SQL(openSQL), settle: n.SQL(settleSQL), due: n.SQL(dueSQL),
		history: n.SQL(historySQL), spends: n.SQL(spendsSQL), purge: n.SQL(purgeSQL),
	}
}

var prepare = lend.Charges.(func(*budget.Ledger, ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error))

// open opens a lease for a slot; nil without an error if too little is left.
func (p *Pool) open(ctx context.Context, s *slot) (*slice, error) {
	s.mu.Lock()
	c := s.charge
	c.Amount = s.size()
	s.mu.Unlock()
	mode := "rows"
	if s.memory {
		mode = "memory"
	}
	terms := ledger.LeaseTerms{Mode: mode, Owner: p.cfg.Owner, Least: s.rule.Least, Share: s.rule.Share, TTL: s.rule.TTL}
	call, err := prepare(p.ledger, budget.Charge{Scope: s.scope, Amount: c.Amount, Limits: s.limits, MustExist: c.MustExist})
	if err != nil {
		return nil, err
	}
	asked := time.Now()
	got := &slice{}
	var no, fence *int64
	err = p.retried(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, p.sql.open, ledger.Charges(call.Charges), terms.String(), call.Tolerance, int32(p.wait/time.Millisecond)).
			Scan(&no, &fence, &got.granted)
	})
	if err != nil {
		return nil, failed("open a lease", err)
	}
	if no == nil || got.granted == 0 {
		return nil, nil
	}
	// A tenth less than the database gives, for clocks that do not run alike.
	life := s.rule.TTL - s.rule.TTL/10
	got.no, got.fence, got.opened, got.ends, got.endsWall = *no, *fence, time.Now(), asked.Add(life), asked.Add(life).UnixNano()
	got.seenAt = got.opened
	p.keep()
	return got, nil
}

func (p *Pool) retried(ctx context.Context, f func(pgx.Tx) error) error { return retried(ctx, p.db, f) }

// retried runs f in a transaction at READ COMMITTED, again where it met others.
func retried(ctx context.Context, db *pgxpool.Pool, f func(pgx.Tx) error) error {
	for n := 1; ; n++ {
		err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, f)
		if !sqlstate.Collided(err) || n == maxTries {
			return err
		}
	}
}
