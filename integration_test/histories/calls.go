package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// app is the library as one program has it. It is compiled with the release before as well: a new
// call has a place in the test alone.
type app struct {
	db      *pgxpool.Pool
	c       *metered.Client
	lent    *leases.Pool
	leased  *metered.Client
	wallets *wallet.Book
}

func newApp(db *pgxpool.Pool, bounced bool) (*app, error) {
	// LockTimeout is a field of its own in the release before, and one of the embedded budget.Config in this.
	cfg := metered.Config{MaxAttempts: 50, ResolveTimeout: 200 * time.Millisecond}
	cfg.LockTimeout = 5 * time.Second
	a := &app{db: db}
	var err error
	if a.c, err = metered.New(db, cfg); err != nil {
		return nil, err
	}
	if a.lent, err = leases.New(db, a.c.Budget, leases.Config{Rules: []leases.Rule{least(leases.Rule{Prefix: "leased", Share: 4}, 2)}, NoRecall: bounced}); err != nil {
		return nil, err
	}
	cfg.Leases = a.lent
	if a.leased, err = metered.New(db, cfg); err != nil {
		return nil, err
	}
	a.wallets, err = wallet.New(a.c.Budget, wallet.Config{})
	return a, err
}

// reply is the end of a call.
type reply struct {
	Answer  answer
	Seq     int64 // of the entry that a charge wrote
	Outcome outcome
	Error   string
}

type outcome string

const (
	done    outcome = "done"
	refused outcome = "refused" // without effect, for a reason that is an answer
	failed  outcome = "failed"  // without effect
	unknown outcome = "unknown" // whether it took effect
)

// refusals are answers: the call took no effect, and says why.
var refusals = []error{budget.ErrExceeded, budget.ErrScopeClosed, holds.ErrState, holds.ErrTaken, holds.ErrUnknown, tokens.ErrInvalid}

// perform makes a call, sometimes of a caller that leaves.
func (a *app) perform(c call) reply {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if c.Leaves > 0 {
		defer time.AfterFunc(c.Leaves, cancel).Stop()
	}
	r := reply{Outcome: done}
	err := a.call(ctx, c, &r)
	switch {
	case err == nil:
		return r
	case slices.ContainsFunc(refusals, func(target error) bool { return errors.Is(err, target) }):
		r = reply{Answer: answer{Refused: true}, Outcome: refused}
	case errors.Is(err, metered.ErrIndefinite) || errors.Is(err, budget.ErrCommitUnknown):
		r = reply{Answer: answer{State: c.Who}, Outcome: unknown} // if its row is there, it ran
	default:
		r = reply{Outcome: failed}
	}
	r.Error = fmt.Sprintf("%v (%s)", err, metered.Code(err))
	return r
}

const insert = "insert into done values ($1)"

// call makes a call. If it takes effect, it writes the row of c.ID.
func (a *app) call(ctx context.Context, c call, r *reply) error {
	kind, _, _ := strings.Cut(c.Thing, "/")
	switch kind + " " + c.Kind {
	case "scope usage", "leased usage", "session usage":
		u, err := a.c.Budget.Usage(ctx, a.db, budget.Query{Scope: c.Thing})
		if err == nil {
			r.Answer.Units = u[0].Used
		}
		return err
	case "wallet usage":
		b, err := a.wallets.Balance(ctx, a.db, c.Thing)
		r.Answer.Units = -b.Units
		return err
	case "hold look":
		h, err := a.c.Holds.Get(ctx, a.db, "", c.Thing, "")
		if errors.Is(err, holds.ErrUnknown) {
			return nil
		}
		r.Answer.State = string(h.State)
		return err
	case "operation do":
		cmd := metered.Command{ID: c.Thing, Input: 1, EarlyRelease: c.Dice%3 == 0, LSN: c.Dice%5 == 0}
		out, err := metered.Do(ctx, a.c, cmd, func(ctx context.Context, tx *metered.Tx) (string, error) {
			_, err := tx.Exec(ctx, insert, c.ID)
			return c.Who, err
		})
		r.Answer.State = out.Result
		return err
	case "leased leased charge":
		_, err := a.do(ctx, a.leased, c, metered.Command{Charges: charges(c, budget.Lifetime(c.Limit))})
		return err
	case "scope command":
		out, err := a.do(ctx, a.c, c, metered.Command{Charges: charges(c, limits(c)...), EarlyRelease: c.Dice%3 == 0})
		if err == nil {
			r.Seq = out.Receipt.Entries[0].Seq
		}
		return err
	case "token redeem":
		_, err := a.do(ctx, a.c, c, metered.Command{Token: &metered.Redeem{Purpose: "p", Subject: c.Thing, Presented: c.Token}})
		return err
	case "session session":
		return a.session(ctx, c)
	}
	iso := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[c.Dice%4]
	return a.c.RunTx(ctx, pgx.TxOptions{IsoLevel: iso}, func(ctx context.Context, tx pgx.Tx) error {
		if err := a.in(ctx, tx, kind, c, r); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, insert, c.ID)
		return err
	})
}

// do makes a call as a command, whose row is written by a function or by a statement.
func (a *app) do(ctx context.Context, client *metered.Client, c call, cmd metered.Command) (out metered.Outcome[any], err error) {
	cmd.ID, cmd.Input = c.ID, 1
	if c.Dice%2 == 0 && declared(&cmd, insert, c.ID) {
		return metered.Do[any](ctx, client, cmd, nil)
	}
	return metered.Do(ctx, client, cmd, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Exec(ctx, insert, c.ID)
		return 1, err
	})
}

// session spends less than it has reserved.
func (a *app) session(ctx context.Context, c call) error {
	s, err := metered.Open[int](ctx, a.c, metered.Reservation{ID: c.ID, Input: 1, EarlyRelease: c.Dice%3 == 0,
		Lines: []holds.Line{{Scope: c.Thing, Amount: c.Amount + 1, Limits: limits(c)}}})
	if err != nil {
		return err
	}
	defer s.Close()
	_, err = s.Settle(ctx, metered.Cost{Lines: []holds.Line{{Scope: c.Thing, Amount: c.Amount}}}, func(ctx context.Context, tx *metered.Tx) (int, error) {
		_, err := tx.Exec(ctx, insert, c.ID)
		return 1, err
	})
	return err
}

func charges(c call, limits ...budget.Limit) []budget.Charge {
	return []budget.Charge{{Scope: c.Thing, Amount: c.Amount, Limits: limits}}
}

// limits are those of a call: whatever their kind, they let in as many units, since no history takes as long.
func limits(c call) []budget.Limit {
	const long = 3660 * 24 * time.Hour
	lifetime, window := budget.Lifetime(c.Limit), budget.PerWindow(c.Limit, long)
	period := budget.PerPeriod(c.Limit, long, time.Now().Add(-long/2).Truncate(time.Hour))
	return [][]budget.Limit{{lifetime}, {window}, {period}, {lifetime, period}, {window, period}}[c.Dice/6%5]
}

// in makes a call in a transaction.
func (a *app) in(ctx context.Context, tx pgx.Tx, kind string, c call, r *reply) (err error) {
	key := holds.Key{Type: "key", Value: c.Thing}
	switch kind + " " + c.Kind {
	case "scope charge", "child leased charge":
		charge := charges(c, limits(c)...)
		if kind == "child" {
			charge = charges(c, budget.Prepaid(0))
		}
		var charged budget.Receipt
		if charged, err = a.c.Budget.Charge(ctx, tx, charge...); err == nil {
			r.Seq = charged.Entries[0].Seq
		}
	case "scope refund":
		_, err = a.c.Budget.Refund(ctx, tx, budget.Refund{Scope: c.Thing, Seq: c.Seq, Amount: c.Amount})
	case "wallet charge":
		_, err = drawn(ctx, tx, a.c.Budget, a.wallets, c.Thing, c.Amount)
	case "wallet credit":
		_, err = a.wallets.Grant(ctx, tx, ending(wallet.Grant{Wallet: c.Thing, Amount: c.Amount}, time.Duration(1+c.Dice%3)*time.Hour))
	case "hold place":
		var h holds.Hold
		h, err = a.c.Holds.Place(ctx, tx, placement{ID: c.Thing, TTL: time.Hour, Lines: []holds.Line{{Scope: "held " + c.Thing, Amount: 1}}})
		if err == nil && !h.Created {
			err = holds.ErrState // it was placed before
		}
	case "hold capture":
		_, err = a.c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{c.Thing}, All: true})
	case "hold release":
		_, err = a.c.Holds.Release(ctx, tx, holds.Release{IDs: []string{c.Thing}})
	case "claim claim":
		_, err = a.c.Holds.Claim(ctx, tx, holds.Claim{Key: key, Holder: c.Who, TTL: time.Hour})
	case "claim let go":
		var list holds.Page
		if list, err = a.c.Holds.List(ctx, tx, holds.Filter{Claim: key, Holder: c.Who, State: holds.Held}); err != nil {
			return err
		}
		if len(list.Holds) == 0 {
			return holds.ErrUnknown
		}
		_, err = a.c.Holds.Release(ctx, tx, holds.Release{IDs: []string{list.Holds[0].ID}})
	case "token mint":
		var m tokens.Minted
		m, err = a.c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: c.Thing})
		r.Answer.State = m.Token.Reveal()
	case "token consume":
		_, err = a.c.Tokens.Consume(ctx, tx, "p", c.Thing, c.Token)
	default:
		panic("no such call: " + kind + " " + c.Kind)
	}
	return err
}
