package budget_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	all, err := l.Resources(t.Context(), pool, budget.ResourceFilter{})
	require.NoError(t, err)
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

// A charge or a credit of a scope that was not declared is refused if anything demands it: the ledger or the charge.
func TestMustExist_AMistypedScopeIsUnknownAndNoFreshBudget(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, lax, _ := open(t)
	strict := newLedger(t, budget.Config{MustExist: true})
	mustDeclare(t, pool, lax, create, "seat/1", "seat/2")
	mustDeclare(t, pool, lax, retire, "seat/2")
	tx := begin(t, pool, pgx.ReadCommitted)
	for demanded, l := range map[bool]*budget.Ledger{false: strict, true: lax} {
		one := func(scope string) budget.Charge {
			return budget.Charge{Scope: scope, Amount: 1, MustExist: demanded, Limits: []budget.Limit{budget.Lifetime(100)}}
		}
		for _, call := range []func(context.Context, ...budget.Charge) error{
			func(ctx context.Context, c ...budget.Charge) error { _, err := l.Charge(ctx, tx, c...); return err },
			func(ctx context.Context, c ...budget.Charge) error { _, err := l.Check(ctx, tx, c...); return err },
		} {
			requireAbsent(t, call(ctx, one("seat/3")), []string{"seat/3"}, nil)
			requireAbsent(t, call(ctx, one("seat/2")), nil, []string{"seat/2"})
			requireAbsent(t, call(ctx, one("seat/3"), one("seat/1"), one("seat/2"), one("Seat/1")), []string{"seat/3", "Seat/1"}, []string{"seat/2"})
			// Before limits, which a scope that is not there has not.
			require.ErrorIs(t, call(ctx, budget.Charge{Scope: "seat/3", Amount: 9, MustExist: demanded, Limits: []budget.Limit{budget.Lifetime(1)}}), budget.ErrScopeUnknown)
			require.ErrorIs(t, call(ctx, budget.Charge{Scope: "seat/1", Amount: 9, MustExist: demanded, Limits: []budget.Limit{budget.Lifetime(1)}}), budget.ErrExceeded)
			require.NoError(t, call(ctx, one("seat/1")))
		}
		_, err := l.Credit(ctx, tx, budget.Credit{Scope: "seat/3", Amount: 1, MustExist: demanded})
		requireAbsent(t, err, []string{"seat/3"}, nil)
		_, err = l.Credit(ctx, tx, budget.Credit{Scope: "seat/2", Amount: 1, MustExist: demanded})
		requireAbsent(t, err, nil, []string{"seat/2"})
		_, err = l.Credit(ctx, tx, budget.Credit{Scope: "seat/1", Amount: 1, MustExist: demanded})
		require.NoError(t, err)
	}
	require.Zero(t, usage(t, tx, lax, "seat/3", 0).Seq, "nothing was written")
	require.Zero(t, usage(t, tx, lax, "seat/2", 0).Seq)
	_, err := lax.Charge(ctx, tx, budget.Charge{Scope: "seat/3", Amount: 1}, budget.Charge{Scope: "seat/2", Amount: 1}, budget.Charge{Scope: "seat/1", Amount: 1, MustExist: true})
	require.NoError(t, err, "a charge without MustExist looks nothing up")
	// A refund gives back units that were charged before the scope was retired.
	_, err = strict.Refund(ctx, tx, budget.Refund{Scope: "seat/2", Seq: 1, Amount: 1})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(ctx))
	requireVerified(t, pool, lax)
}

// A refusal rests on the rows committed by now, not on the snapshot. A charge's answer that a scope exists holds until
// the charge commits.
func TestMustExist_AnOldSnapshotDecidesNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	charge := func(tx pgx.Tx, scope string) error {
		_, err := l.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1, MustExist: true})
		return err
	}
	for _, iso := range isolations {
		name := func(s string) string { return strings.ReplaceAll(string(iso), " ", "") + "/" + s }
		mustDeclare(t, pool, l, create, name("a"), name("b"), name("c"))
		mustDeclare(t, pool, l, retire, name("b"))
		old := func() pgx.Tx {
			tx := begin(t, pool, iso)
			require.Zero(t, usage(t, tx, l, name("a"), 0).Seq) // takes the snapshot
			return tx
		}
		calls := map[string]func(tx pgx.Tx) error{
			"retired since":  func(tx pgx.Tx) error { return charge(tx, name("a")) },
			"restored since": func(tx pgx.Tx) error { return charge(tx, name("b")) },
			"created since":  func(tx pgx.Tx) error { return charge(tx, name("d")) },
			"credit": func(tx pgx.Tx) error {
				_, err := l.Credit(ctx, tx, budget.Credit{Scope: name("a"), Amount: 1, MustExist: true})
				return err
			},
			"retired again": func(tx pgx.Tx) error { _, err := l.Retire(ctx, tx, name("a")); return err },
			"retired late":  func(tx pgx.Tx) error { _, err := l.Retire(ctx, tx, name("d")); return err },
			"created again": func(tx pgx.Tx) error { _, err := l.Create(ctx, tx, name("d")); return err },
			"created late":  func(tx pgx.Tx) error { _, err := l.Create(ctx, tx, name("a")); return err },
			"charged since": func(tx pgx.Tx) error { _, err := l.Retire(ctx, tx, name("c")); return err },
		}
		txs := map[string]pgx.Tx{}
		for what := range calls {
			txs[what] = old()
		}
		still := old()
		mustDeclare(t, pool, l, create, name("d"))
		mustDeclare(t, pool, l, retire, name("a"))
		mustDeclare(t, pool, l, restore, name("b"))
		mustCharge(t, pool, l, name("c"), 1)
		for what, call := range calls {
			err := call(txs[what])
			switch {
			case iso != pgx.ReadCommitted:
				require.Equal(t, sqlstate.SerializationFailure, code(err), "%s: %v", what, err)
			case what == "retired since", what == "credit", what == "created late":
				requireAbsent(t, err, nil, []string{name("a")})
			default:
				require.NoError(t, err, what)
			}
			require.NoError(t, txs[what].Rollback(ctx))
		}
		requireAbsent(t, charge(still, name("never")), []string{name("never")}, nil)
		if iso != pgx.ReadCommitted {
			_, err := l.Check(ctx, still, budget.Charge{Scope: name("a"), Amount: 1, MustExist: true})
			require.NoError(t, err, "a look is of its snapshot")
		}
		require.NoError(t, still.Commit(ctx))
		all, err := l.Resources(ctx, pool, budget.ResourceFilter{Prefix: name("")})
		require.NoError(t, err)
		require.Len(t, all, 4, "the attempts were rolled back")
	}
}

// A charge that was let in commits before the retirement does, and none after.
func TestRetire_WaitsForChargesAndChargesWaitForIt(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, iso := range isolations {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			pool, l, _ := open(t)
			mustDeclare(t, pool, l, create, "a")
			one := budget.Charge{Scope: "a", Amount: 1, MustExist: true}
			charging := begin(t, pool, iso)
			_, err := l.Charge(ctx, charging, one)
			require.NoError(t, err)
			retired := pgtest.Going(func() error { _, err := declare(t, pool, l, retire, "a"); return err })
			pgtest.WaitQueued(t, pool, 1)
			late := begin(t, pool, iso)
			charged := pgtest.Going(func() error { _, err := l.Charge(ctx, late, one); return err })
			pgtest.WaitQueued(t, pool, 2)
			require.NoError(t, charging.Commit(ctx))
			require.NoError(t, <-retired)
			if err := <-charged; iso == pgx.ReadCommitted {
				requireAbsent(t, err, nil, []string{"a"})
			} else {
				require.Equal(t, sqlstate.SerializationFailure, code(err), "%v", err)
			}
			require.NoError(t, late.Rollback(ctx))
			require.Equal(t, int64(1), usage(t, pool, l, "a", 0).Used)
		})
	}
}

// No Go call sends a key that is not the scope's, but a role may call the function.
func TestMustExist_UnderAWrongKeyNothingIsDecided(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	mustDeclare(t, pool, l, create, "a")
	for _, sql := range []string{
		`select metered.charge(array[('a', 1, 1, 0, '{}', null, true, null, null)]::metered.new_charge[], '1 min', 1000, true)`,
		`select metered.credit('a', 1, 1, true, 1000, null, false)`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.Equal(t, "22023", code(err), "%v", err)
		execute(t, pool, strings.Replace(sql, "'a', 1,", "'a', null,", 1))
	}
}

// Charges, retirements and restorations race. A charge that found the scope is counted by the next retirement, and no
// charge is made while the scope is retired.
func TestMustExist_RacingRetirementsAndChargesAreExact(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, level := range []string{"read committed", "repeatable read", "serializable", "mixed"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			const workers, attempts = 6, 30
			ctx := t.Context()
			pool := pgtest.Open(t)
			l := newLedger(t, budget.Config{MustExist: true})
			mustDeclare(t, pool, l, create, "a")
			execute(t, pool, `create table periods (n serial, retired bool, used bigint)`)
			retry := &retrier{pool: pool}
			isolation := func(n int) pgx.TxIsoLevel {
				if level == "mixed" {
					return isolations[n%3]
				}
				return pgx.TxIsoLevel(level)
			}
			var admitted, refused [workers]int64
			stop := make(chan struct{})
			retiring := pgtest.Going(func() error {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return nil
					default:
					}
					err := retry.run(ctx, isolation(n), func(tx pgx.Tx) error {
						call := l.Retire
						if n%2 == 1 {
							call = l.Restore
						}
						done, err := call(ctx, tx, "a")
						if err == nil && !done[0].Changed {
							err = errors.New("nothing was changed")
						}
						if err == nil {
							_, err = tx.Exec(ctx, `insert into periods (retired, used) select $1::bool, coalesce(max(spent), 0) from metered.ledger`, n%2 == 0)
						}
						return err
					})
					if err != nil {
						return err
					}
				}
			})
			err := pgtest.InParallel(workers, func(worker int) error {
				for n := 0; n < attempts || refused[worker] == 0 && n < 100*attempts; n++ {
					err := retry.run(ctx, isolation(worker+n), func(tx pgx.Tx) error {
						if _, err := tx.Exec(ctx, "select 1"); err != nil { // so that the snapshot is older
							return err
						}
						_, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1})
						return err
					})
					if err == nil {
						admitted[worker]++
					} else if !errors.Is(err, budget.ErrScopeRetired) {
						return err
					} else {
						refused[worker]++
					}
				}
				return nil
			})
			close(stop)
			require.NoError(t, errors.Join(err, <-retiring))
			var sum, refusals int64
			for w := range workers {
				sum, refusals = sum+admitted[w], refusals+refused[w]
			}
			require.Equal(t, sum, usage(t, pool, l, "a", 0).Used)
			require.Positive(t, sum)
			require.Positive(t, refusals)
			// As many units were used when it was restored as when it was retired.
			var periods, wrong int
			require.NoError(t, pool.QueryRow(ctx, `with p as (select retired, used, lead(used) over (order by n) as later from periods)
				select count(*), count(*) filter (where later <> used) from p where retired and later is not null`).Scan(&periods, &wrong))
			require.Positive(t, periods)
			require.Zero(t, wrong)
			requireVerified(t, pool, l)
		})
	}
}

func TestResources_ArePagedByPrefix(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	var want []string
	for i := range 25 {
		want = append(want, fmt.Sprintf("seat/%03d", i))
	}
	mustDeclare(t, pool, l, create, append([]string{"seat", "seat0", "seau/1", "room/1"}, want...)...)
	var got []string
	for f := (budget.ResourceFilter{Prefix: "seat/", Max: 10}); ; {
		page, err := l.Resources(ctx, pool, f)
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		for _, r := range page {
			got = append(got, r.Scope)
		}
		f.After = got[len(got)-1]
	}
	require.Equal(t, want, got)
	all, err := l.Resources(ctx, pool, budget.ResourceFilter{})
	require.NoError(t, err)
	require.Len(t, all, 29)
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
	for field, f := range map[string]budget.ResourceFilter{
		"ResourceFilter.Prefix": {Prefix: "\xff"}, "ResourceFilter.After": {After: "\x00"}, "ResourceFilter.Max": {Max: 1001},
	} {
		_, err := l.Resources(ctx, tx, f)
		requireArgument(t, err, field)
	}
}

func mapValues(m map[string]string) (all []string) {
	for _, v := range m {
		all = append(all, v)
	}
	return all
}

// Without MustExist no call touches the registry. With it, one row is read for each scope.
func TestMustExist_IsLookedUpOnlyWhereItIsDemanded(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustDeclare(t, pool, l, create, "a", "b")
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	tx := autocommit{Querier: conn}
	reads := func(demanded bool) int64 {
		before := tableStat(t, conn, "resources", "coalesce(idx_scan, 0) + seq_scan")
		limits := []budget.Limit{budget.Lifetime(1000)}
		_, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1, MustExist: demanded, Limits: limits}, budget.Charge{Scope: "b", Amount: 1, MustExist: demanded})
		require.NoError(t, err)
		_, err = l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1001, MustExist: demanded, Limits: limits})
		require.ErrorIs(t, err, budget.ErrExceeded)
		_, err = l.Credit(ctx, tx, budget.Credit{Scope: "a", Amount: 1, MustExist: demanded})
		require.NoError(t, err)
		return tableStat(t, conn, "resources", "coalesce(idx_scan, 0) + seq_scan") - before
	}
	require.Zero(t, reads(false))
	require.Equal(t, int64(4), reads(true))
	require.Zero(t, tableStat(t, conn, "resources", "seq_scan"))
}

func TestCreate_HoldsUntilTheTransactionEnds(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustDeclare(t, pool, l, create, "a")
	tx := begin(t, pool, pgx.ReadCommitted)
	_, err := l.Create(ctx, tx, "a")
	require.NoError(t, err)
	retired := pgtest.Going(func() error { _, err := declare(t, pool, l, retire, "a"); return err })
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, tx.Commit(ctx))
	require.NoError(t, <-retired)
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
	case <-time.After(10 * time.Second):
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
