package budget_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

type declaring func(*budget.Ledger, context.Context, pgx.Tx, ...string) ([]budget.Resource, error)

// declare creates, retires or restores in a transaction of its own.
func declare(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, f declaring, scopes ...string) ([]budget.Resource, error) {
	t.Helper()
	return pgtest.InTx(t.Context(), pool, func(tx pgx.Tx) ([]budget.Resource, error) { return f(l, t.Context(), tx, scopes...) })
}

func mustDeclare(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, f declaring, scopes ...string) []budget.Resource {
	t.Helper()
	all, err := declare(t, pool, l, f, scopes...)
	require.NoError(t, err)
	return all
}

var create, retire, restore declaring = (*budget.Ledger).Create, (*budget.Ledger).Retire, (*budget.Ledger).Restore

func requireAbsent(t testing.TB, err error, unknown, retired []string) {
	t.Helper()
	var absent *budget.ScopeError
	require.ErrorAs(t, err, &absent)
	require.Equal(t, budget.ScopeError{Unknown: unknown, Retired: retired}, *absent)
	require.Equal(t, unknown != nil, errors.Is(err, budget.ErrScopeUnknown))
	require.Equal(t, retired != nil, errors.Is(err, budget.ErrScopeRetired))
	require.NotErrorIs(t, err, budget.ErrExceeded)
}

func TestCreate_MarksOnlyNewScopesAsChanged(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	first := mustDeclare(t, pool, l, create, "seat/2", "seat/1", "seat/2")
	require.Equal(t, []budget.Resource{{Scope: "seat/1", CreatedAt: start, Changed: true}, {Scope: "seat/2", CreatedAt: start, Changed: true}}, first)
	clock.Advance(time.Hour)
	again := mustDeclare(t, pool, l, create, "seat/2", "seat/3")
	require.Equal(t, []budget.Resource{{Scope: "seat/2", CreatedAt: start}, {Scope: "seat/3", CreatedAt: clock.Now(), Changed: true}}, again)
}

func TestCreate_OfARetiredScopeCreatesNothing(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	mustDeclare(t, pool, l, create, "a", "b")
	clock.Advance(time.Hour)
	retired := mustDeclare(t, pool, l, retire, "a")
	require.Equal(t, []budget.Resource{{Scope: "a", CreatedAt: start, RetiredAt: clock.Now(), Changed: true}}, retired)
	tx := begin(t, pool, pgx.ReadCommitted)
	_, err := l.Create(t.Context(), tx, "c", "b", "a")
	requireAbsent(t, err, nil, []string{"a"})
	require.NoError(t, tx.Commit(t.Context()), "it leaves the transaction usable")
	all := resources(t, pool, l, "")
	require.Equal(t, []budget.Resource{{Scope: "a", CreatedAt: start, RetiredAt: clock.Now()}, {Scope: "b", CreatedAt: start}}, all)
}

func TestRetire_IsRepeatableAndTakenBackByRestoreAlone(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, l, clock := open(t)
	mustDeclare(t, pool, l, create, "a", "b")
	mustDeclare(t, pool, l, retire, "a")
	clock.Advance(time.Hour)
	require.Equal(t, []budget.Resource{{Scope: "a", CreatedAt: start, RetiredAt: start}, {Scope: "b", CreatedAt: start, RetiredAt: clock.Now(), Changed: true}},
		mustDeclare(t, pool, l, retire, "b", "a"))
	require.Equal(t, []budget.Resource{{Scope: "a", CreatedAt: start, Changed: true}}, mustDeclare(t, pool, l, restore, "a"))
	require.Equal(t, []budget.Resource{{Scope: "a", CreatedAt: start}}, mustDeclare(t, pool, l, restore, "a"))

	_, err := declare(t, pool, l, retire, "a", "typo", "tipo")
	requireAbsent(t, err, []string{"tipo", "typo"}, nil)
	require.Equal(t, []budget.Resource{{Scope: "a", CreatedAt: start}}, mustDeclare(t, pool, l, create, "a"), "nothing was retired")
	_, err = declare(t, pool, l, restore, "b", "typo")
	requireAbsent(t, err, []string{"typo"}, nil)
}

func resources(t *testing.T, db budget.Querier, l *budget.Ledger, prefix string) (all []budget.Resource) {
	t.Helper()
	for r, err := range l.Resources(t.Context(), db, prefix) {
		require.NoError(t, err)
		all = append(all, r)
	}
	return all
}

func TestResources_ArePagedByPrefix(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	var want []string
	for i := range 1001 { // a page, and one
		want = append(want, fmt.Sprintf("seat/%04d", i))
	}
	mustDeclare(t, pool, l, create, "seat", "seat0", "seau/1", "room/1")
	mustDeclare(t, pool, l, create, want[:1000]...)
	mustDeclare(t, pool, l, create, want[1000])
	var got []string
	for _, r := range resources(t, pool, l, "seat/") {
		got = append(got, r.Scope)
	}
	require.Equal(t, want, got)
	require.Len(t, resources(t, pool, l, ""), 1005)
	for r, err := range l.Resources(t.Context(), pool, "seat/") {
		require.NoError(t, err)
		require.Equal(t, want[0], r.Scope)
		break
	}
}

func TestDeclarations_RefuseWrongArguments(t *testing.T) {
	t.Parallel()
	ctx, tx := t.Context(), untouchable{t: t}
	l := newLedger(t, budget.Config{})
	for _, call := range []declaring{create, retire, restore} {
		for _, scopes := range [][]string{nil, slices.Repeat([]string{"a"}, 1001)} {
			_, err := call(l, ctx, tx, scopes...)
			requireArgument(t, err, "scopes")
		}
		for _, text := range append(mapValues(badTexts), "") {
			_, err := call(l, ctx, tx, "a", text)
			requireArgument(t, err, "scopes[1]")
		}
	}
	for _, wrong := range []string{"\xff", "\x00"} {
		for _, err := range l.Resources(ctx, tx, wrong) {
			requireArgument(t, err, "prefix")
		}
	}
}

func mapValues(m map[string]string) (all []string) {
	for _, v := range m {
		all = append(all, v)
	}
	return all
}

// A transaction that creates a scope keeps its row until the end, and a retirement that waits has the scope's lock.
func TestRetire_WaitsForACreatorNoLongerThanForALock(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustDeclare(t, pool, l, create, "a")
	tx := begin(t, pool, pgx.ReadCommitted)
	_, err := l.Create(ctx, tx, "a")
	require.NoError(t, err)
	impatient := newLedger(t, budget.Config{LockTimeout: 50 * time.Millisecond})
	retired := pgtest.Going(func() error { _, err := declare(t, pool, impatient, retire, "a"); return err })
	select {
	case err := <-retired:
		require.ErrorIs(t, err, budget.ErrBusy)
	case <-time.After(time.Until(pgtest.Patience(t))):
		require.NoError(t, tx.Rollback(ctx))
		require.Fail(t, "it waited for the creator", "%v", <-retired)
	}
	require.NoError(t, tx.Commit(ctx))
	require.True(t, mustDeclare(t, pool, impatient, retire, "a")[0].Changed)
}

func TestCreate_OfManyAtOnceOneCreates(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	pool, l, _ := open(t)
	scopes := make([]string, 200)
	for i := range scopes {
		scopes[i] = fmt.Sprint(i * 7919 % 1000)
	}
	const workers = 6
	var created [workers]int
	require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
		mine := slices.Clone(scopes)
		if worker%2 == 1 {
			slices.Reverse(mine)
		}
		return (&retrier{pool: pool}).run(ctx, isolations[worker%3], func(tx pgx.Tx) error {
			all, err := l.Create(ctx, tx, mine...)
			created[worker] = 0
			for _, r := range all {
				if r.Changed {
					created[worker]++
				}
			}
			if code(err) == sqlstate.DeadlockDetected {
				return errors.New("a deadlock")
			}
			return err
		})
	}))
	require.ElementsMatch(t, []int{200, 0, 0, 0, 0, 0}, created[:])
}
