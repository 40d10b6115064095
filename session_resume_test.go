package metered_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func byID(id string) metered.Reservation { return metered.Reservation{ID: id, Tenant: "acme"} }

func TestResume_AnotherProcessSettlesAndTheFirstComesBack(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, c := pgtest.SetUp(t, metered.Config{})
	other := pgtest.NewClient(t, pgtest.Reopen(t, owner, func(*pgxpool.Config) {}), metered.Config{})
	first, err := metered.Open[usage](ctx, c, stream("op"))
	require.NoError(t, err)
	defer first.Close()
	second, err := metered.Resume[usage](ctx, other, byID("op"))
	require.NoError(t, err)
	require.Equal(t, first.Hold().ID, second.Hold().ID)
	require.NoError(t, second.Context().Err())
	_, err = second.Settle(ctx, metered.Cost{Lines: []holds.Line{{Scope: "others", Amount: 1}}}, nil)
	require.ErrorContains(t, err, "Cost.Lines[0].Scope")
	settled, err := second.Settle(ctx, tokensUsed(30), says(30))
	require.NoError(t, err)
	require.False(t, settled.Replayed)

	again, err := first.Settle(ctx, tokensUsed(30), says(31))
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, usage{30}, again.Result)
	_, err = first.Settle(ctx, tokensUsed(7), says(7))
	require.ErrorIs(t, err, metered.ErrConflict)
	require.ErrorIs(t, first.Cancel(ctx, ""), metered.ErrLost)
	require.Equal(t, [2]int64{30, 0}, stands(t, owner, c, "tokens"))
	require.EqualValues(t, 1, pgtest.Count(t, owner, "metered.operations"))

	reopened, err := metered.Open[usage](ctx, c, stream("op"))
	require.NoError(t, err)
	require.True(t, reopened.Finished(), "the record has the fingerprint of Open")
	finished, err := metered.Resume[usage](ctx, other, byID("op"))
	require.NoError(t, err)
	require.True(t, finished.Finished())
	require.Equal(t, usage{30}, finished.Outcome().Result)
	_, err = finished.Settle(ctx, tokensUsed(30), nil)
	require.NoError(t, err)
	_, err = finished.Settle(ctx, tokensUsed(29), nil)
	require.ErrorIs(t, err, metered.ErrConflict)
}

func TestResume_CancelsAndFindsNothingWhereNothingIsOpen(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, c := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, owner, pgtest.Tomorrow(12))
	_, err := metered.Resume[usage](ctx, c, byID("op"))
	require.ErrorIs(t, err, metered.ErrLost)
	require.NotErrorIs(t, err, metered.ErrFinished)
	_, err = metered.Resume[usage](ctx, c, metered.Reservation{})
	require.ErrorContains(t, err, "Reservation.ID")

	r := stream("op")
	r.Holder = "ann"
	first, err := metered.Open[usage](ctx, c, r)
	require.NoError(t, err)
	foreign := byID("op")
	foreign.Holder = "ben"
	for _, wrong := range []metered.Reservation{foreign, {ID: "op", Tenant: "another"}, byID("o")} {
		_, err = metered.Resume[usage](ctx, c, wrong)
		require.ErrorIs(t, err, metered.ErrLost)
	}
	second, err := metered.Resume[usage](ctx, c, byID("op"))
	require.NoError(t, err)
	require.NoError(t, second.Cancel(ctx, "an operator"))
	_, err = first.Settle(ctx, tokensUsed(1), nil)
	require.ErrorIs(t, err, metered.ErrLost)
	_, err = metered.Resume[usage](ctx, c, byID("op"))
	require.ErrorIs(t, err, metered.ErrLost)

	first, err = metered.Open[usage](ctx, c, r)
	require.NoError(t, err)
	first.Close() // its process has died
	clock.Advance(75*time.Second - time.Microsecond)
	late, err := metered.Resume[usage](ctx, c, byID("op"))
	require.NoError(t, err, "in the grace")
	out, err := late.Settle(ctx, tokensUsed(5), says(5))
	require.NoError(t, err)
	require.EqualValues(t, 5, out.Holds[0].Lines[0].Captured)

	first, err = metered.Open[usage](ctx, c, stream("another"))
	require.NoError(t, err)
	first.Close()
	clock.Advance(75 * time.Second)
	_, err = metered.Resume[usage](ctx, c, byID("another"))
	require.ErrorIs(t, err, metered.ErrLost, "it is due")
}

// Sessions of many processes end one operation at once, with different amounts: it is charged once.
func TestResume_RacingProcessesSettleOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, level := range pgtest.IsolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			owner, _ := pgtest.SetUp(t, metered.Config{})
			c := atLevel(t, owner, level)
			var charged, settled atomic.Int64
			for n := range 5 {
				id := fmt.Sprint(n)
				r := stream(id)
				r.Isolation = level
				s, err := metered.Open[usage](t.Context(), c, r)
				require.NoError(t, err)
				pgtest.AtOnce(4, func(i int) {
					own, again := s, byID(id)
					if i > 0 {
						again.Isolation = level
						resumed, err := metered.Resume[usage](context.Background(), c, again)
						if errors.Is(err, metered.ErrLost) {
							return // another cancelled it
						}
						if err != nil {
							t.Error(err)
							return
						}
						own = resumed
					}
					defer own.Close()
					if i == 3 && n%2 == 0 {
						_ = own.Cancel(context.Background(), "enough")
						return
					}
					units := int64(10 + i)
					out, err := own.Settle(context.Background(), tokensUsed(units), says(units))
					switch {
					case err == nil && !out.Replayed:
						charged.Add(units)
						settled.Add(1)
					case err != nil && !errors.Is(err, metered.ErrLost) && !errors.Is(err, metered.ErrConflict) && !errors.Is(err, metered.ErrSerialization):
						t.Error(err)
					}
				})
			}
			require.Equal(t, [2]int64{charged.Load(), 0}, stands(t, owner, c, "tokens"))
			require.EqualValues(t, settled.Load(), pgtest.Count(t, owner, "metered.operations"))
		})
	}
}
