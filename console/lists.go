package console

import (
	"cmp"
	"context"
	"net/url"
	"strconv"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/jobs"
)

const listed = 50 // rows of a page

func (h *Handler) scopes(ctx context.Context, in *inspect.Reader, q url.Values) (page, error) {
	f := inspect.ScopeFilter{Prefix: q.Get("prefix"), After: q.Get("after"),
		Kind: inspect.ScopeKind(q.Get("kind")), Limit: listed}
	if f.Kind == inspect.Planned {
		f.Plan = inspect.PlanNames(q.Get("plan"))
	}
	list, err := in.Scopes(ctx, f)
	if err != nil {
		return page{}, err
	}
	var wallets []string
	for _, s := range list.Scopes {
		if f.Kind == inspect.Planned || f.Kind == inspect.Wallets {
			wallets = append(wallets, s.Scope)
		}
	}
	found, err := in.Plans(ctx, wallets, cmp.Or(f.Plan, "*"))
	plans := map[string][]inspect.Plan{}
	for _, p := range found {
		plans[p.Wallet] = append(plans[p.Wallet], p)
	}
	return page{Title: "Scopes", Active: "Scopes", Data: map[string]any{
		"Prefix": f.Prefix, "Kind": f.Kind, "Plan": f.Plan, "List": list, "Plans": plans,
		"Wallets": wallets != nil,
		"Kinds":   []inspect.ScopeKind{inspect.Wallets, inspect.Planned, inspect.Reached},
	}}, err
}

func (h *Handler) holds(ctx context.Context, in *inspect.Reader, q url.Values) (page, error) {
	scope, state := q.Get("scope"), holds.State(q.Get("state"))
	list, err := in.Holds(ctx, inspect.HoldFilter{Scope: scope, State: state, After: q.Get("after"),
		Limit: listed})
	return page{Title: "Holds", Active: "Holds", Data: map[string]any{
		"Scope": scope, "State": state, "List": list,
		"States": []holds.State{holds.Held, holds.Captured, holds.Released, holds.Expired,
			holds.Returned},
	}}, err
}

func (h *Handler) leases(ctx context.Context, in *inspect.Reader, q url.Values) (page, error) {
	scope, state := q.Get("scope"), inspect.LeaseState(q.Get("state"))
	list, err := in.Leases(ctx, inspect.LeaseFilter{Scope: scope, State: state,
		After: q.Get("after"), Limit: listed})
	return page{Title: "Leases", Active: "Leases", Data: map[string]any{
		"Scope": scope, "State": state, "List": list,
		"States": []inspect.LeaseState{inspect.LeaseOpen, inspect.LeaseOut, inspect.LeaseEnded,
			inspect.LeaseSettled},
	}}, err
}

func (h *Handler) operations(ctx context.Context, in *inspect.Reader, q url.Values) (page, error) {
	name, state := q.Get("name"), inspect.OperationState(q.Get("state"))
	list, err := in.Operations(ctx, inspect.OperationFilter{Name: name, State: state,
		After: q.Get("after"), Limit: listed})
	return page{Title: "Operations", Active: "Operations", Data: map[string]any{
		"Name": name, "State": state, "List": list,
		"States": []inspect.OperationState{inspect.Committed, inspect.Refused},
	}}, err
}

// hold shows a hold and its history. Unswept says that it has expired, and that the history does
// not know yet.
func (h *Handler) hold(ctx context.Context, in *inspect.Reader, q url.Values) (page, error) {
	d, err := in.Hold(ctx, q.Get("tenant"), q.Get("id"))
	if err != nil {
		return page{}, err
	}
	unswept := d.Hold.State == holds.Expired && len(d.History) > 0 &&
		d.History[len(d.History)-1].Kind != holds.EventExpired
	return page{
		Title: "Hold " + printable(d.Hold.ID), Active: "Holds", Now: d.Hold.Now,
		Stream: streamOf("hold", url.Values{"tenant": {d.Hold.Tenant}, "id": {d.Hold.ID}}),
		Data:   map[string]any{"Hold": d.Hold, "History": d.History, "Unswept": unswept},
	}, nil
}

func (h *Handler) operation(ctx context.Context, in *inspect.Reader, q url.Values) (page, error) {
	d, err := in.Operation(ctx, q.Get("tenant"), q.Get("id"))
	return page{Title: "Operation " + printable(d.ID), Active: "Operations", Now: d.Now, Data: d},
		err
}

// job is a job that waits for budget, and what keeps it.
func (h *Handler) job(ctx context.Context, in *inspect.Reader, q url.Values) (page, error) {
	id, err := strconv.ParseInt(q.Get("id"), 10, 64)
	if err != nil {
		return page{}, jobs.ErrNotParked
	}
	p, err := in.ParkedJob(ctx, id)
	return page{Title: "Job " + q.Get("id"), Active: "Overview", Data: p}, err
}
