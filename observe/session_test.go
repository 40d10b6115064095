package observe_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The observer gets one event when a session opens, one for each renewal, and one that says how it ended.
func TestObserver_HearsOfSessions(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	var r pgtest.Recorder
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &r}, Holds: holds.Config{MinTTL: time.Second}})
	open := func(id string, ttl time.Duration) *metered.Session[any] {
		s, err := metered.Open[any](ctx, c, metered.Reservation{ID: id, TTL: ttl, Grace: 10 * time.Minute,
			Lines: []holds.Line{{Scope: "s/" + id, Amount: 5, Limits: []budget.Limit{budget.Lifetime(100)}}}})
		require.NoError(t, err)
		return s
	}
	told := func() (names []string) {
		for _, text := range r.Told() {
			if name, ok := strings.CutPrefix(text, "session "); ok {
				names = append(names, strings.TrimSuffix(name, " 1"))
			}
		}
		return names
	}
	hears := func(name string) {
		t.Helper()
		pgtest.WaitFor(t, "the observer to hear "+name, func() bool { return slices.Contains(told(), name) })
	}

	s := open("settled", time.Minute)
	_, err := s.Settle(ctx, metered.Cost{All: true}, nil)
	require.NoError(t, err)
	_, err = s.Settle(ctx, metered.Cost{All: true}, nil) // which is answered by the record
	require.NoError(t, err)
	s.Close()
	require.Equal(t, []string{"opened", "settled"}, told())
	r.Forget()

	again := open("settled", time.Minute)
	require.True(t, again.Finished())
	again.Close()
	require.Empty(t, told(), "nothing is reserved")

	s = open("cancelled", time.Minute)
	for range 2 {
		require.NoError(t, s.Cancel(ctx, "no more"))
	}
	open("abandoned", time.Minute).Close()
	require.Equal(t, []string{"opened", "cancelled", "opened", "abandoned"}, told())
	r.Forget()

	s = open("lost", time.Minute)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := c.Holds.Release(ctx, tx, holds.Release{IDs: []string{s.Hold().ID}})
		return err
	}))
	_, err = s.Settle(ctx, metered.Cost{All: true}, nil)
	require.ErrorIs(t, err, metered.ErrLost)
	s.Close()
	require.Equal(t, []string{"opened", "lost"}, told())
	r.Forget()

	for n := 0; !slices.Contains(told(), "renewed"); n++ { // again if the machine stood still for as long as the session lasted
		require.Less(t, n, 5)
		s = open(fmt.Sprint("renewed ", n), 12*time.Second)
		pgtest.WaitFor(t, "a renewal", func() bool { return slices.Contains(told(), "renewed") || s.Context().Err() != nil })
		s.Close()
	}
	r.Forget()

	s = open("stuck", time.Second)
	release := pgtest.LockScope(t, pool, c, "s/stuck")
	hears("not_renewed")
	release()
	require.NoError(t, s.Cancel(ctx, "over"))
	require.Equal(t, "cancelled", told()[len(told())-1])
}
