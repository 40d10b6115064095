package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
)

// payments is the service of somebody else that takes the money: slow, and outside of any transaction. Each attempt at a
// checkout has a payment of its own, with a fresh id. A payment that is refused is errDeclined.
type payments interface {
	authorise(ctx context.Context, id string, cents int64) (reference string, err error)
	void(ctx context.Context, reference string) error
}

// pretended takes its time.
type pretended struct{ takes time.Duration }

func (p pretended) authorise(ctx context.Context, id string, _ int64) (string, error) {
	select {
	case <-time.After(p.takes):
		return "pay_" + id, nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (pretended) void(context.Context, string) error { return nil }

// order is the result of a checkout.
type order struct {
	ID      string   `json:"order_id"`
	Holds   []string `json:"holds"`
	Cents   int64    `json:"cents"`
	Payment string   `json:"payment"`
}

func (a *app) serveCheckout(w http.ResponseWriter, r *request) error {
	var body struct {
		Holds []string `json:"holds"`
	}
	if err := decode(w, r, &body); err != nil {
		return err
	}
	if len(body.Holds) == 0 || len(body.Holds) > 100 {
		return badRequest("holds are too few or too many")
	}
	slices.Sort(body.Holds)
	if len(slices.Compact(slices.Clone(body.Holds))) != len(body.Holds) || slices.ContainsFunc(body.Holds, func(id string) bool { return !holdForm.MatchString(id) }) {
		return badRequest("holds are not ids, each of them once")
	}
	o, err := a.checkout(r.Context(), r, body.Holds)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, o)
}

const priceSQL = `
select coalesce(sum(b.cents), 0), count(*)
from hall.seats s join hall.blocks b on b.id = s.block join hall.events e on e.id = s.event
where e.id = $1 and e.org = $2 and s.hold = any ($3) and s.holder = $4`

// checkout pays for holds and makes them an order, all or none. The seats stay held while the payment is on its way,
// and no transaction is open. If a hold expires meanwhile the capture is refused, and the payment given back.
//
// A payment never serves two attempts: one that was given back would pay for the next, and one that paid for an order
// would be given back by a repeated request. After an unknown outcome, or the end of the process, a payment may stay
// authorised. Compare the provider's payments with hall.orders.payment, and give back those that no order has after a
// while.
func (a *app) checkout(ctx context.Context, r *request, ids []string) (order, error) {
	o := order{Holds: ids}
	_, err := a.metered.Lookup(ctx, a.pool, r.who.tenant(), r.operation)
	if replay := err == nil; !replay {
		if !errors.Is(err, metered.ErrUnknownOperation) {
			return order{}, err
		}
		var found int
		if err := a.pool.QueryRow(ctx, priceSQL, r.event, r.who.Org, ids, r.who.User).Scan(&o.Cents, &found); err != nil {
			return order{}, err
		}
		if found != len(ids) {
			return order{}, a.whyNot(ctx, r, ids)
		}
		if o.Payment, err = a.payments.authorise(ctx, metered.NewID(), o.Cents); err != nil {
			return order{}, err
		}
	}
	out, err := metered.Do(ctx, a.metered, metered.Command{
		ID: r.operation, Tenant: r.who.tenant(), Name: "checkout", Input: append([]string{r.event}, ids...),
	}, func(ctx context.Context, tx *metered.Tx) (order, error) { return a.sell(ctx, tx, r, o) })
	unused := err == nil && out.Result.Payment != o.Payment || err != nil && !errors.Is(err, metered.ErrIndefinite)
	if o.Payment != "" && unused { // there is no order with it, and will be none
		a.giveBack(ctx, o.Payment)
	}
	return out.Result, err
}

// giveBack voids a payment that no order has, also if the client has gone.
func (a *app) giveBack(ctx context.Context, payment string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	if err := a.payments.void(ctx, payment); err != nil {
		slog.Error("a payment was not given back", "payment", payment, "error", err)
	}
}

// With the ways by which the holds that are paid for were made.
const payingSQL = `
select (select coalesce(array_agg(distinct s.source), '{}') from hall.seats s where s.event = e.id and s.hold = any ($3) and s.source is not null),
    ` + eventColumns + `
from (select metered.clock() as now) c, hall.events e
where e.id = $1 and e.org = $2`

const orderSQL = `
insert into hall.orders (id, org, event, buyer, holds, cents, payment) values ($1, $2, $3, $4, $5, $6, $7)`

// sell is the part of the checkout that is one transaction.
func (a *app) sell(ctx context.Context, tx *metered.Tx, r *request, o order) (order, error) {
	var e hallEvent
	var vias []string
	row := append([]any{&vias}, e.columns()...)
	if err := selling(ctx, tx, r.who.Org, r.event, row, payingSQL, r.event, r.who.Org, o.Holds); err != nil {
		return order{}, err
	}
	for _, via := range vias {
		if err := e.refusesPayment(sources[via]); err != nil {
			return order{}, err
		}
	}
	o.ID = metered.NewID()
	if _, err := tx.Exec(ctx, orderSQL, o.ID, r.who.Org, r.event, r.who.User, o.Holds, o.Cents, o.Payment); err != nil {
		return order{}, err
	}
	return o, tx.Capture(holds.Capture{
		Tenant: r.who.Org, IDs: o.Holds, Holder: r.who.User, All: true, Entity: "order/" + o.ID, Note: r.note(""),
	})
}

// whyNot finds the reason why holds cannot be paid for. The holds of others do not exist.
func (a *app) whyNot(ctx context.Context, r *request, ids []string) error {
	for _, id := range ids {
		h, err := a.metered.Holds.Get(ctx, a.pool, r.who.Org, id, r.who.User)
		if err != nil {
			return err
		}
		if h.State != holds.Held {
			return &holds.StateError{ID: id, State: h.State, Hold: h}
		}
	}
	return errNotFound // held, for another event
}
