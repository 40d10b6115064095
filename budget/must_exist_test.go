package budget_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

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
		require.Len(t, resources(t, pool, l, name("")), 4, "the attempts were rolled back")
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
	pool := pgtest.Open(t)
	l := newLedger(t, budget.Config{MustExist: true})
	execute(t, pool, `create table periods (n serial, scope text, retired bool, used bigint)`)
	for _, level := range []string{"read committed", "repeatable read", "serializable", "mixed"} {
		t.Run(level, func(t *testing.T) {
			workers, attempts := pgtest.Size(4, 6), pgtest.Size(12, 30)
			ctx := t.Context()
			mustDeclare(t, pool, l, create, level)
			retry := &retrier{pool: pool}
			isolation := func(n int) pgx.TxIsoLevel {
				if level == "mixed" {
					return isolations[n%3]
				}
				return pgx.TxIsoLevel(level)
			}
			admitted, refused := make([]int64, workers), make([]int64, workers)
			stop := make(chan struct{})
			retiring := pgtest.Going(func() error {
				for n := 0; ; n++ {
					select {
					case <-stop:
						if n%2 == 0 { // each retirement ends
							return nil
						}
					default:
					}
					err := retry.run(ctx, isolation(n), func(tx pgx.Tx) error {
						call := l.Retire
						if n%2 == 1 {
							call = l.Restore
						}
						done, err := call(ctx, tx, level)
						if err == nil && !done[0].Changed {
							err = errors.New("nothing was changed")
						}
						if err == nil {
							_, err = tx.Exec(ctx, `insert into periods (scope, retired, used) select $1, $2::bool, coalesce(max(spent), 0) from metered.ledger where scope = $1`, level, n%2 == 0)
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
						_, err := l.Charge(ctx, tx, budget.Charge{Scope: level, Amount: 1})
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
			require.Equal(t, sum, usage(t, pool, l, level, 0).Used)
			require.Positive(t, sum)
			require.Positive(t, refusals)
			// As many units were used when it was restored as when it was retired.
			var periods, wrong int
			require.NoError(t, pool.QueryRow(ctx, `with p as (select retired, used, lead(used) over (order by n) as later from periods where scope = $1)
				select count(*), count(*) filter (where later <> used) from p where retired and later is not null`, level).Scan(&periods, &wrong))
			require.Positive(t, periods)
			require.Zero(t, wrong)
		})
	}
	requireVerified(t, pool, l)
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
