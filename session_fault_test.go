package metered_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
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
	"github.com/pgmetered/metered/observe"
)

// The backend is killed, or the answer lost, at each statement of Open: there is one reservation, or none, as was answered.
func TestOpen_ALostConnectionLeavesOneReservationOrNone(t *testing.T) {
	t.Parallel()
	const tag = "C\x00\x00\x00\x0bCOMMIT\x00"
	untilTag := func(f *pgtest.Flush) {
		all := f.Ask()
		f.Conn.Answer = all[: bytes.Index(all, []byte(tag))+len(tag) : len(all)]
		f.Close()
	}
	for what, fault := range map[string]func(owner *pgxpool.Pool, f *pgtest.Flush){
		"kill before": func(owner *pgxpool.Pool, f *pgtest.Flush) { f.Terminate(t, owner) },
		"kill after": func(owner *pgxpool.Pool, f *pgtest.Flush) {
			f.Deliver = func() { f.Conn.Answer = f.Ask(); f.Terminate(t, owner) }
		},
		"cut after":   func(_ *pgxpool.Pool, f *pgtest.Flush) { f.LoseAnswer() },
		"early, cut":  func(_ *pgxpool.Pool, f *pgtest.Flush) { f.LoseAnswer() },
		"early, kill": func(owner *pgxpool.Pool, f *pgtest.Flush) { f.Terminate(t, owner) },
		"early, seen": func(_ *pgxpool.Pool, f *pgtest.Flush) { f.Deliver = func() { untilTag(f) } },
		"early, and gone": func(owner *pgxpool.Pool, f *pgtest.Flush) { // a crash took it back
			f.Deliver = func() {
				untilTag(f)
				pgtest.Execute(t, owner, "truncate metered.ledger, metered.holds, metered.hold_lines, metered.hold_events")
			}
		},
	} {
		owner, _ := pgtest.SetUp(t, metered.Config{})
		pool, w := pgtest.Tap(t, owner, nil)
		c := pgtest.NewClient(t, pool, metered.Config{})
		require.NoError(t, pgtest.Do(t, c, "first"))
		r := stream("1")
		r.EarlyRelease = strings.HasPrefix(what, "early")
		w.Once(func(f *pgtest.Flush) bool { return f.Has("open_session") && f.Has("commit") }, func(f *pgtest.Flush) { fault(owner, f) })
		s, err := metered.Open[usage](t.Context(), c, r)
		w.Each(nil)
		if err != nil {
			require.True(t, metered.Retryable(err), what)
			s, err = metered.Open[usage](t.Context(), c, r)
		}
		require.NoError(t, err, what)
		require.Equal(t, [2]int64{0, 100}, stands(t, owner, c, "tokens"), what)
		require.Equal(t, [2]int64{1, 0}, stands(t, owner, c, "requests"), what)
		_, err = s.Settle(t.Context(), tokensUsed(5), says(5)) // its connection may be the one that was killed
		require.NoError(t, err, what)
	}
}

// Open, Settle and Cancel with EarlyRelease let go of their scopes when their commits are in the log, and return when these are
// durable. So does an Open that finds what an attempt has placed whose COMMIT was not answered.
func TestOpen_EarlyReleaseLetsGoBeforeItsAnswerIsDurable(t *testing.T) {
	t.Parallel()
	pool, watch, goOn := pgtest.SlowCommits(t)
	c := pgtest.NewClient(t, pool, metered.Config{})
	answers := make(chan error, 10)
	open := func(id string, early bool) {
		r := stream(id)
		r.EarlyRelease = early
		go func() {
			s, err := metered.Open[usage](t.Context(), c, r)
			if err == nil {
				s.Close()
			}
			answers <- err
		}()
	}
	waiting := func(n int) {
		t.Helper()
		pgtest.WaitFor(t, fmt.Sprint(n, " to wait for the standby"), func() bool {
			return pgtest.Value[int](t, watch, "select count(*) from pg_stat_activity where wait_event = 'SyncRep'") == n
		})
		require.Empty(t, answers)
	}
	for i := range 3 { // on the same scopes
		open(fmt.Sprint("early ", i), true)
		waiting(i + 1)
	}
	require.Equal(t, 3, pgtest.Count(t, watch, "metered.holds"))
	open("plain", false)
	waiting(4)
	require.Equal(t, 3, pgtest.Count(t, watch, "metered.holds"), "without early release it is not seen")
	// The wait of the plain one ends with its connection, and it is seen. Its next attempt waits again.
	require.Equal(t, 1, pgtest.Value[int](t, watch, `select count(*)::int from (select pg_terminate_backend(pid) from pg_stat_activity
		where wait_event = 'SyncRep' and query = 'commit') x`))
	pgtest.WaitFor(t, "the plain one to be seen", func() bool { return pgtest.Count(t, watch, "metered.holds") == 4 })
	waiting(4)
	goOn()
	for range 4 {
		require.NoError(t, <-answers)
	}
}

// Cancel passes a barrier, too.
func TestCancel_WithEarlyReleasePassesABarrier(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := pgtest.NewClient(t, pool, metered.Config{})
	for _, early := range []bool{false, true} {
		r := stream(fmt.Sprint(early))
		r.EarlyRelease = early
		s, err := metered.Open[usage](t.Context(), c, r)
		require.NoError(t, err)
		var passed atomic.Bool
		w.Each(func(f *pgtest.Flush) {
			if f.Has("release_holds") && f.Has("pg_logical_emit_message") && f.Has("'synchronous_commit', 'off'") {
				passed.Store(true)
			}
		})
		require.NoError(t, s.Cancel(t.Context(), "no more"))
		w.Each(nil)
		require.Equal(t, early, passed.Load())
	}
}

// The backend is killed, or the answer lost, at each statement of Settle: it is settled once, by this call.
func TestSettle_ALostConnectionIsMadeUpFor(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := pgtest.NewClient(t, pool, metered.Config{})
	n := 0
	for _, statement := range []string{"begin_command", "insert into uploads", "complete_command"} {
		for what, fault := range map[string]func(owner *pgxpool.Pool, f *pgtest.Flush){
			"kill before": func(owner *pgxpool.Pool, f *pgtest.Flush) { f.Terminate(t, owner) },
			"kill after": func(owner *pgxpool.Pool, f *pgtest.Flush) {
				f.Deliver = func() { f.Conn.Answer = f.Ask(); f.Terminate(t, owner) }
			},
			"cut after": func(_ *pgxpool.Pool, f *pgtest.Flush) { f.LoseAnswer() },
		} {
			n++
			id := fmt.Sprint(n)
			s, err := metered.Open[pgtest.Uploaded](t.Context(), c, stream(id))
			require.NoError(t, err)
			var struck atomic.Bool
			w.Once(func(f *pgtest.Flush) bool { return f.Has(statement) }, func(f *pgtest.Flush) { struck.Store(true); fault(owner, f) })
			_, err = s.Settle(t.Context(), tokensUsed(3), pgtest.Upload(id))
			w.Each(nil)
			require.NoError(t, err, "%s, %s", statement, what)
			require.True(t, struck.Load(), statement)
			require.Equal(t, [2]int64{int64(3 * n), 0}, stands(t, owner, c, "tokens"), "%s, %s", statement, what)
			require.Equal(t, n, pgtest.Count(t, owner, "uploads"))
		}
	}
}

// While Postgres is away Settle tries again, until Postgres is back, ctx ends, or the hold is due. Cancel does, too.
func TestSettle_OutlastsAnOutageButNotItsContextNorTheHold(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := pgtest.NewClient(t, pool, metered.Config{})
	r := stream("1")
	r.TTL, r.Grace = time.Second, time.Second
	due, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	defer due.Close()
	s, err := metered.Open[usage](t.Context(), c, stream("2"))
	require.NoError(t, err)
	other, err := metered.Open[usage](t.Context(), c, stream("3"))
	require.NoError(t, err)
	w.Refuse(true)
	w.Each(func(f *pgtest.Flush) { f.LoseAnswer() })
	_, err = due.Settle(t.Context(), tokensUsed(3), says(3))
	require.True(t, metered.Retryable(err), "%v", err)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = s.Settle(ctx, tokensUsed(3), says(3))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, other.Cancel(ctx, "too late"), context.DeadlineExceeded)
	back := time.AfterFunc(300*time.Millisecond, func() { w.Refuse(false); w.Each(nil) })
	defer back.Stop()
	_, err = s.Settle(t.Context(), tokensUsed(4), says(4))
	require.NoError(t, err)
	require.NoError(t, other.Cancel(t.Context(), "not needed"))
	require.EqualValues(t, 4, stands(t, owner, c, "tokens")[0])
}

// placedThen is an observer that calls itself when a hold was placed.
type placedThen func()

func (f placedThen) Start(ctx context.Context, _ observe.Op) (context.Context, func(observe.End)) {
	return ctx, nil
}

func (f placedThen) Event(_ context.Context, e observe.Event) {
	if e.Kind == observe.Hold && e.Name == "placed" {
		f()
	}
}

// The caller of Open leaves, as the client of a request does. Its reserved units are free soon after, without waiting
// for their deadline, at each point of Open: its answer lost, its flush lost, waiting for the scope's lock, or about
// to return.
func TestOpen_ACallerThatLeavesKeepsNothingHeld(t *testing.T) {
	t.Parallel()
	owner, lockers := pgtest.SetUp(t, metered.Config{})
	opens := func(f *pgtest.Flush) bool { return f.Has("open_session") }
	for i, fault := range []func(t *testing.T, w *pgtest.Wire, leave func()) (then func()){
		func(_ *testing.T, w *pgtest.Wire, leave func()) func() {
			w.Once(opens, func(f *pgtest.Flush) { f.Deliver = func() { f.Ask(); leave() } })
			return nil
		},
		func(_ *testing.T, w *pgtest.Wire, leave func()) func() {
			w.Once(opens, func(f *pgtest.Flush) { f.Deliver = func() { f.Close(); leave() } })
			return nil
		},
		func(t *testing.T, w *pgtest.Wire, leave func()) func() {
			release := pgtest.LockScope(t, owner, lockers, "tokens")
			w.Once(opens, func(f *pgtest.Flush) {
				f.Deliver = func() {
					require.NoError(t, f.Pass())
					pgtest.WaitQueued(t, owner, 1)
					leave()
				}
			})
			return release
		},
		func(*testing.T, *pgtest.Wire, func()) func() { return nil },
	} {
		what := fmt.Sprint("fault ", i)
		ctx, leave := context.WithCancel(t.Context())
		observer := placedThen(func() {})
		if i == 3 {
			observer = placedThen(leave)
		}
		pool, w := pgtest.Tap(t, owner, nil)
		c := pgtest.NewClient(t, pool, metered.Config{Config: budget.Config{Observer: observer}})
		require.NoError(t, pgtest.Do(t, c, what))
		then := fault(t, w, leave)
		_, err := metered.Open[usage](ctx, c, stream(what))
		require.True(t, errors.Is(err, context.Canceled) || errors.Is(err, metered.ErrIndefinite), "%s: %v", what, err)
		if then != nil {
			then()
		}
		pgtest.WaitFor(t, "the release of what was opened", func() bool {
			return pgtest.Value[int](t, owner, "select count(*) from metered.holds where state = 'r'") == i+1
		})
		require.Equal(t, [2]int64{0, 0}, stands(t, owner, c, "tokens"), what)
		require.EqualValues(t, i+1, stands(t, owner, c, "requests")[0], what)
	}
}

// COMMIT's answer is lost, or COMMIT is, and Postgres cannot be reached from then on: neither Settle nor Cancel says
// that nothing was committed. The same call later returns the outcome.
func TestSession_ALostCommitThatCannotBeResolvedIsIndefinite(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	n := 0
	for what, fault := range map[string]func(*pgtest.Flush){"the answer is lost": (*pgtest.Flush).LoseAnswer, "the flush is lost": (*pgtest.Flush).Lose} {
		for _, leaves := range []bool{false, true} {
			for name, act := range map[string]func(context.Context, *metered.Session[usage]) error{
				"Settle": func(ctx context.Context, s *metered.Session[usage]) error {
					_, err := s.Settle(ctx, tokensUsed(3), says(3))
					return err
				},
				"Cancel": func(ctx context.Context, s *metered.Session[usage]) error { return s.Cancel(ctx, "not needed") },
			} {
				what := fmt.Sprintf("%s, %s, the caller leaves %v", name, what, leaves)
				pool, w := pgtest.Tap(t, owner, nil)
				c := pgtest.NewClient(t, pool, metered.Config{})
				n++
				s, err := metered.Open[usage](t.Context(), c, stream(fmt.Sprint(n)))
				require.NoError(t, err)
				deadline := pgtest.NewDeadline(t, time.Minute)
				ctx, cancel := context.WithCancel(deadline)
				w.Once(func(f *pgtest.Flush) bool { return slices.Contains(f.SQL, "commit") }, func(f *pgtest.Flush) {
					w.Refuse(true)
					fault(f)
					deliver, end := f.Deliver, deadline.Pass
					if leaves {
						end = cancel
					}
					f.Deliver = func() { deliver(); end() }
				})
				err = act(ctx, s)
				cancel()
				require.ErrorIs(t, err, metered.ErrIndefinite, what)
				require.True(t, metered.Retryable(err), what)
				w.Refuse(false)
				require.NoError(t, act(t.Context(), s), what)
			}
		}
	}
	require.Equal(t, [2]int64{4 * 3, 0}, stands(t, owner, pgtest.NewClient(t, owner, metered.Config{}), "tokens"))
}

// ended waits until the session's context ends, and returns why.
func ended(t *testing.T, s *metered.Session[usage]) error {
	t.Helper()
	select {
	case <-s.Context().Done():
	case <-time.After(time.Until(pgtest.Patience(t))):
		t.Fatal("the context goes on")
	}
	return context.Cause(s.Context())
}

func TestSession_ThatCannotBeRenewedEndsItsWorkAndCanBeSettled(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := pgtest.NewClient(t, pool, metered.Config{})
	r := stream("1")
	r.TTL, r.Grace = 6*time.Second, time.Hour
	s, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	w.Refuse(true)
	w.Each(func(f *pgtest.Flush) { f.LoseAnswer() }) // Postgres is away
	err = ended(t, s)
	var over *metered.RenewalError
	require.ErrorAs(t, err, &over)
	require.True(t, metered.Retryable(over.Cause), "%v", over.Cause)
	require.True(t, s.Hold().Due.Equal(over.Due))
	w.Refuse(false)
	w.Each(nil)
	_, err = s.Settle(t.Context(), tokensUsed(3), says(3)) // connections of the pool may be broken still
	require.NoError(t, err)
	require.Equal(t, [2]int64{3, 0}, stands(t, owner, c, "tokens"))
}

func TestSession_IsRenewedToItsCeilingAndNoFurther(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{MaxTTL: 12 * time.Second, MaxLifetime: 13 * time.Second}})
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(12))
	r := stream("1")
	r.TTL, r.Grace = 12*time.Second, 4*time.Second
	s, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	defer s.Close()
	clock.Advance(11 * time.Second) // the renewal, after a third of the TTL, meets the ceiling
	var over *metered.RenewalError
	require.ErrorAs(t, ended(t, s), &over)
	require.ErrorIs(t, over.Cause, holds.ErrCeiling)
	require.True(t, s.Hold().Deadline.Equal(s.Hold().Ceiling))
}

func TestSession_AnEndedHoldIsAnError(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	var lost *metered.LostError
	for n := 1; lost == nil; n++ {
		require.LessOrEqual(t, n, stills)
		r := stream(fmt.Sprint(n))
		r.TTL, r.Grace = 5*time.Second, time.Hour
		s, err := metered.Open[usage](t.Context(), c, r)
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := c.Holds.Release(t.Context(), tx, holds.Release{Tenant: "acme", IDs: []string{s.Hold().ID}})
			return err
		}))
		if why := ended(t, s); !errors.Is(why, metered.ErrNotRenewed) {
			require.ErrorAs(t, why, &lost)
			require.Equal(t, "hold_released", metered.Code(lost.Cause))
		}
		_, err = s.Settle(t.Context(), tokensUsed(3), says(3))
		require.ErrorIs(t, err, metered.ErrLost)
		require.Zero(t, stands(t, pool, c, "tokens"))
	}
}

const streamingChild = "METERED_STREAMING_CHILD" // a connection string makes the test binary a process that streams

// It is the child of TestSession_OfAProcessThatWasKilled.
func TestSession_Child(t *testing.T) {
	conn := os.Getenv(streamingChild)
	if conn == "" {
		t.Skip("is run by another test")
	}
	pool, err := pgxpool.New(t.Context(), conn)
	require.NoError(t, err)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	r := stream("1")
	r.TTL, r.Grace, r.Lines[0].AtLeast = 30*time.Second, time.Second, 20
	s, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	fmt.Println("open", s.Hold().ID)
	<-s.Context().Done()
}

// A process is killed while it streams: its units are held until the hold falls due, then its minimum is charged and the rest is
// free, swept or not, and the operation runs anew.
func TestSession_OfAProcessThatWasKilled(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(12))
	child := exec.Command(os.Args[0], "-test.run=^TestSession_Child$")
	child.Env, child.Stderr = append(os.Environ(), streamingChild+"="+pgtest.ConnString(pool)), os.Stderr
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	require.Contains(t, lines.Text(), "open")
	first := pgtest.Value[time.Time](t, pool, "select deadline from metered.holds")
	clock.Advance(time.Second)
	pgtest.WaitFor(t, "the session to be renewed", func() bool {
		return pgtest.Value[time.Time](t, pool, "select deadline from metered.holds").After(first)
	})
	require.NoError(t, child.Process.Kill())
	_ = child.Wait()
	r := stream("1")
	r.Lines[0].AtLeast = 20
	_, err = metered.Open[usage](t.Context(), c, r)
	var running *metered.RunningError
	require.ErrorAs(t, err, &running)
	clock.Advance(running.RetryAfter)
	s, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	require.Equal(t, [2]int64{20, 100}, stands(t, pool, c, "tokens"))
	_, err = s.Settle(t.Context(), tokensUsed(5), says(5))
	require.NoError(t, err)
	require.Equal(t, [2]int64{25, 0}, stands(t, pool, c, "tokens"))
	report, err := c.Budget.Verify(t.Context(), pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}
