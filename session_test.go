package metered_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// atLevel is a client of the database whose transactions are of a level, unless they say another.
func atLevel(t *testing.T, owner *pgxpool.Pool, level pgx.TxIsoLevel) *metered.Client {
	t.Helper()
	return pgtest.NewClient(t, pgtest.Reopen(t, owner, func(c *pgxpool.Config) {
		c.MaxConns = 12
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = string(level)
	}), metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
}

// sessions is one operation done plainly: its handles in the order of opening, of which the last may be open.
type sessions struct {
	recorded bool
	captured int64 // of tokens, by whoever
	least    int64
	due      time.Time // of the one that is open; zero for none
	requests int64
}

// Random histories of one operation agree with the model in each answer and in the used and held units: opened, by
// the same and by another command, settled and cancelled by its owner and by callers that lost it, past its deadline,
// swept or not.
func TestSessions_AgreeWithTheModel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner, _ := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, owner, pgtest.Tomorrow(12))
	for i, level := range pgtest.IsolationLevels {
		c := atLevel(t, owner, level)
		for n := range 12 {
			seed := uint64(100*i + n)
			rng := rand.New(rand.NewPCG(seed, 7))
			name := fmt.Sprintf("%s, seed %d", level, seed)
			r := stream(fmt.Sprint(level, n))
			r.Lines[0].Scope, r.Charges[0].Scope, r.Isolation = name, name+"/requests", level
			r.Lines[0].AtLeast = []int64{0, 10}[n%2]
			m := sessions{least: r.Lines[0].AtLeast}
			var handles []*metered.Session[usage]
			for step := range 14 {
				name := fmt.Sprintf("%s, step %d", name, step)
				live := !m.due.IsZero()
				which := -1
				if len(handles) > 0 {
					which = rng.IntN(len(handles))
				}
				mine := live && which == len(handles)-1
				switch act := rng.IntN(8); {
				case act == 0: // another command
					other := r
					other.Input = "another"
					s, err := metered.Open[usage](t.Context(), c, other)
					if !m.recorded && !live {
						require.NoError(t, err, name)
						s.Close()
						m.due = clock.Now().Add(75 * time.Second)
						m.requests++
						handles = append(handles, nil) // left to fall due
						break
					}
					if live && handles[len(handles)-1] == nil {
						require.ErrorIs(t, err, metered.ErrRunning, name)
						break
					}
					require.ErrorIs(t, err, budget.ErrConflict, name)
				case act <= 2 || which < 0:
					s, err := metered.Open[usage](t.Context(), c, r)
					switch {
					case m.recorded:
						require.NoError(t, err, name)
						require.True(t, s.Finished(), name)
					case live && handles[len(handles)-1] == nil:
						require.ErrorIs(t, err, budget.ErrConflict, name)
					case live:
						var running *metered.RunningError
						require.ErrorAs(t, err, &running, name)
						require.Equal(t, m.due.Sub(clock.Now()), running.RetryAfter, name)
						require.True(t, m.due.Equal(running.Until), name)
					default:
						require.NoError(t, err, name)
						require.False(t, s.Finished(), name)
						t.Cleanup(s.Close)
						handles, m.due, m.requests = append(handles, s), s.Hold().Due, m.requests+1
					}
				case act <= 4 && handles[which] != nil:
					out, err := handles[which].Settle(t.Context(), metered.Cost{Lines: []holds.Line{{Scope: r.Lines[0].Scope, Amount: int64(which + 1)}}}, says(int64(which+1)))
					if mine {
						require.NoError(t, err, name)
						require.False(t, out.Replayed, name)
						m.recorded, m.captured, m.due = true, m.captured+int64(which+1), time.Time{}
						break
					}
					if m.recorded && err == nil { // by this one, before
						require.True(t, out.Replayed, name)
						require.EqualValues(t, which+1, out.Result.Tokens, name)
						break
					}
					require.ErrorIs(t, err, metered.ErrLost, name)
				case act == 5 && handles[which] != nil:
					err := handles[which].Cancel(t.Context(), "enough")
					if mine {
						require.NoError(t, err, name)
						m.due = time.Time{}
					} else if err != nil {
						require.ErrorIs(t, err, metered.ErrLost, name)
					}
				case act == 6:
					_, err := c.Holds.Sweep(t.Context(), owner, holds.SweepOptions{})
					require.NoError(t, err, name)
				case act == 7:
					clock.Advance(time.Duration(1+rng.IntN(50)) * time.Second)
				}
				if !m.due.IsZero() && !m.due.After(clock.Now()) { // it is abandoned
					m.due, m.captured = time.Time{}, m.captured+m.least
				}
				held := int64(0)
				if !m.due.IsZero() {
					held = 100
				}
				require.Equal(t, [2]int64{m.captured, held}, stands(t, owner, c, r.Lines[0].Scope), name)
				require.Equal(t, [2]int64{m.requests, 0}, stands(t, owner, c, r.Charges[0].Scope), name)
			}
		}
	}
	report, err := pgtest.NewClient(t, owner, metered.Config{}).Budget.Verify(t.Context(), owner, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

// One of many callers that open an operation at once gets it, again after it was cancelled and after it was
// abandoned. Once it is settled the record answers all of them.
func TestOpen_OneOfManyRuns(t *testing.T) {
	t.Parallel()
	callers := pgtest.Size(16, 50)
	for _, level := range pgtest.IsolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			owner, _ := pgtest.SetUp(t, metered.Config{})
			clock := pgtest.SetClock(t, owner, pgtest.Tomorrow(12))
			c := atLevel(t, owner, level)
			r := stream("1")
			r.Isolation = level
			opened := func() (only *metered.Session[usage], finished int64) {
				var won, running, done atomic.Int64
				all := make([]*metered.Session[usage], callers)
				pgtest.AtOnce(callers, func(i int) {
					s, err := metered.Open[usage](context.Background(), c, r)
					switch {
					case errors.Is(err, metered.ErrRunning):
						running.Add(1)
					case err != nil:
						t.Error(err)
					case s.Finished():
						done.Add(1)
					default:
						won.Add(1)
						all[i] = s
					}
				})
				for _, s := range all {
					if s != nil {
						only = s
					}
				}
				if done.Load() == 0 {
					require.EqualValues(t, 1, won.Load())
					require.EqualValues(t, callers-1, running.Load())
					t.Cleanup(only.Close)
				}
				return only, done.Load()
			}
			s, _ := opened()
			require.NoError(t, s.Cancel(t.Context(), "enough"))
			s, _ = opened()
			clock.Set(s.Hold().Due)
			s, _ = opened()
			require.Equal(t, [2]int64{0, 100}, stands(t, owner, c, "tokens"))
			_, err := s.Settle(t.Context(), tokensUsed(9), says(9))
			require.NoError(t, err)
			_, finished := opened()
			require.EqualValues(t, callers, finished)
			require.Equal(t, [2]int64{9, 0}, stands(t, owner, c, "tokens"))
			require.Equal(t, [2]int64{3, 0}, stands(t, owner, c, "requests"))
		})
	}
}

// Callers settle, cancel, end by force and open anew at once: the ledger holds the sum of the units in their answers.
func TestSession_RacingEndingsChargeTheUnitsOfTheirAnswers(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, level := range pgtest.IsolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			owner, _ := pgtest.SetUp(t, metered.Config{})
			c := atLevel(t, owner, level)
			var charged, settled atomic.Int64
			settle := func(s *metered.Session[usage], n int64) {
				switch out, err := s.Settle(context.Background(), tokensUsed(n), says(n)); {
				case err == nil && !out.Replayed:
					charged.Add(n)
					settled.Add(1)
				case err != nil && !errors.Is(err, metered.ErrLost) && !errors.Is(err, budget.ErrSerialization):
					t.Error(err)
				}
			}
			for n := range 5 {
				r := stream(fmt.Sprint(n))
				r.Isolation = level
				s, err := metered.Open[usage](t.Context(), c, r)
				require.NoError(t, err)
				pgtest.AtOnce(5, func(i int) {
					switch i {
					case 0, 1:
						settle(s, 30)
					case 2:
						_ = s.Cancel(context.Background(), "enough")
					case 3:
						_ = pgx.BeginFunc(context.Background(), owner, func(tx pgx.Tx) error {
							_, err := c.Holds.Release(context.Background(), tx, holds.Release{Tenant: "acme", IDs: []string{s.Hold().ID}})
							return err
						})
					case 4:
						for range 20 {
							again, err := metered.Open[usage](context.Background(), c, r)
							if errors.Is(err, metered.ErrRunning) {
								time.Sleep(time.Millisecond)
								continue
							}
							if err != nil {
								t.Error(err)
							} else if !again.Finished() {
								settle(again, 7)
								again.Close()
							}
							return
						}
					}
				})
				s.Close()
			}
			require.Equal(t, [2]int64{charged.Load(), 0}, stands(t, owner, c, "tokens"))
			require.EqualValues(t, settled.Load(), pgtest.Count(t, owner, "metered.operations"))
		})
	}
}

// A Settle that fails leaves the reservation, to be settled otherwise.
func TestSettle_ThatFailsLeavesTheReservation(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	s, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	defer s.Close()
	_, err = s.Settle(t.Context(), tokensUsed(30), func(ctx context.Context, tx *metered.Tx) (usage, error) {
		_, err := tx.Exec(ctx, `insert into uploads values ('x')`)
		require.NoError(t, err)
		return usage{}, pgtest.ErrOwn
	})
	require.ErrorIs(t, err, pgtest.ErrOwn)
	_, err = s.Settle(t.Context(), tokensUsed(130), says(130))
	require.ErrorIs(t, err, holds.ErrExcess)
	var argument *budget.ArgumentError
	_, err = s.Settle(t.Context(), metered.Cost{}, says(0))
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "Cost.Lines", argument.Field)
	_, err = s.Settle(t.Context(), metered.Cost{Lines: []holds.Line{{Scope: "tokns", Amount: 1}}}, says(0))
	require.EqualError(t, err, `metered: invalid argument: Cost.Lines[0].Scope: "tokns" is not held: the Reservation has no line of it`)
	more := tokensUsed(1130)
	more.Over = holds.OverIfFits
	_, err = s.Settle(t.Context(), more, says(1130))
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded, "by the limit of the reservation")
	require.Equal(t, "tokens", exceeded.Refusals[0].Scope)
	require.NoError(t, s.Context().Err())
	require.Equal(t, [2]int64{0, 100}, stands(t, pool, c, "tokens"))
	require.Zero(t, pgtest.Count(t, pool, "uploads"))
	require.Zero(t, pgtest.Count(t, pool, "metered.operations"))

	more = tokensUsed(130)
	more.Over = holds.OverIfFits
	_, err = s.Settle(t.Context(), more, says(130))
	require.NoError(t, err)
	require.Equal(t, [2]int64{130, 0}, stands(t, pool, c, "tokens"))
}

func TestOpen_ARefusalReservesAndChargesNothing(t *testing.T) {
	t.Parallel()
	var refusals []metered.RefusedCommand
	pool, c := pgtest.SetUp(t, metered.Config{OnRefusal: func(_ context.Context, d metered.RefusedCommand) { refusals = append(refusals, d) }})
	r := stream("1")
	r.Lines = append(r.Lines, holds.Line{Scope: "team", Amount: 5, Limits: []budget.Limit{budget.Lifetime(4).Named("team budget")}})
	_, err := metered.Open[usage](t.Context(), c, r)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "team", exceeded.Refusals[0].Scope)
	require.Len(t, refusals, 1)
	require.Zero(t, pgtest.Count(t, pool, "metered.ledger"))
	require.Zero(t, pgtest.Count(t, pool, "metered.holds"))
	for field, change := range map[string]func(*metered.Reservation){
		"Reservation.ID":               func(r *metered.Reservation) { r.ID = "" },
		"Reservation.Lines":            func(r *metered.Reservation) { r.Lines = nil },
		"Reservation.Lines[0]":         func(r *metered.Reservation) { r.Lines[0].Amount = -1 },
		"Reservation.Input":            func(r *metered.Reservation) { r.Input = func() {} },
		"Reservation.Isolation":        func(r *metered.Reservation) { r.Isolation = "none" },
		"Reservation.Grace":            func(r *metered.Reservation) { r.Grace = -1 },
		"Reservation.Lines[0].AtLeast": func(r *metered.Reservation) { r.Lines[0].AtLeast = 101 },
	} {
		r := stream("1")
		change(&r)
		_, err := metered.Open[usage](t.Context(), c, r)
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument, field)
		require.Contains(t, argument.Field, field)
	}
}

// A settled session stays settled: the same amount again gets the first answer, in this process and in another.
// Another amount is a conflict that names both.
func TestSettle_AgainWithAnotherAmountIsAConflictThatSaysBoth(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	upTo := func(n int64) metered.Cost {
		used := tokensUsed(n)
		used.Over, used.Lines[0].Limits = holds.OverUpTo, []budget.Limit{budget.Lifetime(120)}
		return used
	}
	for id, first := range map[string]metered.Cost{"1": tokensUsed(5), "2": {All: true}, "3": upTo(15)} {
		r := stream(id)
		r.Lines[0].Amount = 10
		s, err := metered.Open[usage](ctx, c, r)
		require.NoError(t, err)
		_, err = s.Settle(ctx, first, says(1))
		require.NoError(t, err)
		later, err := metered.Open[usage](ctx, c, r)
		require.NoError(t, err)
		require.True(t, later.Finished())
		for _, s := range []*metered.Session[usage]{s, later} {
			out, err := s.Settle(ctx, first, says(2))
			require.NoError(t, err)
			require.True(t, out.Replayed)
			require.EqualValues(t, 1, out.Result.Tokens)
			_, err = s.Settle(ctx, tokensUsed(7), says(2))
			require.ErrorIs(t, err, budget.ErrConflict)
			require.ErrorContains(t, err, fmt.Sprintf("settled with %d units of scope \"tokens\", and now with 7", map[string]int{"1": 5, "2": 10, "3": 15}[id]))
		}
	}
	require.Equal(t, [2]int64{30, 0}, stands(t, pool, c, "tokens"))

	// 30 of the limit's 120 are used, so 90 of these 110 fit. The same 110 again are no other amount.
	r := stream("4")
	r.Lines[0].Amount = 10
	s, err := metered.Open[usage](ctx, c, r)
	require.NoError(t, err)
	for _, replayed := range []bool{false, true} {
		out, err := s.Settle(ctx, upTo(110), says(1))
		require.NoError(t, err)
		require.Equal(t, replayed, out.Replayed)
		require.EqualValues(t, 90, out.Holds[0].Lines[0].Captured)
	}
	_, err = s.Settle(ctx, upTo(89), says(1))
	require.ErrorIs(t, err, budget.ErrConflict)
}

// A total that a settlement waited for has tallies from then on: nobody waits for it any more. Its lock is taken with that of the hold,
// before the charge, which therefore finds it free.
func TestSettle_ATotalThatItWaitedForHasTallies(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
	total := budget.Charge{Scope: "total", Amount: 1}
	settle := func(id string) error {
		s, err := metered.Open[usage](t.Context(), c, stream(id))
		if err != nil {
			return err
		}
		_, err = s.Settle(t.Context(), tokensUsed(1), func(_ context.Context, tx *metered.Tx) (usage, error) { return usage{}, tx.Charge(total) })
		return err
	}
	require.NoError(t, settle("first"))
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = c.Budget.Charge(t.Context(), tx, total)
	require.NoError(t, err)
	settled := make(chan error, 1)
	go func() { settled <- settle("second") }()
	pgtest.WaitFor(t, "the settlement's wait", func() bool {
		return pgtest.Value[bool](t, pool, "select exists (select from pg_stat_activity where wait_event = 'advisory' and datname = current_database())")
	})
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-settled)
	require.True(t, pgtest.Value[bool](t, pool, "select tallied is true from metered.ledger where scope = 'total' order by seq desc limit 1"))
	require.NoError(t, settle("third"))
	require.Equal(t, int64(4), pgtest.Value[int64](t, pool, "select (metered.v1_usage('total') ->> 'used')::bigint"))
}
