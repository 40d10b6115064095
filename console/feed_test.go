package console_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The overview shows who is behind in the feed, and for whom purges keep entries. Where nobody
// consumes the feed it shows nothing.
func TestPages_ShowConsumersOfTheFeed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	clock := pgtest.SetClock(t, w.pool, pgtest.Tomorrow(9))
	consume := func(name string, most int, patience time.Duration) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
			page, err := w.client.Budget.ConsumeFeed(t.Context(), tx, name,
				budget.FeedOptions{Max: most, Patience: patience})
			require.Len(t, page, most)
			return err
		}))
	}
	for _, scope := range []string{"a", "a", "b"} {
		w.charge(scope, 1)
		clock.Advance(time.Minute)
	}
	require.NotContains(t, text(w.see("")), "Consumers of the feed")

	numbered, err := w.client.Budget.NumberFeed(t.Context(), w.pool)
	require.NoError(t, err)
	require.EqualValues(t, 3, numbered)
	require.NotContains(t, text(w.see("")), "Consumers of the feed", "numbers alone are no consumer")
	consume("bill <b>", 1, 36*time.Hour)
	consume("done", 3, time.Hour)
	clock.Advance(time.Hour)
	shown := text(byID(t, w.see(""), "feed"))
	require.Regexp(t, `bill <b> 2 1 h 2 min \S+ 09:03:00 1 d 12 h yes done 0 – \S+ 09:03:00 1 h 0 min no `,
		shown)
	require.Regexp(t, `All entries that were committed before \S+ 09:03:00 have one`, shown)

	dropped := false
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) (err error) {
		for _, name := range []string{"bill <b>", "done"} {
			if dropped, err = w.client.Budget.DropFeedConsumer(t.Context(), tx, name); err != nil {
				return err
			}
			require.True(t, dropped)
		}
		return nil
	}))
	require.NotContains(t, text(w.see("")), "Consumers of the feed")
}
