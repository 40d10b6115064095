package budget_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// withTotal are a charge with a limit and one of a total, in either order.
func withTotal(totalFirst bool, user string, amount int64, limits ...budget.Limit) []budget.Charge {
	own, total := budget.Charge{Scope: user, Amount: amount, Limits: limits}, budget.Charge{Scope: "channel", Amount: 10 * amount}
	if totalFirst {
		return []budget.Charge{total, own}
	}
	return []budget.Charge{own, total}
}

func chargeAll(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, charges ...budget.Charge) (r budget.Receipt, err error) {
	err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		r, err = l.Charge(t.Context(), tx, charges...)
		return err
	})
	return r, err
}

func clientOf(t testing.TB, pool *pgxpool.Pool) *metered.Client {
	t.Helper()
	client, err := metered.New(pool, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
	require.NoError(t, err)
	return client
}

// A charge with a limit beside a total goes the short way, by itself, in a command and in a command
// of one flush, and answers, records and replays as the full way does.
func TestTotal_BesideALimitAnswersAsTheFullFunctionsDo(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	type world struct {
		pool   *pgxpool.Pool
		l      *budget.Ledger
		client *metered.Client
		clock  *pgtest.Clock
	}
	var worlds []world
	for _, full := range []bool{false, true} {
		pool, l, clock := open(t)
		if full {
			theFullWay(t, pool)
		}
		makeBusy(t, pool, l, "channel")
		worlds = append(worlds, world{pool, l, clientOf(t, pool), clock})
	}
	both := func(what string, do func(w world) (any, error)) (refused bool) {
		t.Helper()
		var answers, errs [2]any
		for i, w := range worlds {
			answer, err := do(w)
			answers[i], errs[i] = answer, fmt.Sprint(err)
			refused = err != nil
		}
		require.Equal(t, errs[1], errs[0], what)
		require.Equal(t, answers[1], answers[0], what)
		return refused
	}
	_, err := worlds[0].pool.Exec(ctx, `create table full_ways (way text);
		alter function metered._write_others rename to _write_others_truly;
		create function metered._write_others(charges metered.new_charge[], tallies timestamptz[], ahead interval, wait_ms int,
			origin metered.origin, mode text, hold metered.hold_terms, standing boolean) returns metered.charged
		language plpgsql as 'begin
			insert into public.full_ways values (mode);
			return metered._write_others_truly(charges, tallies, ahead, wait_ms, origin, mode, hold, standing); end'`)
	require.NoError(t, err)
	refusals := 0
	for step := range 36 {
		for _, w := range worlds {
			w.clock.Advance(time.Duration(1+step%5)*11*time.Second + 7*time.Microsecond)
		}
		limit := []budget.Limit{budget.PerWindow(6, 2*time.Minute), budget.Lifetime(30), budget.PerWindow(400, time.Hour)}[step%3]
		charges := withTotal(step%2 == 0, "user", int64(1+step%2), limit)
		if step%4 == 0 {
			charges[0].Note, charges[1].Note = budget.Note{Actor: "ann"}, budget.Note{Actor: "ben"}
		}
		charges[0].NoStandings, charges[1].NoStandings = step%6 == 1, step%6 == 1
		cmd := metered.Command{ID: fmt.Sprint("op", step), Name: "total", Charges: charges}
		what := fmt.Sprint("step ", step)
		var refused bool
		var again func(w world) (any, error)
		switch step / 3 % 3 {
		case 0:
			refused = both(what, func(w world) (any, error) { return chargeAll(t, w.pool, w.l, charges...) })
		case 1:
			again = func(w world) (any, error) { return metered.Do[any](ctx, w.client, cmd, nil) }
		case 2:
			again = func(w world) (any, error) {
				return metered.Do(ctx, w.client, cmd, func(context.Context, *metered.Tx) (int, error) { return step, nil })
			}
		}
		if again != nil {
			refused = both(what, again)
			both(what+" again", again)
		}
		if refused {
			refusals++
		}
		both(what+", usage", func(w world) (any, error) {
			return w.l.Usage(ctx, w.pool, budget.Query{Scope: "channel"}, budget.Query{Scope: "user", Window: time.Hour})
		})
	}
	require.Greater(t, refusals, 3)
	require.Less(t, refusals, 20)
	require.Equal(t, 1, pgtest.Count(t, worlds[0].pool, "full_ways"), "only the first charge of a new scope")
	for _, w := range worlds {
		requireVerified(t, w.pool, w.l)
	}
	both("records", func(w world) (any, error) {
		return pgtest.Value[string](t, w.pool, `select string_agg(to_jsonb(o)::text, e'\n' order by o.at, o.id) from metered.operations o`), nil
	})
	both("entries", func(w world) (any, error) {
		return pgtest.Value[string](t, w.pool, `select string_agg(concat_ws(' ', l.scope, l.seq, l.amount, l.at, l.operation, l.note, l.ref), e'\n' order by l.scope, l.seq)
			from metered.ledger l`), nil
	})
}

// A total beside a limit waits for nobody: neither for the scope's lock, nor for another tally of the same
// time. It is one entry in the end, or none if the limit refuses.
func TestTotal_BesideALimitWaitsForNobody(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	limit := budget.PerWindow(5, time.Hour)
	fold := begin(t, pool, pgx.ReadCommitted)
	_, err := l.Charge(ctx, fold, budget.Charge{Scope: "channel", Amount: 1, Limits: []budget.Limit{limit}})
	require.NoError(t, err)

	// The chain's lock is held, and the clock stands still, so that all have the same time.
	clock.Advance(time.Second)
	var txs []pgx.Tx
	seqs := map[int64]bool{}
	for user := range 4 {
		tx := begin(t, pool, pgx.ReadCommitted)
		_, err := tx.Exec(ctx, "set local lock_timeout = '1min'")
		require.NoError(t, err)
		r, err := l.Charge(ctx, tx, withTotal(true, fmt.Sprint("user", user), 1, limit)...)
		require.NoError(t, err)
		require.Negative(t, r.Entries[0].Seq)
		seqs[r.Entries[0].Seq] = true
		_, err = l.Charge(ctx, tx, withTotal(true, fmt.Sprint("user", user), 5, limit)...)
		require.ErrorIs(t, err, budget.ErrExceeded)
		txs = append(txs, tx)
	}
	require.Len(t, seqs, 4)
	for _, tx := range append(txs, fold) {
		require.NoError(t, tx.Commit(ctx))
	}
	require.Equal(t, int64(43), usage(t, pool, l, "channel", 0).Used)
	requireVerified(t, pool, l)

	// At another isolation level, or under the tallies' lock, it is no tally.
	clock.Advance(time.Second)
	old := begin(t, pool, pgx.RepeatableRead)
	r, err := l.Charge(ctx, old, withTotal(false, "user0", 1, limit)...)
	require.NoError(t, err)
	require.Positive(t, r.Entries[1].Seq)
	require.NoError(t, old.Commit(ctx))
	locks := begin(t, pool, pgx.ReadCommitted)
	require.NoError(t, l.Lock(ctx, locks, "channel"))
	clock.Advance(time.Second)
	waits := pgtest.Going(func() error {
		r, err = chargeAll(t, pool, l, withTotal(false, "user1", 1, limit)...)
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, locks.Commit(ctx))
	require.NoError(t, <-waits)
	require.Positive(t, r.Entries[1].Seq)
	require.Equal(t, int64(63), usage(t, pool, l, "channel", 0).Used)

	// Some fold, so few remain.
	clock.Advance(time.Second)
	for range 100 {
		clock.Advance(time.Microsecond)
		_, err := chargeAll(t, pool, l, withTotal(true, "many", 1, budget.Lifetime(100))...)
		require.NoError(t, err)
	}
	require.LessOrEqual(t, pgtest.Count(t, pool, "metered.tallies"), 32)
	require.Equal(t, int64(1063), usage(t, pool, l, "channel", 0).Used)
	requireVerified(t, pool, l)
}

// Whoever is granted the functions can send them anything.
func TestTotal_BesideALimitHasBoundsInSQL(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	mustCharge(t, pool, l, "user", 1, budget.Lifetime(10))
	clock.Advance(time.Second)
	key := l.LockKey("channel")
	send := func(units int64, note string) error {
		clock.Advance(time.Second + time.Microsecond) // else the chain is not behind it
		_, err := pool.Exec(ctx, `select metered.charge_total('user', $1, 1, 10, '1 hour', null, null, null, null, false, 'channel', $2, $3, $4::jsonb, false, '1 minute', 1000)`,
			l.LockKey("user"), key, units, note)
		return err
	}
	for _, units := range []int64{-1, 0, 1<<53 + 1} {
		require.Error(t, send(units, "null"), units)
	}
	require.NoError(t, send(1<<40+1, "{}"))
	require.NoError(t, send(1, `{"use": "fuel"}`))
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies"), "these are entries")
	require.NoError(t, send(1, `{"actor": "ann"}`))
	require.Equal(t, 1, pgtest.Count(t, pool, "metered.tallies"))
	require.Equal(t, int64(2+1<<40+1+1+1), usage(t, pool, l, "channel", 0).Used)

	clock.Advance(time.Second)
	_, err := pool.Exec(ctx, `select metered.complete_command_total('t', 'op', 'another', repeat('a', 33)::bytea, null, '', null, null,
		'user', $1, 1, 10, '1 hour', null, null, null, null, false, 'channel', $2, 1, null, false, '1 minute', 1000)`, l.LockKey("user"), key)
	require.ErrorContains(t, err, "MT005")
	require.Zero(t, pgtest.Count(t, pool, "metered.operations"))
	requireVerified(t, pool, l)
}

// A chain that is ahead of the clock lets tallies wait for each other no more than one that is not.
func TestTally_WaitsForNobodyWhereTheChainIsAhead(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	l, clock := newLedger(t, budget.Config{LockTimeout: 20 * time.Second}), pgtest.SetClock(t, pool, start.Add(time.Hour))
	makeBusy(t, pool, l, "channel")
	clock.Advance(-time.Hour)
	var open []pgx.Tx
	for nth := range 10 {
		tx := begin(t, pool, pgx.ReadCommitted)
		r, err := l.Charge(ctx, tx, budget.Charge{Scope: "channel", Amount: 10})
		require.NoError(t, err)
		require.Negative(t, r.Entries[0].Seq)
		if nth%2 == 0 {
			open = append(open, tx)
		} else {
			require.NoError(t, tx.Commit(ctx))
		}
	}
	require.Equal(t, int64(52), usage(t, pool, l, "channel", 0).Used)
	for _, tx := range open {
		require.NoError(t, tx.Commit(ctx))
	}
	mustCharge(t, pool, l, "channel", 1, budget.Lifetime(1<<40))
	require.Equal(t, int64(103), usage(t, pool, l, "channel", 0).Used)
	requireVerified(t, pool, l)
}

// A total of which nobody had to wait is an entry like any other, also beside a limit.
func TestTotal_BesideALimitBeginsAsAnEntry(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	for nth := range int64(3) {
		clock.Advance(time.Second)
		r, err := chargeAll(t, pool, l, withTotal(false, "user", 1, budget.Lifetime(10))...)
		require.NoError(t, err)
		require.Equal(t, nth+1, r.Entries[0].Seq)
		require.Equal(t, nth+1, r.Entries[1].Seq)
	}
}

// A repair of the clock waits for the tallies that are on their way no longer than LockTimeout.
func TestTally_WhatEndsThemWaitsAsLongAsForAnyLock(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	clock.Advance(time.Hour)
	makeBusy(t, pool, l, "channel")
	clock.Advance(-time.Hour)
	tally := tally(t, pool, l, "channel", 1)
	hasty := newLedger(t, budget.Config{LockTimeout: 50 * time.Millisecond})
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// Of two timeouts that are over the server reports the earlier one, also after it stood still.
		if _, err := tx.Exec(ctx, "set local statement_timeout = '9s'"); err != nil {
			return err
		}
		_, err := hasty.RepairClock(ctx, tx, "channel", budget.Note{})
		return err
	})
	require.Equal(t, sqlstate.LockNotAvailable, sqlstate.Of(err), "%v", err)
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NoError(t, tally.Commit(ctx))
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := l.RepairClock(ctx, tx, "channel", budget.Note{})
		return err
	}))
	require.Equal(t, int64(3), usage(t, pool, l, "channel", 0).Used)
	requireVerified(t, pool, l)
}

func TestPurge_TriesAgainAfterADeadlock(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "scope", 40)
	clock.Advance(time.Hour)
	execute(t, pool, `create sequence deadlocks;
		create function deadlock() returns trigger language plpgsql as 'begin
			if nextval(''public.deadlocks'') = 1 then raise deadlock_detected; end if;
			return null; end';
		create trigger deadlock after delete on metered.ledger execute function deadlock()`)
	require.Positive(t, purge(t, pool, l, time.Minute).Entries)
	require.Greater(t, pgtest.Value[int64](t, pool, "select last_value from deadlocks"), int64(1))
	requireVerified(t, pool, l)
}

// Whatever else charges or reads a scope with tallies counts them: a batch, a command in a caller's
// transaction, thresholds, and pages of entries.
func TestTally_OtherCallsCountThem(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	advance := func() { clock.Advance(time.Second + time.Microsecond) }
	pending := func(amount int64) {
		t.Helper()
		advance()
		require.NoError(t, tally(t, pool, l, "channel", amount).Commit(ctx))
		require.Equal(t, 1, pgtest.Count(t, pool, "metered.tallies where scope = 'channel'"))
	}

	pending(10)
	b := newBatcher(t, pool, l, budget.BatcherConfig{})
	_, err := b.Charge(ctx, budget.Charge{Scope: "channel", Amount: 1, Limits: []budget.Limit{budget.Lifetime(12)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	posted, err := b.Charge(ctx, budget.Charge{Scope: "channel", Amount: 1, Limits: []budget.Limit{budget.Lifetime(13)}})
	require.NoError(t, err)
	require.Equal(t, int64(4), posted.Seq, "after the tally, which is an entry now")
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies where scope = 'channel'"))

	// A command in a transaction: one that is refused leaves no tally behind.
	advance()
	client := clientOf(t, pool)
	tx := begin(t, pool, pgx.ReadCommitted)
	for i, limit := range []int64{5, 5, 1} {
		cmd := metered.Command{ID: fmt.Sprint("op", i), Charges: withTotal(true, "user", 2, budget.Lifetime(limit))}
		done, err := metered.DoTx(ctx, client, tx, cmd, func(context.Context, *metered.Tx) (int, error) { return i, nil })
		if i == 2 {
			require.ErrorIs(t, err, budget.ErrExceeded)
			continue
		}
		require.NoError(t, err)
		require.Negative(t, done.Receipt.Entries[0].Seq)
	}
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, int64(13+40), usage(t, pool, l, "channel", 0).Used)
	require.Equal(t, 2, pgtest.Count(t, pool, "metered.tallies where scope = 'channel'"))

	// Entries come in pages, without what is not folded, and then with it, once.
	var seen []int64
	page := func() {
		after := int64(0)
		if len(seen) > 0 {
			after = int64(len(seen))
		}
		for e, err := range l.Entries(ctx, pool, "channel", budget.EntriesOptions{After: after, Max: 3}) {
			require.NoError(t, err)
			require.Equal(t, int64(len(seen)+1), e.Seq)
			seen = append(seen, e.Amount)
		}
	}
	page()
	page()
	page()
	require.Equal(t, []int64{1, 1, 10, 1}, seen)
	mustCharge(t, pool, l, "channel", 1, budget.Lifetime(1000))
	page()
	require.Equal(t, []int64{1, 1, 10, 1, 20, 20, 1}, seen)

	// A level that tallies have reached is reported by the next charge that has it, once.
	pending(30)
	level := budget.Lifetime(1000).WithThresholds(budget.Threshold{Name: "much", Used: 80})
	told := 0
	telling := newLedger(t, budget.Config{OnThreshold: func(context.Context, pgx.Tx, budget.Crossing) error {
		told++
		return nil
	}})
	for range 2 {
		advance()
		_, err := charge(ctx, pool, telling, "channel", 1, level)
		require.NoError(t, err)
	}
	require.Equal(t, 1, told)
	require.Equal(t, int64(86), usage(t, pool, l, "channel", 0).Used)
	requireVerified(t, pool, l)
}

// A command that is repeated is answered from its record, while another call has locked its scopes.
func TestDo_ARepetitionWaitsForNoScope(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	l := newLedger(t, budget.Config{LockTimeout: time.Minute})
	client, err := metered.New(pool, metered.Config{Config: budget.Config{LockTimeout: 100 * time.Millisecond}})
	require.NoError(t, err)
	makeBusy(t, pool, l, "channel")
	mustCharge(t, pool, l, "user", 1, budget.Lifetime(100))
	own := withTotal(false, "user", 3, budget.Lifetime(100))[:1]
	commands := []metered.Command{
		{ID: "limit", Charges: own}, {ID: "total first", Charges: withTotal(true, "user", 3, budget.Lifetime(100))},
		{ID: "total last", Charges: withTotal(false, "user", 3, budget.Lifetime(100))}, {ID: "sum", Charges: []budget.Charge{{Scope: "user", Amount: 3}}},
	}
	do := func(cmd metered.Command, replayed bool) {
		t.Helper()
		out, err := metered.Do[any](ctx, client, cmd, nil)
		require.NoError(t, err, cmd.ID)
		require.Equal(t, replayed, out.Replayed, cmd.ID)
	}
	for _, cmd := range commands {
		do(cmd, false)
	}
	tallies := pgtest.Count(t, pool, "metered.tallies")
	holder := begin(t, pool, pgx.ReadCommitted)
	_, err = l.Charge(ctx, holder, budget.Charge{Scope: "user", Amount: 1})
	require.NoError(t, err)
	for _, cmd := range commands {
		do(cmd, true)
	}
	require.Equal(t, tallies, pgtest.Count(t, pool, "metered.tallies"))
	_, err = metered.Do[any](ctx, client, metered.Command{ID: "new", Charges: own}, nil)
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NoError(t, holder.Commit(ctx))
	require.Equal(t, int64(1+4*3+1), usage(t, pool, l, "user", 0).Used)
	requireVerified(t, pool, l)
}
