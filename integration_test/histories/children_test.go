package main

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// children are scopes of the other cluster that get a part of a scope of the first. The steps of a child are made by any client in any order,
// also again, while either cluster is down.
type children struct {
	mu            sync.Mutex
	carved, ended map[string]leases.Lease // as acknowledged
}

const part = 12 // units of a child

// known is the lease of a child in one of the maps.
func (c *children) known(of map[string]leases.Lease, child string) (leases.Lease, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, ok := of[child]
	return l, ok
}

func (c *children) note(of map[string]leases.Lease, l leases.Lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of[l.Child] = l
}

// child makes a step of a child.
func (w *world) child(n int, child string) bool {
	if w.phase.Load() == before {
		return true
	}
	switch pgtest.Random(w.T).IntN(10) {
	case 0:
		return w.carve(child) == nil
	case 1:
		return w.receive(child) == nil
	case 2:
		if pgtest.Random(w.T).IntN(4) > 0 { // not before it has spent some
			return true
		}
		return w.endChild(child) == nil
	case 3:
		return w.settleChild(child) == nil
	}
	// Refused before it has its units, and after its end.
	return w.record(n, call{Thing: child, Kind: "leased charge", ID: metered.NewID(), Amount: 1 + pgtest.Random(w.T).Int64N(4), Limit: part}, w.other.perform).Outcome == done
}

// parent is the scope of which a child gets its part.
func parent(child string) string { return "parent of " + child[:strings.LastIndex(child, "/")] }

// step is a transaction of a child, on one of the clusters.
func (w *world) step(on *cluster, fn func(ctx context.Context, tx pgx.Tx) error) error {
	w.ended.Add(1)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return on.c.RunTx(ctx, pgx.TxOptions{}, fn)
}

func (w *world) carve(child string) error {
	var l leases.Lease
	err := w.step(&w.cluster, func(ctx context.Context, tx pgx.Tx) (err error) {
		l, err = w.carver.Carve(ctx, tx, leases.Carving{Child: child, Away: true, TTL: 100 * time.Hour,
			From: budget.Charge{Scope: parent(child), Amount: part, Limits: []budget.Limit{budget.Lifetime(1000 * part)}}})
		return err
	})
	if err == nil {
		w.children.note(w.children.carved, l)
	}
	return err
}

func (w *world) receive(child string) error {
	l, ok := w.children.known(w.children.carved, child)
	if !ok {
		return nil
	}
	return w.step(w.other, func(ctx context.Context, tx pgx.Tx) error {
		_, err := w.other.carver.Receive(ctx, tx, l, budget.Note{})
		return err
	})
}

func (w *world) endChild(child string) error {
	if _, ok := w.children.known(w.children.carved, child); !ok {
		return nil
	}
	var l leases.Lease
	err := w.step(w.other, func(ctx context.Context, tx pgx.Tx) (err error) {
		l, err = w.other.carver.End(ctx, tx, child, budget.Note{})
		return err
	})
	if err == nil && !l.SettledAt.IsZero() {
		w.children.note(w.children.ended, l)
	}
	return err
}

func (w *world) settleChild(child string) error {
	l, ok := w.children.known(w.children.ended, child)
	if !ok {
		return nil
	}
	for _, on := range []*cluster{&w.cluster, w.other} {
		if err := w.step(on, func(ctx context.Context, tx pgx.Tx) error {
			_, err := on.carver.SettleAway(ctx, tx, child, l.Spent, budget.Note{})
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// settleChildren ends every child, and compares the spending of both clusters with the charges that took effect.
func (w *world) settleChildren(spent map[string]int64) {
	ctx := w.Context()
	rows, err := w.pool.Query(ctx, "select child from metered.leases where child is not null")
	require.NoError(w.T, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(w.T, err)
	used := map[string]int64{}
	for _, child := range names {
		for _, step := range []func(string) error{w.carve, w.receive, w.endChild, w.settleChild} {
			pgtest.WaitFor(w.T, "a step of "+child, func() bool { return step(child) == nil })
		}
		l, err := w.carver.Get(ctx, w.pool, child)
		require.NoError(w.T, err)
		require.False(w.T, l.SettledAt.IsZero())
		require.Equal(w.T, spent[child], l.Spent, "%s: of the charges on the other cluster", child)
		used[parent(child)] += l.Spent
	}
	for scope, units := range used {
		u, err := w.c.Budget.Usage(ctx, w.pool, budget.Query{Scope: scope})
		require.NoError(w.T, err)
		require.Equal(w.T, units, u[0].Used, scope)
		require.Zero(w.T, u[0].Held, scope)
	}
	for child := range spent {
		require.True(w.T, spent[child] == 0 || slices.Contains(names, child), "%s spent and was never carved", child)
	}
}
