package leases

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/schema"
)

// Charge is budget.Ledger.Charge, spending from leases where there are any: such entries have
// Lease, and neither Seq nor Standings. If a window or a period without holds refuses a single
// charge, the refusal is remembered for up to 2 seconds, for the same amount, even after a refund.
func (p *Pool) Charge(ctx context.Context, tx pgx.Tx, charges ...budget.Charge) (budget.Receipt, error) {
	if err := p.usable(); err != nil {
		return budget.Receipt{}, err
	}
	if err := notNil("tx", tx); err != nil {
		return budget.Receipt{}, err
	}
	if len(charges) == 1 && charges[0].Note == (budget.Note{}) && !p.strict {
		return p.one(ctx, tx, charges[0])
	}
	for range maxTries {
		call, err := inBudget.Charges(p.ledger, charges...)
		if err != nil {
			return budget.Receipt{}, err
		}
		if !p.lease(ctx, &call.Charging, charges) {
			break
		}
		receipt, err := ledger.SilentlyIn(ctx, tx, "leases",
			func(tx pgx.Tx, telling bool) (budget.Receipt, error) {
				receipt, err := call.Scan(answer.QueryRow(ctx, tx, p.sql.charge,
					ledger.Summed(ledger.Telling(call.Charges, telling)), call.Tolerance,
					int32(p.wait/time.Millisecond), call.Standing))
				if err == nil {
					err = inBudget.TellCrossings(ctx, p.ledger, tx, receipt.Crossed)
				}
				return receipt, err
			})
		if !p.dropped(err) {
			p.learn(err)
			inBudget.TellRefused(ctx, p.observer, err)
			return receipt, err
		}
	}
	receipt, err := p.ledger.Charge(ctx, tx, charges...)
	p.learn(err)
	return receipt, err
}

// one is Charge of a single charge without a note.
func (p *Pool) one(ctx context.Context, tx pgx.Tx, c budget.Charge) (budget.Receipt, error) {
	s, err := p.find(&p.rows, &c, false)
	if err != nil {
		return budget.Receipt{}, err
	}
	leased := s != nil && c.Amount >= 1 && c.Amount <= bounds.MaxAmount && c.MustExist == s.mustExist
	for try := 0; leased && try < maxTries; try++ {
		from, offset, ok := s.takeOrWait(ctx, p, c.Amount)
		if !ok {
			// The ledger decides where a credit or a release may have ended a refusal: this
			// transaction may have made it.
			if err := s.refusal(c.Amount, true); err != nil {
				inBudget.TellRefused(ctx, p.observer, err)
				return budget.Receipt{}, err
			}
			break
		}
		var at *time.Time
		err := answer.QueryRow(ctx, tx, p.sql.spend, from.no, from.fence, offset, c.Amount, c.Scope,
			nil).Scan(&at)
		switch {
		case err != nil:
			return budget.Receipt{}, failed("charge", err)
		case at != nil:
			return budget.Receipt{Entries: []budget.Posted{{Scope: c.Scope, Amount: c.Amount,
				At: *at, Lease: from.no}}}, nil
		}
		s.drop(p, from.no)
	}
	receipt, err := p.ledger.Charge(ctx, tx, c)
	p.learn(err)
	var refused *budget.ExceededError
	if s != nil && errors.As(err, &refused) {
		s.refuse(c.Amount, refused)
	}
	return receipt, err
}

// maxTries bounds how many leases a charge finds closed before it goes to the ledger.
const maxTries = 3

// lease takes units of slices for charges, and reports whether any charge got some.
func (p *Pool) lease(ctx context.Context, c *ledger.Charging, charges []budget.Charge) (any bool) {
	for i := range c.Charges {
		to := &c.Charges[i]
		to.Lease = nil // left by an earlier attempt
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
	c.Locks.Scopes, c.Locks.Keys = nil, nil // these are for the direct charges
	for _, x := range c.Charges {
		if x.Lease == nil {
			c.Locks.Scopes, c.Locks.Keys = append(c.Locks.Scopes, x.Scope), append(c.Locks.Keys, x.Key)
		}
	}
	slices.Sort(c.Locks.Keys)
	c.Locks.Keys = slices.Compact(c.Locks.Keys)
	return any
}

// slotOf is the slot that serves a charge of a call, nil if the ledger does.
func (p *Pool) slotOf(c *ledger.Charging, to *ledger.Charge, charges []budget.Charge) *slot {
	at := slices.IndexFunc(charges, func(x budget.Charge) bool { return x.Scope == to.Scope })
	if len(c.Queries) > 0 || to.Use != "" || p.isClosed() || p.rule(to.Scope) == nil ||
		slices.ContainsFunc(charges, func(x budget.Charge) bool {
			return x.Scope == to.Scope && (x.MustExist != charges[at].MustExist ||
				!slices.Equal(x.Limits, charges[at].Limits))
		}) {
		return nil // among others it is merged from several that differ
	}
	s, err := p.find(&p.rows, &charges[at], false)
	if err != nil || s == nil || charges[at].MustExist != s.mustExist {
		return nil
	}
	return s
}

// look leaves charges with leased units out of a command's first look: the scope's usage, with
// other leases in it, is no reason to refuse them.
func (p *Pool) look(c *ledger.Charging, charges []budget.Charge) {
	now := time.Now()
	for i := range c.Charges {
		to := &c.Charges[i]
		to.Lease = nil
		if s := p.slotOf(c, to, charges); s != nil {
			if cur := s.current.Load(); cur != nil && cur.used.Load()+to.Amount <= cur.granted &&
				!cur.over(now) {
				to.Lease = &ledger.Slice{}
			}
		}
	}
}

func init() { lend.Lend("leases", internals{}) }

// internals are lent to metered.
type internals struct{}

// Lease spends charges from leases, as far as there are any.
func (internals) Lease(ctx context.Context, p *Pool, c *ledger.Charging, charges []budget.Charge) {
	c.Closed = p.drop
	p.lease(ctx, c, charges)
}

// Look leaves charges with leased units out of a command's first look.
func (internals) Look(p *Pool, c *ledger.Charging, charges []budget.Charge) { p.look(c, charges) }

// Schema is where the pool's leases are.
func (internals) Schema(p *Pool) schema.Name { return p.schema }

// Learn reads a refusal: leased units may be recalled for it.
func (internals) Learn(p *Pool, err error) { p.learn(err) }

// dropped reports whether err says that a lease is closed, and then gives that lease back.
func (p *Pool) dropped(err error) bool {
	var closed *ledger.ClosedError
	if errors.As(err, &closed) {
		p.drop(closed.Lease)
	}
	return closed != nil
}

// drop gives a lease back that was found closed.
func (p *Pool) drop(no int64) { p.each(func(s *slot) { s.drop(p, no) }) }
