package leases

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/observe"
)

// Allow spends charges from memory, all or none, for limits on attempts. nil means that they are
// spent, for good. Errors: *budget.ExceededError, ErrUnavailable, ErrClosed, ctx's, and
// *budget.ArgumentError, also for a Note, and a scope without a Rule.
//
// Without a slice it waits for one, or charges the ledger, as long as ctx lives. When Postgres is
// away, it is ErrUnavailable.
func (p *Pool) Allow(ctx context.Context, charges ...budget.Charge) error {
	if len(charges) == 1 {
		l, err := p.limiter(&charges[0])
		if err != nil {
			return err
		}
		return l.allowN(ctx, charges[0].Amount)
	}
	if len(charges) == 0 {
		return invalid("charges", "are none")
	}
	var slots, direct []*slot
	var taken []*slice
	var amounts []int64
	err := func() error {
		for i := range charges {
			l, err := p.limiter(&charges[i])
			if err == nil {
				err = checkAmount(charges[i].Amount)
			}
			if err != nil {
				return err
			}
			slots = append(slots, l.slot)
		}
		for i, s := range slots {
			from, _, ok := s.take(p, charges[i].Amount)
			taken = append(taken, from)
			if ok {
				continue
			}
			taken[i] = nil
			if err := cmp.Or(s.refusal(charges[i].Amount, false), s.away()); err != nil {
				return err
			}
			s.miss(p, time.Now())
			direct, amounts = append(direct, s), append(amounts, charges[i].Amount)
		}
		if len(direct) == 0 {
			return nil
		}
		return p.direct(ctx, direct, amounts)
	}()
	if err != nil {
		inBudget.TellRefused(ctx, p.observer, err)
		for i, from := range taken {
			if from != nil {
				from.give(charges[i].Amount)
			}
		}
	}
	return err
}

func checkAmount(n int64) error {
	if n < 1 || n > bounds.MaxAmount {
		return invalid("Charge.Amount", "%d is not from 1 to %d", n, int64(bounds.MaxAmount))
	}
	return nil
}

// limiter is a slot that Allow has looked up.
type limiter struct {
	pool *Pool
	slot *slot
}

// Limiter returns a faster Allow for one scope with its limits, those of the charge: it looks
// nothing up. Make it once, and keep it. It spends n units, from 1 to 2^53, as Allow does for a
// charge of this amount, and returns the same errors. The charge's own Amount does not count. It
// can have no Note, and no limit with MaxFrom or Observe. Limiter sends no SQL.
func (p *Pool) Limiter(c budget.Charge) (allow func(ctx context.Context, n int64) error, err error) {
	for {
		l, err := p.limiter(&c)
		if err != nil {
			return nil, err
		}
		l.slot.mu.Lock()
		l.slot.pinned = true
		retired := l.slot.retired
		l.slot.mu.Unlock()
		if !retired {
			return l.allowN, nil
		}
	}
}

func (p *Pool) limiter(c *budget.Charge) (limiter, error) {
	if p == nil || p.db == nil || p.live.Err() != nil {
		return limiter{}, p.usable()
	}
	s, err := p.find(&p.memory, c, true)
	switch {
	case err != nil:
		return limiter{}, err
	case s == nil:
		return limiter{}, invalid("Charge.Scope",
			"%q has no Rule in the Pool, or a limit with MaxFrom or Observe, or more than %d sets of limits", c.Scope, maxSlots)
	case c.Note != budget.Note{}:
		return limiter{}, invalid("Charge.Note", "cannot be stored by Allow")
	case c.MustExist != s.mustExist:
		return limiter{}, invalid("Charge.MustExist",
			"differs from that of another charge of scope %q with the same limits", c.Scope)
	}
	return limiter{p, s}, nil
}

// standings shows the limits of the slot as far as this process knows, nil before the first
// decision.
func (s *slot) standings() []budget.Posted {
	known := s.stands.Load()
	if known == nil {
		return nil
	}
	e := budget.Posted{Scope: s.scope, Standings: slices.Clone(known.of)}
	if s := known.slice; s != nil {
		taken := s.used.Load()
		if taken >= sealed {
			taken = s.granted
		}
		for i := range e.Standings {
			stands := &e.Standings[i]
			stands.Used += taken
			stands.Available = max(0, stands.Available-taken)
		}
	}
	return []budget.Posted{e}
}

// Receipt shows the limits of charges of Allow or of Limiter as when the slice was opened, less this
// process's spends since. It is empty before the first decision.
func (p *Pool) Receipt(charges ...budget.Charge) (r budget.Receipt) {
	for i := range charges {
		if l, err := p.limiter(&charges[i]); err == nil {
			r.Entries = append(r.Entries, l.slot.standings()...)
		}
	}
	return r
}

// allowN spends n units, as Pool.Allow does for a charge of this amount.
func (l limiter) allowN(ctx context.Context, n int64) error {
	if err := checkAmount(n); err != nil {
		return err
	}
	if _, _, ok := l.slot.take(l.pool, n); ok {
		return nil
	}
	err := l.slow(ctx, n)
	inBudget.TellRefused(ctx, l.pool.observer, err)
	return err
}

// slow serves a charge that finds no slice.
func (l limiter) slow(ctx context.Context, n int64) error {
	p, s := l.pool, l.slot
	for range maxTries {
		if err := cmp.Or(s.refusal(n, false), p.usable()); err != nil {
			return err
		}
		opening := s.miss(p, time.Now())
		if err := s.away(); err != nil {
			return err
		}
		if opening == nil {
			break
		}
		select {
		case <-opening:
		case <-ctx.Done():
			return ctx.Err()
		}
		if _, _, ok := s.take(p, n); ok {
			return nil
		}
	}
	return p.direct(ctx, []*slot{s}, []int64{n})
}

// direct charges the ledger in a transaction of its own.
func (p *Pool) direct(ctx context.Context, slots []*slot, amounts []int64) error {
	charges := make([]budget.Charge, len(slots))
	for i, s := range slots {
		charges[i] = budget.Charge{Scope: s.scope, Amount: amounts[i], Limits: s.limits,
			MustExist: s.mustExist, Note: p.note()}
	}
	call, err := inBudget.Charges(p.ledger, charges...)
	if err != nil {
		return err
	}
	var receipt budget.Receipt
	within, span := p.observer.Start(ctx, observe.Op{Work: observe.Lease, Name: "direct"})
	scan := func(row pgx.Row) (err error) {
		receipt, err = call.Scan(row)
		return err
	}
	args := func(telling bool) []any {
		return []any{ledger.Charges(ledger.Telling(call.Charges, telling)), call.Tolerance,
			int32(p.wait / time.Millisecond), call.Standing}
	}
	err = p.silently(within, p.db, p.sql.direct, args, scan,
		func(tx pgx.Tx) error {
			return inBudget.TellCrossings(within, p.ledger, tx,
				receipt.Crossed)
		})
	span.End(err)
	var refused *budget.ExceededError
	switch {
	case err == nil:
		for _, s := range slots {
			at := slices.IndexFunc(receipt.Entries, func(e budget.Posted) bool { return e.Scope == s.scope })
			s.stands.Store(&standing{of: receipt.Entries[at].Standings})
		}
		return nil
	case errors.As(err, &refused):
		p.learn(err)
		for i, s := range slots {
			own := slices.DeleteFunc(slices.Clone(refused.Refusals), func(r budget.Refusal) bool {
				return r.Scope != s.scope || r.Requested != amounts[i] || !slices.Contains(s.limits, r.Limit)
			})
			if len(own) > 0 {
				s.refuse(amounts[i], &budget.ExceededError{Refusals: own})
			}
		}
		return err
	case fault.Refused(err):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	for _, s := range slots {
		err = s.unavailable(err)
	}
	return unreachable(err)
}

// note names the process as the actor, if the ledger demands one.
func (p *Pool) note() (n budget.Note) {
	if p.strict {
		n.Actor = p.cfg.Owner
	}
	return n
}

// unreachable is ErrUnavailable if the database could not be asked. An answer of the database, such
// as budget.ErrClock, stays as it is.
func unreachable(err error) error {
	if fault.Code(err) != "" && !fault.Retryable(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// away is the error of the last failed attempt to reach the database, nil if that is not recent.
func (s *slot) away() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed == nil || time.Since(s.failure) >= failurePause {
		return nil
	}
	return unreachable(s.failed)
}

// unavailable records that the database could not be reached.
func (s *slot) unavailable(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed, s.failure = err, time.Now()
	return err
}
