package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

// callsSQL is the application's own table of tool calls. Units are thousandths of a cent.
const callsSQL = `create table calls (run text, id text, tool text, units bigint, primary key (run, id))`

// office is where agents' runs get their budgets.
type office struct {
	db     *pgxpool.Pool
	client *metered.Client
	carver *leases.Carver
}

func newOffice(db *pgxpool.Pool) (*office, error) {
	client, err := metered.New(db, metered.Config{})
	if err != nil {
		return nil, err
	}
	carver, err := leases.NewCarver(client.Budget)
	return &office{db, client, carver}, err
}

// monthly is the limit of a user's agents. It judges a run's budget once, when the run begins.
var monthly = []budget.Limit{budget.Per(1_000, budget.Month, time.UTC, time.Time{}).Named("month")}

func userScope(user string) string { return budget.ScopeKey("user", user, "") }

// run is an agent at work, with a budget that nobody else can take.
type run struct {
	*office
	scope string // of its budget. Its calls' ids are its own, too
}

// work begins a run with a part of the user's budget, and ends it when f returns, even if ctx is cancelled by then.
// Its unused units are the user's again. If the same id is begun again while it is open, after a crash, the run goes
// on with the units that it has left.
//
// Nobody ends the run of a killed process. leases.Sweep, or maintain.Run, ends it after so long.
func (o *office) work(ctx context.Context, user, id string, units int64, after time.Duration, f func(context.Context, *run) error) (leases.Lease, error) {
	return o.within(ctx, ofUser(user, id, units, after), f)
}

func ofUser(user, id string, units int64, after time.Duration) leases.Carving {
	return leases.Carving{
		Child: budget.ScopeKey("run", id, ""), TTL: after,
		From: budget.Charge{Scope: userScope(user), Amount: units, Limits: monthly, Note: budget.Note{Actor: user, Reason: "run " + id}},
	}
}

// sub gives an agent of this run a part of the run's budget, in the same way. It ends no later than the run.
func (r *run) sub(ctx context.Context, name string, units int64, after time.Duration, f func(context.Context, *run) error) (leases.Lease, error) {
	return r.within(ctx, r.part(name, units, after), f)
}

func (r *run) part(name string, units int64, after time.Duration) leases.Carving {
	return leases.Carving{
		Child: r.scope + "/" + name, TTL: after,
		From: budget.Charge{Scope: r.scope, Amount: units, Limits: []budget.Limit{budget.Prepaid(0)}},
	}
}

func (o *office) within(ctx context.Context, carving leases.Carving, f func(context.Context, *run) error) (lease leases.Lease, err error) {
	r, err := o.begin(ctx, carving)
	if err != nil {
		return lease, err // a refused run took nothing
	}
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		var failed error
		lease, failed = r.end(ending)
		err = errors.Join(err, failed)
	}()
	return lease, f(ctx, r)
}

func (o *office) begin(ctx context.Context, carving leases.Carving) (*run, error) {
	return &run{o, carving.Child}, pgx.BeginFunc(ctx, o.db, func(tx pgx.Tx) error {
		_, err := o.carver.Carve(ctx, tx, carving)
		return err
	})
}

func (r *run) end(ctx context.Context) (lease leases.Lease, err error) {
	err = pgx.BeginFunc(ctx, r.db, func(tx pgx.Tx) (err error) {
		lease, err = r.carver.End(ctx, tx, r.scope, budget.Note{})
		return err
	})
	return lease, err
}

// call is a tool call: the tool's writes and its cost commit together. An agent that did not hear the answer sends it
// again with its id, gets the answer again and pays nothing. Calls of one run may run at once. budget.ErrExceeded
// means that the run's budget is used up, budget.ErrScopeClosed that the run is over.
//
// For a tool that knows its cost only afterwards, such as a model, hold units on the run's scope first. The hold can
// be captured even after the run's end.
func (r *run) call(ctx context.Context, id, tool string, units int64) (left int64, replayed bool, err error) {
	out, err := metered.Do(ctx, r.client, metered.Command{
		ID: id, Tenant: r.scope, Name: tool,
		Charges: []budget.Charge{{Scope: r.scope, Amount: units, Limits: []budget.Limit{budget.Prepaid(0)}}},
	}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Exec(ctx, `insert into calls (run, id, tool, units) values ($1, $2, $3, $4)`, r.scope, id, tool, units)
		return nil, err
	})
	if err != nil || out.Replayed {
		return 0, out.Replayed, err
	}
	return out.Receipt.Entries[0].Standings[0].Available, false, nil
}

// left is the rest of the user's month, and used is the spent part.
func (o *office) left(ctx context.Context, user string) (used, left int64, err error) {
	usage, err := o.client.Budget.Usage(ctx, o.db, budget.Query{Scope: userScope(user), Period: monthly[0].Period})
	if err != nil {
		return 0, 0, err
	}
	return usage[0].Used, usage[0].Available(monthly[0].Max), nil
}
