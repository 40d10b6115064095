package main

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The cleanup jobs run on a real River worker, when the test lets time go by.
func TestCleanup_EndsAndAnnouncesAHoldOnceAndLeavesTheOthersAlone(t *testing.T) {
	t.Parallel()
	cfg := quiet
	cfg.background = true
	h := open(t, 1, cfg)
	clock := pgtest.SetClock(t, h.pool, noon)
	book := h.apps[0].metered.Holds
	var expired atomic.Int64
	listening := make(chan struct{}, 100)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		_ = book.Listen(ctx, h.pool, holds.ListenOptions{}, func(_ context.Context, n holds.Notice) error {
			if n.Kind == holds.EventExpired {
				expired.Add(1)
			}
			listening <- struct{}{}
			return nil
		})
	}()
	<-listening

	people := h.people(h.org, 2)
	ben, cleo := people[0], people[1]
	gone, sold, given, kept := ben.holding(h.seats[0]), ben.holding(h.seats[1]), ben.holding(h.seats[2]), ben.holding(h.seats[3])
	retaken := ben.holding(h.seats[4])
	require.Equal(t, http.StatusOK, ben.checkout("", sold).status)
	require.Equal(t, http.StatusOK, ben.cancel(given).status)
	require.NoError(t, pgx.BeginFunc(ctx, h.pool, func(tx pgx.Tx) error {
		_, err := book.Extend(ctx, tx, holds.Extend{Tenant: h.org, IDs: []string{kept}, By: 30 * time.Minute})
		return err
	}))
	clock.Advance(5 * time.Minute)
	successor := cleo.holding(h.seats[4])
	clock.Advance(10 * time.Second)
	require.Equal(t, 1, one[int](h, `select count(*)::int from hall.seats where state = 'held' and hold = $1`, gone), "not written down so far")

	for range 2 { // and a second run
		h.exec(`update river_job set state = 'available', scheduled_at = now(), finalized_at = null where args->>'id' <> $1`, successor)
		require.Eventually(t, func() bool {
			return one[int](h, `select count(*)::int from river_job where state = 'completed'`) == 4 &&
				one[int](h, `select count(*)::int from river_job where args->>'id' = $1 and state = 'scheduled'`, kept) == 1
		}, 2*time.Minute, 10*time.Millisecond)
	}
	for id, want := range map[string]holds.State{gone: holds.Expired, sold: holds.Captured, given: holds.Released, kept: holds.Held, retaken: holds.Expired, successor: holds.Held} {
		hold, err := book.Get(ctx, h.pool, h.org, id, "")
		require.NoError(t, err)
		require.Equal(t, want, hold.State)
	}
	require.Equal(t, sorted([]string{gone, retaken}), sorted(all[string](h, `select hold from hall.audit where action = 'expired'`)))
	require.Eventually(t, func() bool { return expired.Load() == 2 }, 10*time.Second, 5*time.Millisecond)
	require.Equal(t, "free", one[string](h, `select state from hall.seats where id = $1`, h.seats[0]))
	require.Equal(t, successor, one[string](h, `select hold from hall.seats where id = $1`, h.seats[4]), "the seat's next holder is not touched")
	require.Equal(t, http.StatusCreated, cleo.hold(h.seats[0]).status)
	h.verify()
}
