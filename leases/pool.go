package leases

import (
	"context"
	"errors"
	"maps"
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
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/observe"
)

// Pauses of a slot.
const (
	directPause  = 250 * time.Millisecond // after too little was left for a slice
	recallPause  = time.Second            // after units were recalled
	failurePause = 100 * time.Millisecond // after the database could not be asked
	warmAt       = 3                      // so many charges without a slice, in warmFor, make one worth its while
	warmFor      = 250 * time.Millisecond
	openWait     = 100 * time.Millisecond // for a slice that is being opened
)

// Pool owns the leases of a process. It is safe for concurrent use. Close gives them back.
type Pool struct {
	db     *pgxpool.Pool
	own    *pgxpool.Pool // a few connections, to open and settle while all of db's are busy
	ledger *budget.Ledger
	carver *Carver
	cfg    Config
	schema schema.Name
	wait   time.Duration
	sql    statements

	observer *observed.To // the ledger's

	rows, memory sync.Map // by scope: *scope

	live context.Context // until Close
	stop context.CancelFunc
	work sync.WaitGroup // what goes on in the background

	mu      sync.Mutex
	keeping bool               // the maintenance runs
	kept    time.Time          // when it was last asked for
	ended   []ending           // slices to be settled
	active  map[*slot]struct{} // those that have slices

	settling sync.Mutex // one settles at a time
	recalls  sync.Map   // by scope: *atomic.Int64, nanoseconds, when the last recall was asked for
}

// scope are the slots of a scope, one for each set of limits.
type scope struct {
	mu    sync.Mutex
	gone  bool // it was forgotten
	slots atomic.Pointer[[]*slot]
}

type ending struct {
	slot  *slot
	slice *slice
	told  bool // the observer was
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
	if in.gone {
		in.mu.Unlock()
		return p.add(slots, c, rule, memory)
	}
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
	s := &slot{scope: strings.Clone(c.Scope), limits: slices.Clone(c.Limits), rule: rule, memory: memory, exist: c.MustExist}
	all = append(slices.Clone(all), s)
	in.slots.Store(&all)
	p.keep()
	return s, nil
}

// forget drops slots that have not been asked for in a while, and returns how many are left.
func (p *Pool) forget(now time.Time) (left int) {
	for _, slots := range []*sync.Map{&p.rows, &p.memory} {
		for name, found := range slots.Range {
			in := found.(*scope)
			in.mu.Lock()
			kept := slices.DeleteFunc(slices.Clone(*in.slots.Load()), func(s *slot) bool { return s.retire(now) })
			in.slots.Store(&kept)
			if in.gone = len(kept) == 0; in.gone {
				slots.Delete(name)
			}
			in.mu.Unlock()
			left += len(kept)
		}
	}
	return left
}

// maxSlots bounds the sets of limits that a scope is leased for at a time; others are charged directly.
const maxSlots = 16

// Charge is budget.Ledger.Charge, from leases where there are any: its entries then have Lease, and neither Seq nor
// Standings. What is spent counts for everybody at once, as held. A lease that was settled by somebody else meanwhile
// costs another round trip. A denial of a single charge by a window, of which nothing is held, is repeated from memory until
// its retry time, also if a charge is refunded meanwhile.
func (p *Pool) Charge(ctx context.Context, tx pgx.Tx, charges ...budget.Charge) (budget.Receipt, error) {
	if err := p.usable(); err != nil {
		return budget.Receipt{}, err
	}
	if err := notNil("tx", tx); err != nil {
		return budget.Receipt{}, err
	}
	if len(charges) == 1 {
		if r, ok, err := p.one(ctx, tx, &charges[0]); ok || err != nil {
			return r, err
		}
	}
	for range maxTries {
		call, err := prepare(p.ledger, charges...)
		if err != nil {
			return budget.Receipt{}, err
		}
		if !p.lease(ctx, &call.Charging, charges) {
			receipt, err := p.ledger.Charge(ctx, tx, charges...)
			p.learn(err)
			p.remember(charges, err)
			return receipt, err
		}
		receipt, err := call.Call.Scan(tx.QueryRow(ctx, p.sql.charge, ledger.Charges(call.Charges), call.Tolerance, int32(p.wait/time.Millisecond), call.Standing))
		if !p.dropped(err) {
			p.learn(err)
			tellDenied(ctx, p.observer, err)
			return receipt, err
		}
	}
	return p.ledger.Charge(ctx, tx, charges...)
}

// one spends a single charge from a lease, if there is one.
func (p *Pool) one(ctx context.Context, tx pgx.Tx, c *budget.Charge) (r budget.Receipt, ok bool, err error) {
	defer func() { tellDenied(ctx, p.observer, err) }()
	s, err := p.find(&p.rows, c, false)
	if err != nil || s == nil || c.Amount < 1 || c.Amount > budget.MaxAmount || c.Note != (budget.Note{}) || c.MustExist != s.exist {
		return r, false, err
	}
	for range maxTries {
		from, offset, ok := s.takeOrWait(ctx, p, c.Amount)
		if !ok {
			// What a credit or a release ends is left to the ledger: this transaction may have made it.
			if known := s.refused.Load(); known != nil && known.sure {
				return r, false, s.refusal(c.Amount)
			}
			return r, false, nil
		}
		var at *time.Time
		err := tx.QueryRow(ctx, p.sql.spend, from.no, from.fence, offset, c.Amount, c.Scope, nil).Scan(&at)
		switch {
		case err != nil:
			return r, false, failed("charge", err)
		case at != nil:
			return budget.Receipt{Entries: []budget.Posted{{Scope: c.Scope, Amount: c.Amount, At: *at, Lease: from.no}}}, true, nil
		}
		s.drop(p, from.no)
	}
	return r, false, nil
}

// remember takes note of the denial of a single charge, for one.
func (p *Pool) remember(charges []budget.Charge, err error) {
	var denied *budget.ExceededError
	if len(charges) == 1 && errors.As(err, &denied) {
		if s, err := p.find(&p.rows, &charges[0], false); err == nil && s != nil {
			s.refuse(charges[0].Amount, denied)
		}
	}
}

// maxTries bounds how many leases a charge finds closed before it goes to the ledger.
const maxTries = 3

// lease takes units for those of the charges that are leased, and reports whether there were any.
func (p *Pool) lease(ctx context.Context, c *ledger.Charging, charges []budget.Charge) (any bool) {
	for i := range c.Charges {
		to := &c.Charges[i]
		to.Lease = nil // of an attempt before
		s := p.slotOf(c, to, charges)
		if s == nil {
			continue
		}
		from, offset, ok := s.takeOrWait(ctx, p, to.Amount)
		if !ok {
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

// slotOf is the slot that a charge of a call is spent from; nil for the ledger.
func (p *Pool) slotOf(c *ledger.Charging, to *ledger.Charge, charges []budget.Charge) *slot {
	at := slices.IndexFunc(charges, func(x budget.Charge) bool { return x.Scope == to.Scope })
	if len(c.Queries) > 0 || p.isClosed() || p.rule(to.Scope) == nil || slices.ContainsFunc(charges, func(x budget.Charge) bool {
		return x.Scope == to.Scope && (x.MustExist != charges[at].MustExist || !slices.Equal(x.Limits, charges[at].Limits))
	}) {
		return nil // among others it is merged from several that differ
	}
	s, err := p.find(&p.rows, &charges[at], false)
	if err != nil || s == nil || charges[at].MustExist != s.exist {
		return nil
	}
	return s
}

// look leaves out of a command's first look what there are units leased for: what others see of the scope is no
// reason to refuse it.
func (p *Pool) look(c *ledger.Charging, charges []budget.Charge) {
	now := time.Now()
	for i := range c.Charges {
		to := &c.Charges[i]
		to.Lease = nil
		if s := p.slotOf(c, to, charges); s != nil {
			if cur := s.now.Load(); cur != nil && cur.used.Load()+to.Amount <= cur.granted && !cur.over(now) {
				to.Lease = &ledger.Slice{}
			}
		}
	}
}

func init() {
	lend.LeaseLook = (*Pool).look
	lend.Lease = func(ctx context.Context, p *Pool, c *ledger.Charging, charges []budget.Charge) {
		c.Closed = p.drop
		p.lease(ctx, c, charges)
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

// recall asks all processes, this one included, to give back their slices of a scope, and settles what has ended: the
// processes may be gone.
func (p *Pool) recall(of string) {
	at, _ := p.recalls.LoadOrStore(of, new(atomic.Int64))
	now, last := time.Now().UnixNano(), at.(*atomic.Int64)
	if before := last.Load(); now-before < int64(recallEvery) || !last.CompareAndSwap(before, now) {
		return
	}
	p.observer.Event(p.live, observe.Event{Kind: observe.LeaseRecalled})
	p.recalled(of)
	p.keep()
	if p.isClosed() {
		return
	}
	p.work.Go(func() {
		p.report(p.settleDue(p.live, new(SettleReport)))
		if p.cfg.NoRecall {
			return
		}
		if _, err := p.own.Exec(p.live, `select pg_catalog.pg_notify($1, $2)`, p.channel(), of); err != nil {
			p.report(failed("recall", err))
		}
	})
}

// recallEvery bounds how often a process asks for recalls of a scope.
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

// each calls f with every slot that has slices.
func (p *Pool) each(f func(*slot)) {
	p.mu.Lock()
	all := slices.Collect(maps.Keys(p.active))
	p.mu.Unlock()
	for _, s := range all {
		f(s)
	}
}

// has takes note of whether a slot has slices. Its mu is held.
func (p *Pool) has(s *slot, any bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if any {
		p.active[s] = struct{}{}
	} else {
		delete(p.active, s)
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
type statements struct{ charge, spend, direct, open, settle, due, history, spends, purge, purgeable string }

const (
	chargeSQL = `
select seqs, ats, used, held, denied
from metered.charge_leased($1::metered.new_charge[], $2::interval, $3::int, null, 'answer', $4::bool)`
	spendSQL  = `select metered.spend($1::bigint, $2::bigint, $3::bigint, $4::bigint, $5::text, $6::jsonb)`
	directSQL = `
select seqs, ats, used, held, denied
from metered.charge($1::metered.new_charge[], $2::interval, $3::int, $4::bool)`
	openSQL = `
select no, fence, granted, used, coalesce(held, 0)
from metered.open_lease(($1::metered.new_charge[])[1], $2::metered.lease_terms, $3::interval, $4::int)`
	settleSQL = `select status, granted, spent from metered.settle_lease($1::bigint, $2::text, $3::bigint, $4::int)`
	dueSQL    = `
select no, ends_at from metered.leases
where settled_at is null and mode in ('s', 'm') and ends_at <= (select metered.clock()) and ends_at >= $1 and (ends_at, no) > ($1, $2)
order by ends_at, no limit $3`
)

func render(n schema.Name) statements {
	return statements{
		charge: n.SQL(chargeSQL), spend: n.SQL(spendSQL), direct: n.SQL(directSQL), open: n.SQL(openSQL), settle: n.SQL(settleSQL), due: n.SQL(dueSQL),
		history: n.SQL(historySQL), spends: n.SQL(spendsSQL), purge: n.SQL(purgeSQL), purgeable: n.SQL(purgeableSQL),
	}
}

var prepare = lend.Charges.(func(*budget.Ledger, ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error))

// open opens a lease for a slot; nil without an error if too little is left.
func (p *Pool) open(ctx context.Context, s *slot) (_ *slice, err error) {
	ctx, span := p.observer.Start(ctx, observe.Op{Work: observe.Lease, Name: "open"})
	defer func() { span.End(err) }()
	s.mu.Lock()
	size := s.size()
	s.mu.Unlock()
	mode := "rows"
	if s.memory {
		mode = "memory"
	}
	terms := ledger.LeaseTerms{Mode: mode, Owner: p.cfg.Owner, Least: s.rule.Least, Share: s.rule.Share, TTL: s.rule.TTL}
	call, err := prepare(p.ledger, budget.Charge{Scope: s.scope, Amount: size, Limits: s.limits, MustExist: s.exist})
	if err != nil {
		return nil, err
	}
	asked := time.Now()
	got := &slice{}
	var no, fence *int64
	var used []int64
	var held int64
	err = p.call(ctx, p.own, func(row pgx.Row) error { return row.Scan(&no, &fence, &got.granted, &used, &held) },
		p.sql.open, ledger.Charges(call.Charges), terms.String(), call.Tolerance, int32(p.wait/time.Millisecond))
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
	stands := &standing{slice: got}
	for i, limit := range s.limits {
		stands.of = append(stands.of, budget.Standing{Limit: limit, Used: used[i], Held: held, Available: max(0, limit.Max-used[i]-held)})
	}
	s.stands.Store(stands)
	p.keep()
	p.observer.Event(ctx, observe.Event{Kind: observe.LeaseOpened, N: got.granted})
	return got, nil
}

// call makes a call in a transaction of its own at READ COMMITTED, in one round trip, again where it met others.
func (p *Pool) call(ctx context.Context, db *pgxpool.Pool, scan func(pgx.Row) error, sql string, args ...any) error {
	for n := 1; ; n++ {
		batch := &pgx.Batch{}
		batch.Queue("begin isolation level read committed")
		batch.Queue(sql, args...)
		batch.Queue("commit")
		results := db.SendBatch(ctx, batch)
		_, err := results.Exec()
		if err == nil {
			err = scan(results.QueryRow())
		}
		if closing := results.Close(); err == nil {
			err = closing
		}
		if !sqlstate.Collided(err) || n == maxTries {
			return err
		}
		p.observer.Retried(ctx, err)
	}
}
