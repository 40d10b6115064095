package leases

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
)

// Pauses of a slot.
const (
	directPause  = 250 * time.Millisecond // after too little was left for a slice
	recallPause  = time.Second            // after units were recalled
	recallApart  = 5 * time.Second        // between two notices that a slot follows
	failurePause = 100 * time.Millisecond // after a failure to reach the database
	warmAt       = 3                      // so many charges without a slice, in warmFor, make one worth its while
	warmFor      = 250 * time.Millisecond
	openWait     = 100 * time.Millisecond // for a slice that is being opened
)

// Pool is safe for concurrent use.
type Pool struct {
	db     *pgxpool.Pool
	own    *pgxpool.Pool // a few connections, to open and settle while all of db's are busy
	ledger *budget.Ledger
	carver *Carver
	cfg    Config
	schema schema.Name
	wait   time.Duration
	strict bool // each charge needs an actor
	sql    statements

	observer *observed.To // the ledger's

	rows, memory sync.Map // by scope: *scope

	live context.Context // until Close begins
	stop context.CancelFunc
	last context.Context // until Close has ended: for work that is not given up halfway, such as opening a lease
	end  context.CancelFunc
	work sync.WaitGroup // the work in the background

	mu      sync.Mutex
	keeping bool               // the maintenance runs
	kept    time.Time          // when it was last used
	ended   []ending           // slices to be settled
	active  map[*slot]struct{} // those that have slices

	settling sync.Mutex // one settles at a time
	recalls  sync.Map   // by scope: *atomic.Int64, nanoseconds, the time of the last recall
}

// scope are the slots of a scope, one for each set of limits.
type scope struct {
	mu    sync.Mutex
	gone  bool // it was forgotten
	slots atomic.Pointer[[]*slot]
}

type ending struct {
	slot     *slot
	slice    *slice
	reported bool // to the observer
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
	checked := *c
	if memory {
		checked.Note = p.note()
	}
	call, err := inBudget.Charges(p.ledger, checked)
	if err != nil {
		return nil, err
	}
	if len(call.Queries) > 0 || slices.ContainsFunc(c.Limits, func(l budget.Limit) bool { return l.Observe }) {
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
	s := &slot{scope: strings.Clone(c.Scope), limits: slices.Clone(c.Limits), rule: rule,
		memory: memory, mustExist: c.MustExist}
	all = append(slices.Clone(all), s)
	in.slots.Store(&all)
	p.keep()
	return s, nil
}

// forget drops slots that were not used in a while, and returns how many are left.
func (p *Pool) forget(now time.Time) (left int) {
	for _, slots := range []*sync.Map{&p.rows, &p.memory} {
		for name, found := range slots.Range {
			in := found.(*scope)
			in.mu.Lock()
			kept := slices.DeleteFunc(slices.Clone(*in.slots.Load()),
				func(s *slot) bool { return s.retire(now) })
			in.slots.Store(&kept)
			if in.gone = len(kept) == 0; in.gone {
				slots.Delete(name)
			}
			in.mu.Unlock()
			left += len(kept)
		}
	}
	for name, asked := range p.recalls.Range {
		if now.UnixNano()-asked.(*atomic.Int64).Load() > int64(forgetAfter) {
			p.recalls.Delete(name)
		}
	}
	return left
}

// maxSlots bounds the sets of limits for which a scope is leased at a time. Charges with others go
// to the ledger.
const maxSlots = 16

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
