package sqlmetered_test

import (
	"context"
	"database/sql"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/sqlmetered"
)

// answer reserves 10 of 15 units, and charges a request.
func answer(id string) metered.Reservation {
	return metered.Reservation{
		ID: id, Tenant: "ann", Name: "answer", Input: id, TTL: time.Minute,
		Lines:   []holds.Line{{Scope: "units", Amount: 10, Limits: []budget.Limit{budget.Lifetime(15)}}},
		Charges: []budget.Charge{{Scope: "requests", Amount: 1}},
	}
}

func used(n int64) metered.Cost {
	return metered.Cost{Lines: []holds.Line{{Scope: "units", Amount: n}}}
}

// stands returns the used and the held units.
func (s set) stands(t *testing.T) [2]int64 {
	t.Helper()
	all, err := s.c.Budget.Usage(t.Context(), s.pool, budget.Query{Scope: "units"})
	require.NoError(t, err)
	return [2]int64{all[0].Used, all[0].Held}
}

// saves is a function of a settlement, which writes a row.
func saves(ctx context.Context, tx *metered.Tx) (string, error) {
	_, err := tx.Exec(ctx, "insert into uploads values ('fn')")
	return "saved", err
}

// A settlement that waits too long for its scope says so, and that the settlement is what waited: no COMMIT was sent.
func TestSettleTx_SaysWhatWaitedForTheScope(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	ctx := t.Context()
	c, err := metered.New(s.pool, metered.Config{Config: budget.Config{LockTimeout: time.Millisecond}})
	require.NoError(t, err)
	session, err := metered.Open[string](ctx, s.c, answer("1"))
	require.NoError(t, err)
	session.Close()
	session, err = metered.Resume[string](ctx, c, answer("1"))
	require.NoError(t, err)
	defer session.Close()

	other := s.begin(t, sql.LevelDefault)
	_, err = sqlmetered.DoTx(ctx, s.c, other, metered.Command{ID: "2", Tenant: "ann", Charges: []budget.Charge{{Scope: "units", Amount: 1, Limits: []budget.Limit{budget.Lifetime(15)}}}},
		func(context.Context, *metered.Tx) (any, error) { return nil, nil })
	require.NoError(t, err)
	tx := s.begin(t, sql.LevelDefault)
	insert(t, tx, "settle")
	_, err = sqlmetered.SettleTx(ctx, session, tx, used(4), saves)
	require.ErrorIs(t, err, budget.ErrBusy)
	require.Equal(t, "metered: complete: "+budget.ErrBusy.Error()+": capture: ERROR: canceling statement due to lock timeout (SQLSTATE 55P03)", err.Error())
	require.NoError(t, sqlmetered.Commit(other))

	_, err = sqlmetered.SettleTx(ctx, session, tx, used(4), saves)
	require.NoError(t, err, "the transaction is as before")
	require.NoError(t, sqlmetered.Commit(tx))
	require.Equal(t, [2]int64{5, 0}, s.stands(t))
}

// A session opens in one transaction of the application's and settles in another, each with the application's rows. What is
// rolled back has not happened, and can be done again. The repetition of a settled id is finished.
func TestSession_OpensAndSettlesInTheApplicationsTransaction(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			s := setUp(t, pgtest.Options{})
			ctx := t.Context()
			open := func(end func(*sql.Tx) error) *metered.Session[string] {
				tx := s.begin(t, sql.LevelReadCommitted)
				insert(t, tx, "open")
				session, err := sqlmetered.OpenTx[string](ctx, s.c, tx, answer("1"))
				require.NoError(t, err)
				t.Cleanup(session.Close)
				require.Equal(t, [2]int64{0, 0}, s.stands(t), "nothing is seen before the commit")
				require.NoError(t, end(tx))
				return session
			}
			never := open((*sql.Tx).Rollback)
			require.Zero(t, s.rows(t))
			_, err := never.Settle(ctx, used(1), nil)
			require.ErrorIs(t, err, metered.ErrLost)
			session := open(sqlmetered.Commit)
			require.Equal(t, [2]int64{0, 10}, s.stands(t))
			_, err = metered.Open[string](ctx, s.c, answer("1"))
			require.ErrorIs(t, err, metered.ErrRunning)

			settle := func(end func(*sql.Tx) error) {
				tx := s.begin(t, level)
				insert(t, tx, "settle")
				out, err := sqlmetered.SettleTx(ctx, session, tx, used(4), saves)
				require.NoError(t, err)
				require.Equal(t, "saved", out.Result)
				require.EqualValues(t, 4, out.Holds[0].Lines[0].Captured)
				again, err := sqlmetered.SettleTx(ctx, session, tx, used(4), saves)
				require.NoError(t, err)
				require.True(t, again.Replayed)
				_, err = sqlmetered.SettleTx(ctx, session, tx, used(5), saves)
				require.ErrorIs(t, err, budget.ErrConflict)
				require.Equal(t, [2]int64{0, 10}, s.stands(t), "nothing is seen before the commit")
				require.NoError(t, session.Context().Err())
				require.NoError(t, end(tx))
			}
			settle((*sql.Tx).Rollback)
			require.Equal(t, [2]int64{0, 10}, s.stands(t))
			settle(sqlmetered.Commit)
			require.Equal(t, [2]int64{4, 0}, s.stands(t))
			require.Equal(t, 3, pgtest.Count(t, s.pool, "uploads"))
			require.EqualValues(t, 1, pgtest.Used(t, s.pool, s.c, "requests"))

			tx := s.begin(t, sql.LevelReadCommitted)
			later, err := sqlmetered.OpenTx[string](ctx, s.c, tx, answer("1"))
			require.NoError(t, err)
			require.True(t, later.Finished())
			require.Equal(t, "saved", later.Outcome().Result)
			out, err := sqlmetered.SettleTx(ctx, later, tx, used(4), saves)
			require.NoError(t, err)
			require.True(t, out.Replayed)
			require.NoError(t, sqlmetered.Commit(tx))
			out, err = session.Settle(ctx, used(4), saves)
			require.NoError(t, err)
			require.True(t, out.Replayed)
			require.Equal(t, 3, pgtest.Count(t, s.pool, "uploads"))
		})
	}
}

// A refusal, a failed function and an excess leave the transaction as it was, without the locks of the scope.
func TestSession_ARefusalLeavesTheTransactionAsItWas(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	ctx := t.Context()
	for _, level := range levels {
		r := answer("held " + level.String())
		r.Lines[0].Amount = 8
		session, err := metered.Open[string](ctx, s.c, r)
		require.NoError(t, err)
		tx := s.begin(t, level)
		insert(t, tx, "kept "+level.String())
		_, err = sqlmetered.OpenTx[string](ctx, s.c, tx, answer(level.String()))
		var argument *budget.ArgumentError
		if level == sql.LevelReadCommitted {
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = sqlmetered.OpenTx[string](ctx, s.c, tx, r)
			require.ErrorIs(t, err, metered.ErrRunning)
		} else {
			require.ErrorAs(t, err, &argument)
			require.Equal(t, "tx", argument.Field)
		}
		_, err = sqlmetered.SettleTx(ctx, session, tx, used(9), saves)
		require.ErrorIs(t, err, holds.ErrExcess)
		_, err = sqlmetered.SettleTx(ctx, session, tx, used(1), func(ctx context.Context, tx *metered.Tx) (string, error) {
			_, _ = saves(ctx, tx)
			return "", errOwn
		})
		require.ErrorIs(t, err, errOwn)
		_, err = metered.Do[any](ctx, s.c, metered.Command{ID: "beside " + level.String(), Charges: []budget.Charge{{Scope: "units", Amount: 1}}}, nil)
		require.NoError(t, err, "the scope is free")
		require.NoError(t, sqlmetered.Commit(tx))
		require.NoError(t, session.Cancel(ctx, "no more"))
	}
	require.Equal(t, len(levels), pgtest.Count(t, s.pool, "uploads"))
	require.Equal(t, [2]int64{3, 0}, s.stands(t))
}

// A hold that a transaction has placed is renewed once that has committed. A session that a transaction has settled ends
// without an error when the renewal finds that, and is reported once.
func TestSession_RenewsWhatTheApplicationCommitted(t *testing.T) {
	t.Parallel()
	var told pgtest.Recorder
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &told}})
	ctx := t.Context()
	var session *metered.Session[string]
	hears := func(name string) bool {
		t.Helper()
		heard := func() bool {
			return slices.ContainsFunc(told.Told(), func(s string) bool { return strings.HasPrefix(s, "session "+name) })
		}
		pgtest.WaitFor(t, "the observer to hear of a session that "+name, func() bool {
			return heard() || session.Context().Err() != nil
		})
		return heard() && session.Context().Err() == nil
	}
	// The machine may stand still for longer than a session lasts: then another one is opened.
	for n := 1; ; n++ {
		r := answer(strconv.Itoa(n))
		r.TTL, r.Grace = 12*time.Second, time.Hour
		tx, err := pool.Begin(ctx)
		require.NoError(t, err)
		session, err = metered.OpenTx[string](ctx, c, tx, r)
		require.NoError(t, err)
		defer session.Close()
		early := hears("not_renewed")
		require.NoError(t, tx.Commit(ctx))
		if early && hears("renewed") {
			break
		}
		require.ErrorIs(t, context.Cause(session.Context()), metered.ErrNotRenewed)
		require.NoError(t, session.Cancel(ctx, ""))
		require.Less(t, n, 5, "it is not renewed")
		told.Forget()
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := session.SettleTx(ctx, tx, used(3), nil)
		return err
	}))
	select {
	case <-session.Context().Done():
	case <-time.After(time.Until(pgtest.Patience(t))):
		t.Fatal("the session goes on")
	}
	require.Equal(t, context.Canceled, context.Cause(session.Context()))
	session.Close()
	all := strings.Join(told.Told(), "\n")
	require.Equal(t, 1, strings.Count(all, "session settled"))
	require.NotContains(t, all, "session abandoned")
	require.NotContains(t, all, "session lost")
}

func TestSession_WhatATransactionOfTheApplicationCannotHave(t *testing.T) {
	t.Parallel()
	s := setUp(t, pgtest.Options{})
	tx := s.begin(t, sql.LevelDefault)
	var argument *budget.ArgumentError
	r := answer("1")
	r.OpenTimeout = time.Second
	_, err := sqlmetered.OpenTx[string](t.Context(), s.c, tx, r)
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "Reservation.OpenTimeout", argument.Field)
	for field, change := range map[string]func(*metered.Reservation){
		"Reservation.Isolation":    func(r *metered.Reservation) { r.Isolation = pgx.Serializable },
		"Reservation.EarlyRelease": func(r *metered.Reservation) { r.EarlyRelease = true },
		"Reservation.LSN":          func(r *metered.Reservation) { r.LSN = true },
	} {
		r := answer(field)
		r.Lines[0].Amount = 1
		change(&r)
		session, err := metered.Open[string](t.Context(), s.c, r)
		require.NoError(t, err)
		defer session.Close()
		_, err = sqlmetered.SettleTx(t.Context(), session, tx, used(1), nil)
		require.ErrorAs(t, err, &argument)
		require.Equal(t, field, argument.Field)
	}
	_, err = tx.Exec("select 1/0")
	require.Error(t, err)
	_, err = sqlmetered.OpenTx[string](t.Context(), s.c, tx, answer("2"))
	require.ErrorIs(t, err, guardtx.ErrFailed)
}

// A settlement that is rolled back leaves the session, whose end is reported as ever.
func TestSession_IsCancelledAfterASettlementThatWasRolledBack(t *testing.T) {
	t.Parallel()
	var told pgtest.Recorder
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &told}})
	session, err := metered.Open[string](t.Context(), c, answer("1"))
	require.NoError(t, err)
	require.ErrorIs(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := session.SettleTx(t.Context(), tx, used(3), nil)
		require.NoError(t, err)
		return errOwn
	}), errOwn)
	require.NoError(t, session.Cancel(t.Context(), "no more"))
	session.Close()
	require.Equal(t, 1, strings.Count(strings.Join(told.Told(), "\n"), "session cancelled"))
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "units"})
	require.NoError(t, err)
	require.Equal(t, [2]int64{0, 0}, [2]int64{usage[0].Used, usage[0].Held})
}
