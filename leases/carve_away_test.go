package leases_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// relay plays the messages of one child between two clusters, without the records that make each message happen once.
type relay struct {
	home, away *carving
	clock      *pgtest.Clock
	child      string
	ends       time.Time
	used       int64   // units that charges of the child took
	reports    []int64 // messages to home: units used
}

func (r *relay) receive(amount int64, ends time.Time) {
	var l leases.Lease
	err := r.away.in(pgx.ReadCommitted, func(tx pgx.Tx) (err error) {
		l, err = r.away.carver.Receive(r.away.Context(), tx, leases.Lease{Child: r.child, Granted: amount, EndsAt: ends}, budget.Note{})
		return err
	})
	switch {
	case errors.Is(err, leases.ErrChildUsed):
		r.reports = append(r.reports, 0)
	case !l.SettledAt.IsZero():
		r.reports = append(r.reports, l.Spent)
	}
	if !errors.Is(err, leases.ErrChildUsed) {
		require.NoError(r.away, err)
	}
}

// acts are the steps that can come next, by name.
func (r *relay) acts() map[string]func() {
	f := r.away
	return map[string]func(){
		"credit": func() { r.receive(100, r.ends) },
		"charge": func() {
			err := f.charge(pgx.ReadCommitted, r.child, 60, budget.Prepaid(0))
			if err == nil {
				r.used += 60
			} else {
				var scope *budget.ScopeError
				require.True(f, errors.Is(err, budget.ErrExceeded) || errors.As(err, &scope), err)
			}
		},
		"close": func() {
			l, err := f.close(pgx.ReadCommitted, r.child)
			if errors.Is(err, leases.ErrUnknownChild) {
				r.receive(0, r.ends)
				return
			}
			require.NoError(f, err)
			r.reports = append(r.reports, l.Spent)
		},
		"report": func() { // the last one is the first to arrive
			if len(r.reports) > 0 {
				r.settle(r.home, r.reports[len(r.reports)-1])
			}
		},
		"note": func() { // a message that home has answered is noted, or its worker died before
			if l, err := r.home.carver.Get(f.Context(), r.home.db, r.child); err == nil && !l.SettledAt.IsZero() && len(r.reports) > 0 {
				r.settle(f, r.reports[0])
			}
		},
		"purge": func() {
			_, err := f.db.Exec(f.Context(), `select metered.purge_leases(null, 'infinity', 10000)`)
			require.NoError(f, err)
		},
		"forget": func() {
			_, err := f.db.Exec(f.Context(), `select metered.purge_scope($1, $2, 'infinity', 0, 100000, 1000, true)`, r.child, f.ledger.LockKey(r.child))
			require.NoError(f, err)
		},
		"end": func() { r.clock.Advance(2 * time.Hour) },
	}
}

func (r *relay) settle(on *carving, units int64) {
	err := on.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := on.carver.SettleAway(context.Background(), tx, r.child, units, budget.Note{})
		return err
	})
	if !errors.Is(err, leases.ErrUnknownChild) {
		require.NoError(on, err)
	}
}

// Home captures exactly the units that a child on another cluster used, and no unit is used twice: with messages that come again and in any
// order, workers that die between two steps, and purges between them, which forget the child's entries or its row. The short form finds
// a late message that makes credit (receive_child without 'late').
func TestCarve_MessagesOfAnotherClusterComeInAnyOrder(t *testing.T) {
	t.Parallel()
	seed := pgtest.Seed(t)
	random := rand.New(rand.NewPCG(seed, 0))
	home, away := carver(t, 1<<40), carver(t, 0)
	clock := pgtest.SetClock(t, away.db, time.Now())
	for n := range pgtest.Size(60, 3_000) {
		r := &relay{home: home, away: away, clock: clock, child: fmt.Sprint("run/", n)}
		require.NoError(t, home.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := home.carver.Carve(t.Context(), tx, leases.Carving{Child: r.child, From: budget.Charge{Scope: "user", Amount: 100}, TTL: time.Hour, Away: true})
			return err
		}))
		r.ends = clock.Now().Add(time.Hour)
		acts := r.acts()
		var names, done []string
		for name := range acts {
			names = append(names, name)
		}
		slices.Sort(names)
		do := func(name string) {
			done = append(done, name)
			acts[name]()
			clock.Advance(time.Second)
		}
		do([]string{"credit", "close", "end"}[max(0, random.IntN(8)-5)])
		for range 12 {
			do(names[random.IntN(len(names))])
			if done[len(done)-1] == "end" && random.IntN(2) > 0 {
				do("credit") // again, after the end
			}
		}
		do("close")
		for range r.reports {
			do("report")
		}
		l, err := home.carver.Get(t.Context(), home.db, r.child)
		require.NoError(t, err)
		require.Equal(t, r.used, l.Spent, "seed %d: %v, with reports %v", seed, done, r.reports)
		require.LessOrEqual(t, r.used, int64(100), "seed %d: %v", seed, done)
		for _, name := range []string{"note", "forget", "purge", "credit", "charge"} {
			do(name)
		}
		require.Equal(t, l.Spent, r.used, "seed %d: %v", seed, done)
	}
	clock.Advance(2 * time.Hour)
	home.verified()
	away.verified()
}

// A message about a child that got nothing writes no entry: it closes no scope, which another may use, and the child is not carved for anew.
func TestReceive_OfNothingClosesNoScope(t *testing.T) {
	t.Parallel()
	f := carver(t, 100)
	for _, r := range []leases.Lease{{Child: "none", EndsAt: time.Now()}, {Child: "late", Granted: 5, EndsAt: time.Now().Add(-time.Minute)}} {
		require.NoError(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			l, err := f.carver.Receive(t.Context(), tx, r, budget.Note{})
			require.NotZero(t, l.SettledAt)
			return err
		}))
		_, err := f.carve(pgx.ReadCommitted, r.Child, "user", 10)
		require.ErrorIs(t, err, leases.ErrChildUsed)
		require.NoError(t, f.charge(pgx.ReadCommitted, r.Child, 1))
		f.stands(r.Child, 1, 0, 0)
	}
}
