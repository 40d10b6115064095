package metered_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// A command that is run under the id of an open session, of the same name and input, is another command. The session
// then cannot be settled, and is not stuck: it can be cancelled, and its units are free at its deadline.
func TestSession_ATakenIDCanBeCancelled(t *testing.T) {
	t.Parallel()
	owner, c := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, owner, pgtest.Tomorrow(12))
	var open []*metered.Session[usage]
	for _, id := range []string{"1", "2"} {
		s, err := metered.Open[usage](t.Context(), c, stream(id))
		require.NoError(t, err)
		defer s.Close()
		_, err = metered.Do(t.Context(), c, metered.Command{ID: id, Tenant: "acme", Name: "chat", Input: "hello"}, says(7))
		require.NoError(t, err)
		_, err = s.Settle(t.Context(), tokensUsed(3), says(3))
		require.ErrorIs(t, err, budget.ErrConflict)
		require.NoError(t, s.Context().Err())
		_, err = metered.Open[usage](t.Context(), c, stream(id))
		require.ErrorIs(t, err, budget.ErrConflict)
		open = append(open, s)
	}
	require.Equal(t, [2]int64{0, 200}, stands(t, owner, c, "tokens"))
	require.NoError(t, open[0].Cancel(t.Context(), "the id is taken"))
	require.Equal(t, [2]int64{0, 100}, stands(t, owner, c, "tokens"))
	open[1].Close()
	clock.Set(open[1].Hold().Due)
	require.Equal(t, [2]int64{0, 0}, stands(t, owner, c, "tokens"))
	out, err := metered.Do(t.Context(), c, metered.Command{ID: "1", Tenant: "acme", Name: "chat", Input: "hello"}, says(8))
	require.NoError(t, err)
	require.Equal(t, usage{7}, out.Result)
}

// ctx ends while a statement of Settle is on its way, or its answer: it was settled, or was not, and settling again says which.
func TestSettle_AnEndedContextSettlesOnce(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := pgtest.NewClient(t, pool, metered.Config{})
	n := 0
	for _, statement := range []string{"begin_command", "insert into uploads", "complete_command"} {
		for _, after := range []bool{false, true} {
			n++
			id := fmt.Sprint(n)
			s, err := metered.Open[pgtest.Uploaded](t.Context(), c, stream(id))
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			w.Once(func(f *pgtest.Flush) bool { return f.Has(statement) }, func(f *pgtest.Flush) {
				if after {
					f.Deliver = func() { f.Conn.Answer = f.Ask(); cancel() }
				} else {
					cancel()
				}
			})
			_, err = s.Settle(ctx, tokensUsed(3), pgtest.Upload(id))
			require.Error(t, ctx.Err(), statement)
			w.Each(nil)
			if err != nil {
				require.ErrorIs(t, err, context.Canceled, statement)
				require.NoError(t, s.Context().Err())
			}
			_, err = s.Settle(t.Context(), tokensUsed(3), pgtest.Upload(id))
			require.NoError(t, err, statement)
			require.Equal(t, [2]int64{int64(3 * n), 0}, stands(t, owner, c, "tokens"), statement)
			require.Equal(t, n, pgtest.Count(t, owner, "uploads"))
		}
	}
}

// Without a connection to be had Settle and Cancel end with their context, and the reservation stays.
func TestSettle_WithoutAConnectionLeavesTheReservation(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) { c.MaxConns = 1 })
	c := pgtest.NewClient(t, pool, metered.Config{})
	s, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	only, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.Settle(ctx, tokensUsed(3), says(3))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, s.Cancel(ctx, "no"), context.DeadlineExceeded)
	r := stream("2")
	r.OpenTimeout = 50 * time.Millisecond
	_, err = metered.Open[usage](t.Context(), c, r)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, s.Context().Err())
	only.Release()
	_, err = s.Settle(t.Context(), tokensUsed(3), says(3))
	require.NoError(t, err)
	require.Equal(t, [2]int64{3, 0}, stands(t, owner, c, "tokens"))
}

// However a session ends, its goroutine ends.
func TestSession_LeavesNoGoroutine(t *testing.T) {
	owner, c := pgtest.SetUp(t, metered.Config{})
	running := func() int {
		all := make([]byte, 1<<22)
		return strings.Count(string(all[:runtime.Stack(all, true)]), "created by github.com/pgmetered/metered.(*session).start in")
	}
	others := running() // no test runs beside this one, but those before may have left some
	ends := map[string]func(s *metered.Session[usage]) error{
		"settle": func(s *metered.Session[usage]) error {
			_, err := s.Settle(t.Context(), tokensUsed(1), says(1))
			return err
		},
		"cancel": func(s *metered.Session[usage]) error { return s.Cancel(t.Context(), "") },
		"close":  func(s *metered.Session[usage]) error { s.Close(); s.Close(); return nil },
		"lost": func(s *metered.Session[usage]) error {
			_, err := pgtest.InTx(t.Context(), owner, func(tx pgx.Tx) ([]holds.Hold, error) {
				return c.Holds.Release(t.Context(), tx, holds.Release{Tenant: "acme", IDs: []string{s.Hold().ID}})
			})
			require.NoError(t, err)
			_, err = s.Settle(t.Context(), tokensUsed(1), says(1))
			require.ErrorIs(t, err, metered.ErrLost)
			return nil
		},
	}
	for name, end := range ends {
		ctx, cancel := context.WithCancel(t.Context())
		s, err := metered.Open[usage](ctx, c, stream(name))
		require.NoError(t, err)
		require.Equal(t, others+1, running(), name)
		cancel() // the work's end alone does not end it: it may still be settled
		require.Equal(t, others+1, running(), name)
		require.NoError(t, end(s), name)
		pgtest.WaitFor(t, "the goroutine to end: "+name, func() bool { return running() == others })
	}
	// One that is finished, or refused, begins none.
	s, err := metered.Open[usage](t.Context(), c, stream("settle"))
	require.NoError(t, err)
	require.True(t, s.Finished())
	require.Equal(t, others, running())
}

// A session keeps the units that it reserved of a wallet when their lots are revoked. Beyond them it can take only
// free units.
func TestSession_OfAWalletWithRevokedLots(t *testing.T) {
	t.Parallel()
	owner, c := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, owner, pgtest.Tomorrow(12))
	book, err := wallet.New(c.Budget, wallet.Config{})
	require.NoError(t, err)
	inTx := func(f func(tx pgx.Tx) error) { require.NoError(t, pgx.BeginFunc(t.Context(), owner, f)) }
	inTx(func(tx pgx.Tx) error {
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "ann", Amount: 100, Reference: "a", Ends: wallet.After(30 * time.Second), LateRefunds: wallet.Lapse})
		return err
	})
	open := func(id string, amount int64) *metered.Session[usage] {
		s, err := metered.Open[usage](t.Context(), c, metered.Reservation{ID: id, Lines: []holds.Line{book.Line("ann", amount)}})
		require.NoError(t, err)
		return s
	}
	more, less, none := open("more", 40), open("less", 30), open("none", 10)
	inTx(func(tx pgx.Tx) error {
		r, err := book.Revoke(t.Context(), tx, wallet.Revoke{Wallet: "ann", Reference: "a"})
		require.Equal(t, [2]int64{20, 80}, [2]int64{r.Amount, r.Missing})
		_, late := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "ann", Amount: 5, Reference: "b"})
		require.NoError(t, late)
		return err
	})
	clock.Advance(30 * time.Second)
	used := func(n int64) metered.Cost {
		return metered.Cost{Lines: []holds.Line{{Scope: "ann", Amount: n}}, Over: holds.OverUpTo}
	}
	out, err := more.Settle(t.Context(), used(60), says(60))
	require.NoError(t, err)
	require.EqualValues(t, 45, out.Holds[0].Lines[0].Captured)
	_, err = less.Settle(t.Context(), used(10), says(10))
	require.NoError(t, err)
	require.NoError(t, none.Cancel(t.Context(), ""))
	b, err := book.Balance(t.Context(), owner, "ann")
	require.NoError(t, err)
	require.Zero(t, b.Units)
	require.Zero(t, b.Held)
	lapsed := pgtest.Value[int64](t, owner, "select lapsed from metered.lots where reference = 'a'")
	require.EqualValues(t, 30, lapsed, "what they gave back")
	report, err := c.Budget.Verify(t.Context(), owner, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}
