package leases

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/observe"
)

// settleSoon settles a sealed slice in the background.
func (p *Pool) settleSoon(s *slot, got *slice) {
	p.mu.Lock()
	p.ended = append(p.ended, ending{slot: s, slice: got})
	first := len(p.ended) == 1 && !p.isClosed()
	p.mu.Unlock()
	p.keep()
	if first { // whoever settles takes all that has come by then
		p.work.Go(func() { p.report(p.settleEnded(p.last)) })
	}
}

// settleEnded settles the slices that are ready, one lease after the other. A failure leaves the
// lease for later.
func (p *Pool) settleEnded(ctx context.Context) error {
	p.settling.Lock()
	defer p.settling.Unlock()
	var later []ending
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.ended = append(p.ended, later...)
	}()
	var all error
	for {
		p.mu.Lock()
		todo := p.ended
		p.ended = nil
		p.mu.Unlock()
		if len(todo) == 0 {
			return all
		}
		for _, e := range todo {
			if ctx.Err() != nil {
				later = append(later, e)
				continue
			}
			if !e.reported { // here, where no slot is locked
				e.reported = true
				p.observer.Event(ctx, observe.Event{Kind: observe.Slice, Name: "ended", N: e.slice.granted})
			}
			total := &e.slice.total
			if !e.slot.memory {
				total = nil
			}
			if _, err := p.settle(ctx, e.slice.no, total, e.slot); err != nil {
				all, later = errors.Join(all, err), append(later, e)
			}
		}
	}
}

// settle settles a lease, and reports whether it did. of has the limits whose thresholds it
// reports, nil for a lease of another process.
func (p *Pool) settle(ctx context.Context, no int64, total *int64, of *slot) (settled bool, err error) {
	var status string
	var granted, spent *int64
	var crossed []byte
	ctx, span := p.observer.Start(ctx, observe.Op{Work: observe.Lease, Name: "settle"})
	defer func() { span.End(err) }()
	scan := func(row pgx.Row) error {
		if err := row.Scan(&status, &granted, &spent, &crossed); err != nil || status != "crossing" {
			return err
		}
		return ledger.ErrCrossing
	}
	args := func(charges, tolerance any) []any {
		return []any{no, p.cfg.Owner, total, int32(min(p.wait, settleWait) / time.Millisecond),
			charges, tolerance}
	}
	if of == nil || !slices.ContainsFunc(of.limits,
		func(l budget.Limit) bool { tells, _ := inBudget.TellsSpent(l); return tells }) {
		err = p.call(ctx, p.own, scan, p.sql.settle, args(nil, nil)...)
	} else if call, invalid := inBudget.Charges(p.ledger,
		budget.Charge{Scope: of.scope, Amount: 1, Limits: of.limits}); invalid != nil {
		err = invalid
	} else {
		err = p.silently(ctx, p.own, p.sql.settle, func(telling bool) []any {
			return args(ledger.Charges(ledger.Telling(call.Charges, telling)), call.Tolerance)
		}, scan, func(tx pgx.Tx) error { return call.Cross(ctx, tx, crossed) })
		if refused := (*fault.Listener)(nil); errors.As(err, &refused) {
			p.report(failed("settle a lease", err)) // the spent units must not be lost for that: the next charge reports the threshold
			err = p.call(ctx, p.own, scan, p.sql.settle, args(nil, nil)...)
		}
	}
	if settled = err == nil && status == "settled"; settled && granted != nil && spent != nil {
		p.tellSettled(ctx, *spent, *granted-*spent)
	}
	return settled, failed("settle a lease", err)
}

func (p *Pool) tellSettled(ctx context.Context, spent, returned int64) {
	if spent > 0 {
		p.observer.Event(ctx, observe.Event{Kind: observe.Slice, Name: "spent", N: spent})
	}
	if returned > 0 {
		p.observer.Event(ctx, observe.Event{Kind: observe.Slice, Name: "returned", N: returned})
	}
}

// SweepReport counts the leases and children that a Sweep looked at.
type SweepReport struct {
	// Settled are the leases that were settled, and the children that were ended.
	Settled int `json:"settled"`

	// Busy are the leases that somebody was spending from. They are left for the next sweep.
	Busy int `json:"busy"`

	// Held are the children whose time is over and that have held units. They are left for the
	// next sweep, too.
	Held int `json:"held"`
}

// Sweep settles ended leases of all processes, and ends this cluster's children whose time is over,
// in one transaction each. A Pool does so every few seconds while it has leases. Any number may run
// at once.
func Sweep(ctx context.Context, pool *pgxpool.Pool, ledger *budget.Ledger) (SweepReport, error) {
	var report SweepReport
	p, err := bare(pool, ledger)
	if err != nil {
		return report, err
	}
	err = p.settleDue(ctx, &report)
	return report, err
}

func (p *Pool) settleDue(ctx context.Context, report *SweepReport) error {
	const page = 100
	for after, last, n := (time.Time{}), int64(0), page; n == page; {
		// Planned for each page: a plan kept from when there was little reads all that was ever
		// settled.
		rows, err := answer.Query(ctx, p.db, p.sql.due, pgx.QueryExecModeExec, after, last, page)
		if err != nil {
			return failed("list leases", err)
		}
		var due []int64
		_, err = pgx.ForEachRow(rows, []any{&last, &after},
			func() error { due = append(due, last); return nil })
		if err != nil {
			return failed("list leases", err)
		}
		for _, no := range due {
			switch settled, err := p.settle(ctx, no, nil, nil); {
			case errors.Is(err, fault.ErrBusy):
				report.Busy++
			case err != nil:
				return err
			case settled:
				report.Settled++
			}
		}
		n = len(due)
	}
	return p.carver.sweep(ctx, p.db, report)
}

// keep starts the maintenance, unless it runs: it ends when there is nothing to maintain.
func (p *Pool) keep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept = time.Now()
	if p.keeping || p.isClosed() {
		return
	}
	p.keeping = true
	p.work.Go(p.maintain)
}

const (
	maintainEvery = 50 * time.Millisecond
	sweepEvery    = 2 * time.Second
	forgetEvery   = 5 * time.Second
	forgetAfter   = time.Minute      // without a charge
	restAfter     = 30 * time.Second // without a slice or a slot
	settleWait    = time.Second      // for transactions that spend from the lease, each time it is tried
)

// maintain gives back slices that are idle or end, and settles leases that failed before or that
// others left.
func (p *Pool) maintain() {
	listening, quit := context.WithCancel(p.live)
	defer quit()
	if !p.cfg.NoRecall {
		p.work.Go(func() { p.listen(listening) })
	}
	tick := time.NewTicker(maintainEvery)
	defer tick.Stop()
	swept, forgot, busy := time.Now(), time.Now(), time.Now()
	slots := 1
	for {
		select {
		case <-p.live.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		left := 0
		p.each(func(s *slot) { left += s.age(p, now) })
		p.report(p.settleEnded(p.last))
		if now.Sub(swept) >= sweepEvery {
			swept = now
			p.report(p.settleDue(p.live, new(SweepReport)))
		}
		if now.Sub(forgot) >= forgetEvery {
			forgot, slots = now, p.forget(now)
		}
		p.mu.Lock()
		if left+slots+len(p.ended) > 0 {
			busy = now
		} else if now.Sub(busy) > restAfter && now.Sub(p.kept) > restAfter {
			p.keeping = false
			p.mu.Unlock()
			return
		}
		p.mu.Unlock()
	}
}

// age gives back slices that are idle or at their end, and returns how many are left.
func (s *slot) age(p *Pool, now time.Time) (left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follow(p, now)
	cur := s.current.Load()
	idle := false
	if cur != nil {
		if used := cur.used.Load(); used != cur.seen {
			cur.seen, cur.seenAt = used, now
		}
		idle = now.Sub(cur.seenAt) >= s.rule.Idle
		if idle || cur.over(now) {
			s.measure(cur.seal(), cur.opened)
			s.current.Store(nil)
			p.settleSoon(s, cur)
		} else {
			left++
		}
	}
	if s.next != nil {
		if idle || cur == nil && now.Sub(s.next.opened) >= s.rule.Idle || s.next.over(now) {
			s.next.seal()
			p.settleSoon(s, s.next)
			s.next = nil
		} else {
			left++
		}
	}
	if s.current.Load() == nil && s.next != nil {
		s.current.Store(s.next)
		s.next = nil
	}
	if left == 0 {
		p.has(s, false)
	}
	return left
}

// Close gives all leases back, as long as ctx lives.
func (p *Pool) Close(ctx context.Context) error {
	if p == nil || p.db == nil {
		return p.usable()
	}
	p.stop()
	p.each(func(s *slot) { s.giveBack(p, 0) })
	done := make(chan struct{})
	go func() { p.work.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		p.end()
	}
	defer p.own.Close()
	defer p.end()
	p.each(func(s *slot) { s.giveBack(p, 0) }) // slices that were being opened
	return cmp.Or(p.settleEnded(ctx), ctx.Err())
}
