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
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

type usage struct {
	Tokens int64 `json:"tokens"`
}

// stream reserves 100 of user's 1000 tokens, and charges a request.
func stream(id string) metered.Reservation {
	return metered.Reservation{
		ID: id, Tenant: "acme", Name: "chat", Input: "hello",
		Lines:   []holds.Line{{Scope: "tokens", Amount: 100, Limits: []budget.Limit{budget.Lifetime(1000)}}},
		Charges: []budget.Charge{{Scope: "requests", Amount: 1}},
	}
}

func tokensUsed(n int64) metered.Cost {
	return metered.Cost{Lines: []holds.Line{{Scope: "tokens", Amount: n}}}
}

func says(n int64) metered.Func[usage] {
	return func(context.Context, *metered.Tx) (usage, error) { return usage{n}, nil }
}

// stands returns the used and the held units of a scope.
func stands(t *testing.T, pool *pgxpool.Pool, c *metered.Client, scope string) [2]int64 {
	t.Helper()
	all, err := c.Budget.Usage(context.Background(), pool, budget.Query{Scope: scope})
	require.NoError(t, err)
	return [2]int64{all[0].Used, all[0].Held}
}

func TestOpen_ReservesAndSettleCapturesTheUsedUnits(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	pgtest.SetClock(t, pool, pgtest.Tomorrow(12))
	s, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	defer s.Close()
	require.False(t, s.Finished())
	require.Equal(t, [2]int64{0, 100}, stands(t, pool, c, "tokens"))
	require.EqualValues(t, 1, pgtest.Used(t, pool, c, "requests"))
	var running *metered.RunningError
	_, err = metered.Open[usage](t.Context(), c, stream("1"))
	require.ErrorAs(t, err, &running)
	require.Equal(t, 75*time.Second, running.RetryAfter)

	out, err := s.Settle(t.Context(), tokensUsed(30), says(30))
	require.NoError(t, err)
	require.False(t, out.Replayed)
	require.EqualValues(t, 30, out.Result.Tokens)
	require.EqualValues(t, 30, out.Holds[0].Lines[0].Captured)
	require.ErrorIs(t, context.Cause(s.Context()), context.Canceled)
	require.Equal(t, [2]int64{30, 0}, stands(t, pool, c, "tokens"))

	again, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	defer again.Close()
	require.True(t, again.Finished())
	require.Equal(t, usage{30}, again.Outcome().Result)
	require.True(t, again.Outcome().Replayed)
	require.ErrorIs(t, context.Cause(again.Context()), metered.ErrFinished)
	require.EqualValues(t, 30, pgtest.Used(t, pool, c, "tokens"))
	require.EqualValues(t, 1, pgtest.Used(t, pool, c, "requests"))

	settled, err := s.Settle(t.Context(), tokensUsed(30), says(30))
	require.NoError(t, err)
	require.True(t, settled.Replayed)
	require.ErrorIs(t, s.Cancel(t.Context(), "late"), metered.ErrLost)
}

func TestOpen_CancelFreesAndTheSameIDRunsAnew(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	s, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	require.NoError(t, s.Cancel(t.Context(), "no answer"))
	require.NoError(t, s.Cancel(t.Context(), "no answer"))
	require.Zero(t, stands(t, pool, c, "tokens"))
	require.EqualValues(t, 1, pgtest.Used(t, pool, c, "requests"))

	other, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	_, err = s.Settle(t.Context(), tokensUsed(7), says(7))
	var lost *metered.LostError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, "hold_released", metered.Code(lost.Cause))
	_, err = other.Settle(t.Context(), tokensUsed(8), says(8))
	require.NoError(t, err)
	_, err = s.Settle(t.Context(), tokensUsed(7), says(7))
	require.ErrorAs(t, err, &lost)
	require.EqualValues(t, 8, pgtest.Used(t, pool, c, "tokens"))
	require.EqualValues(t, 2, pgtest.Used(t, pool, c, "requests"))
}

func TestOpen_RenewsItsHold(t *testing.T) {
	t.Parallel()
	_, c := pgtest.SetUp(t, metered.Config{})
	for n := 1; ; n++ {
		r := stream(fmt.Sprint(n))
		r.TTL, r.Grace = 15*time.Second, time.Hour
		s, err := metered.Open[usage](t.Context(), c, r)
		require.NoError(t, err)
		first := s.Hold().Deadline
		renewed := func() bool { return s.Hold().Deadline.Sub(first) > time.Second }
		pgtest.WaitFor(t, "the session to be renewed", func() bool { return renewed() || s.Context().Err() != nil })
		lasts := renewed() && s.Context().Err() == nil
		_, err = s.Settle(t.Context(), tokensUsed(3), says(3))
		require.NoError(t, err)
		if lasts {
			return
		}
		require.Less(t, n, stills, "it is not renewed")
	}
}

// stills is how often a test may find that the machine stood still for as long as its session lasted,
// so that the session could not be renewed in time. It tries again with another.
const stills = 5

// OpenTimeout bounds Open, which waits for a connection here, and says nothing of how long the work may take.
func TestOpen_ItsTimeoutIsNotThatOfTheWork(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) { c.MaxConns = 1 })
	c := pgtest.NewClient(t, pool, metered.Config{})
	only, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	r := stream("1")
	r.OpenTimeout = 50 * time.Millisecond
	_, err = metered.Open[usage](t.Context(), c, r)
	require.ErrorIs(t, err, metered.ErrTimeout)
	require.Zero(t, stands(t, owner, c, "tokens"))
	only.Release()
	r.OpenTimeout = 2 * time.Minute
	s, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	_, bounded := s.Context().Deadline()
	require.False(t, bounded)
	require.NoError(t, s.Context().Err(), "Open has returned")
	_, err = s.Settle(t.Context(), tokensUsed(5), says(5))
	require.NoError(t, err)
	again, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	require.EqualValues(t, 5, again.Outcome().Result.Tokens)
	r.OpenTimeout = -1
	var argument *budget.ArgumentError
	_, err = metered.Open[usage](t.Context(), c, r)
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "Reservation.OpenTimeout", argument.Field)
}

// A command with an Input is known by it, and not by the server's estimate: its repetition gets the first answer when
// prices, scopes and fees have changed, and no second reservation while it runs.
func TestOpen_ARepetitionAfterAPriceChangeIsTheSameCommandIfItHasAnInput(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	for _, input := range []any{"hello", nil} {
		first := stream(fmt.Sprint("of ", input))
		first.Input = input
		s, err := metered.Open[usage](t.Context(), c, first)
		require.NoError(t, err)
		dearer := first
		dearer.Lines = []holds.Line{{Scope: "tokens", Amount: 120}, {Scope: "dollars", Amount: 3}}
		dearer.Charges, dearer.Metadata = []budget.Charge{{Scope: "requests", Amount: 2}}, []byte(`{"price":2}`)
		others := make([]metered.Reservation, 3)
		for i := range others {
			others[i] = first
		}
		others[0].Input, others[1].Name, others[2].Holder = "else", "other", "bob"
		of := func(r metered.Reservation, same, other error) {
			t.Helper()
			_, err := metered.Open[usage](t.Context(), c, r)
			if input == nil {
				same = other
			}
			require.ErrorIs(t, err, same)
		}
		of(dearer, metered.ErrRunning, budget.ErrConflict)
		for _, r := range others {
			of(r, budget.ErrConflict, budget.ErrConflict)
		}
		_, err = s.Settle(t.Context(), tokensUsed(5), says(5))
		require.NoError(t, err)
		of(dearer, nil, budget.ErrConflict)
		for _, r := range others {
			of(r, budget.ErrConflict, budget.ErrConflict)
		}
		again, err := metered.Open[usage](t.Context(), c, first)
		require.NoError(t, err)
		require.EqualValues(t, 5, again.Outcome().Result.Tokens)
	}
	require.Equal(t, [2]int64{10, 0}, stands(t, pool, c, "tokens"))
	require.Equal(t, [2]int64{2, 0}, stands(t, pool, c, "requests"))
	require.Zero(t, stands(t, pool, c, "dollars"))
}

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
	require.ErrorIs(t, err, budget.ErrConflict)
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
	require.ErrorIs(t, err, budget.ErrConflict)
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

// An operation on record answers those whom a repetition of it would answer, and a refusal on record is that refusal.
func TestResume_ARecordIsOfItsHolder(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, c := pgtest.SetUp(t, metered.Config{})
	other := pgtest.NewClient(t, pgtest.Reopen(t, owner, func(*pgxpool.Config) {}), metered.Config{})
	of := func(id, holder string) metered.Reservation {
		r := byID(id)
		r.Holder = holder
		return r
	}
	reserved := stream("op")
	reserved.Holder = "ann"
	s, err := metered.Open[usage](ctx, c, reserved)
	require.NoError(t, err)
	_, err = s.Settle(ctx, tokensUsed(30), func(ctx context.Context, tx *metered.Tx) (usage, error) {
		_, err := tx.Place(ctx, holds.Placement{Tenant: "acme", Holder: "ben", TTL: time.Minute, Lines: []holds.Line{{Scope: "seats", Amount: 1}}}, nil)
		return usage{30}, err
	})
	require.NoError(t, err)
	repeated := reserved
	repeated.Holder = "ben"
	_, err = metered.Open[usage](ctx, c, repeated)
	require.ErrorIs(t, err, budget.ErrConflict)
	ben, err := metered.Resume[usage](ctx, other, of("op", "ben"))
	require.ErrorIs(t, err, budget.ErrConflict)
	require.Nil(t, ben)
	for _, holder := range []string{"ann", ""} { // "" is any, as in holds.Book.Get
		again, err := metered.Resume[usage](ctx, other, of("op", holder))
		require.NoError(t, err)
		require.True(t, again.Finished())
		require.Equal(t, usage{30}, again.Outcome().Result)
	}

	refused := metered.Command{
		ID: "refused", Tenant: "acme", RecordRefusal: true,
		Charges: []budget.Charge{{Scope: "tokens", Amount: 2000, Limits: []budget.Limit{budget.Lifetime(1000)}}},
	}
	_, err = metered.Do(ctx, c, refused, says(1))
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	_, err = metered.Resume[usage](ctx, other, byID("refused"))
	exceeded = nil
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "tokens", exceeded.Refusals[0].Scope)
	require.Equal(t, "budget_exceeded", metered.Code(err))
	_, err = metered.Resume[usage](ctx, other, of("refused", "ann"))
	require.ErrorIs(t, err, budget.ErrConflict)
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
					case err != nil && !errors.Is(err, metered.ErrLost) && !errors.Is(err, budget.ErrConflict) && !errors.Is(err, budget.ErrSerialization):
						t.Error(err)
					}
				})
			}
			require.Equal(t, [2]int64{charged.Load(), 0}, stands(t, owner, c, "tokens"))
			require.EqualValues(t, settled.Load(), pgtest.Count(t, owner, "metered.operations"))
		})
	}
}

// An opening of one line, without charges, goes the short way, where it sees another session and the record as well.
func TestOpen_OfOneLineSeesAnotherSessionAndTheRecord(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	r := stream("1")
	r.Lines[0].Amount, r.Charges = 1, nil
	s, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	_, err = metered.Open[usage](t.Context(), c, r)
	require.ErrorIs(t, err, metered.ErrRunning)
	require.Equal(t, [2]int64{0, 1}, stands(t, pool, c, "tokens"))
	_, err = s.Settle(t.Context(), tokensUsed(1), says(1))
	require.NoError(t, err)
	again, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	require.True(t, again.Finished())
	require.Equal(t, [2]int64{1, 0}, stands(t, pool, c, "tokens"))
}
