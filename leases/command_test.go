package leases_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// leased is a client whose scopes of the prefix "hot" are leased.
type leased struct {
	*testing.T
	db   *pgxpool.Pool
	pool *leases.Pool
	c    *metered.Client
	wire *pgtest.Wire
}

func newLeased(t *testing.T, cfg metered.Config, rule leases.Rule, mode pgx.QueryExecMode) *leased {
	t.Helper()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	db, w := pgtest.Tap(t, owner, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode, c.MaxConns = mode, 8 })
	rule.Prefix = "hot"
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	p, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{rule}, NoRecall: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	cfg.Leases = p
	return &leased{t, owner, p, pgtest.NewClient(t, db, cfg), w}
}

// warm runs commands until a lease is there, and returns how many units they charged.
func (l *leased) warm(limits ...budget.Limit) (spent int64) {
	l.Helper()
	for end := pgtest.Patience(l); time.Now().Before(end); {
		out, err := metered.Do[pgtest.Uploaded](l.Context(), l.c, metered.Command{ID: metered.NewID(), Charges: []budget.Charge{{Scope: "hot", Amount: 1, Limits: limits}}}, nil)
		require.NoError(l, err)
		if spent++; out.Receipt.Entries[0].Lease > 0 {
			return spent
		}
		time.Sleep(time.Millisecond)
	}
	l.Fatal("no lease was opened")
	return 0
}

// spent closes the leases, verifies the ledger and returns the spent units of each scope.
func (l *leased) spent(scopes ...string) (all []int64) {
	l.Helper()
	require.NoError(l, l.pool.Close(l.Context()))
	for _, scope := range scopes {
		u, err := l.c.Budget.Usage(l.Context(), l.db, budget.Query{Scope: scope})
		require.NoError(l, err)
		require.Zero(l, u[0].Leased)
		all = append(all, u[0].Spent)
	}
	report, err := l.c.Budget.Verify(l.Context(), l.db, budget.VerifyOptions{})
	require.NoError(l, err)
	require.Empty(l, report.Differences)
	return all
}

// patient keeps a slice for as long as a test takes on a busy machine.
var patient = leases.Rule{TTL: time.Minute, Idle: time.Minute}

var millionth = budget.Lifetime(1_000_000)

// A command's charges are spent from leases where there are any, whatever the driver's mode and the level; all or none
// with what else it does, in a transaction of its own or in the caller's; and a replay does nothing. The short form has each mode and each
// level once.
func TestLeases_OfCommands(t *testing.T) {
	t.Parallel()
	for i, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		for _, level := range pgtest.Size(pgtest.IsolationLevels[i:i+1], pgtest.IsolationLevels) {
			t.Run(mode.String()+" "+string(level), func(t *testing.T) {
				t.Parallel()
				l := newLeased(t, metered.Config{}, leases.Rule{MinSlice: 1000, TTL: time.Minute, Idle: time.Minute}, mode)
				spent := l.warm(millionth)
				cmd := metered.Command{ID: "op", Input: 1, Isolation: level, Token: pgtest.Redeem(pgtest.Mint(t, l.db, l.c)), Charges: []budget.Charge{
					{Scope: "hot", Amount: 5, Limits: []budget.Limit{millionth}}, pgtest.Charge("cold", 7, 100)},
					Holds: []holds.Placement{{ID: "h", TTL: time.Hour, Lines: []holds.Line{{Scope: "room", Amount: 2}}}}}
				function := func(ctx context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
					if err := tx.Charge(pgtest.Charge("own", 3, 100), budget.Charge{Scope: "hot", Amount: 2, Limits: []budget.Limit{millionth}}); err != nil {
						return pgtest.Uploaded{}, err
					}
					return pgtest.Upload("a")(ctx, tx)
				}
				refused := cmd
				refused.ID, refused.Charges = "refused", append([]budget.Charge{pgtest.Charge("tiny", 1, 100)}, cmd.Charges...)
				_, err := metered.Do(t.Context(), l.c, refused, func(ctx context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
					if err := tx.Charge(pgtest.Charge("tiny", 100, 100)); err != nil {
						return pgtest.Uploaded{}, err
					}
					return function(ctx, tx)
				})
				require.ErrorIs(t, err, budget.ErrExceeded)
				require.Equal(t, []int{0, 0}, []int{pgtest.Count(t, l.db, "uploads"), pgtest.Count(t, l.db, "metered.holds")})
				require.Zero(t, pgtest.Count(t, l.db, "metered.lease_spends where operation = 'refused'"))

				for again := range 2 {
					out, err := metered.Do(t.Context(), l.c, cmd, function)
					require.NoError(t, err)
					require.Equal(t, again == 1, out.Replayed)
					entries := out.Receipt.Entries
					require.Len(t, entries, 3)
					require.Equal(t, []string{"hot", "cold", "own"}, []string{entries[0].Scope, entries[1].Scope, entries[2].Scope})
					require.Equal(t, []int64{7, 7, 3}, []int64{entries[0].Amount, entries[1].Amount, entries[2].Amount})
					require.Zero(t, entries[0].Seq)
					require.Equal(t, []int64{1, 1}, []int64{entries[1].Seq, entries[2].Seq})
					if again == 0 {
						require.Positive(t, entries[0].Lease)
						require.Empty(t, entries[0].Standings)
						require.Equal(t, budget.Standing{Limit: pgtest.Charge("cold", 7, 100).Limits[0], Used: 7, Available: 93}, entries[1].Standings[0])
						require.Equal(t, int64(97), entries[2].Standings[0].Available)
					}
				}
				require.Equal(t, 1, pgtest.Count(t, l.db, "metered.lease_spends where operation = 'op' and amount = 7"))

				// In the caller's transaction: taken back with it, and by itself when the command fails.
				inTx := func(id string, fails bool) error {
					return pgx.BeginTxFunc(t.Context(), l.db, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						_, err := metered.DoTx(t.Context(), l.c, tx, metered.Command{ID: id, Charges: cmd.Charges[:1]}, pgtest.Upload(id))
						return errors.Join(err, map[bool]error{true: pgtest.ErrOwn}[fails])
					})
				}
				require.NoError(t, inTx("tx", false))
				require.ErrorIs(t, inTx("undone", true), pgtest.ErrOwn)
				require.Equal(t, 2, pgtest.Count(t, l.db, "metered.lease_spends where operation is not null and operation in ('op', 'tx')"))
				require.Equal(t, []int64{spent + 12, 7, 3, 0}, l.spent("hot", "cold", "own", "tiny"))
				require.Equal(t, 2, pgtest.Count(t, l.db, "uploads"))
			})
		}
	}
}

// A lease that is settled between the command's function and its last flush has it run again, and nothing is charged
// twice. The same where it happens again and again: then the ledger is charged.
func TestLeases_OneThatClosesMeanwhileIsLeftForAnother(t *testing.T) {
	t.Parallel()
	for _, level := range pgtest.IsolationLevels {
		l := newLeased(t, metered.Config{}, leases.Rule{TTL: time.Minute, Idle: time.Minute}, pgx.QueryExecModeCacheStatement)
		clock := pgtest.SetClock(t, l.db, pgtest.Tomorrow(9))
		spent := l.warm(millionth)
		end := func(times int64) (runs int64) {
			_, err := metered.Do(t.Context(), l.c, metered.Command{ID: metered.NewID(), Isolation: level, Charges: []budget.Charge{{Scope: "hot", Amount: 5, Limits: []budget.Limit{millionth}}}},
				func(ctx context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
					if runs++; runs <= times {
						clock.Advance(time.Minute)
						_, err := leases.Sweep(context.Background(), l.db, l.c.Budget)
						require.NoError(t, err)
					}
					return pgtest.Uploaded{}, nil
				})
			if err != nil { // above READ COMMITTED each settlement is a collision, too
				require.ErrorIs(t, err, budget.ErrSerialization)
				require.NotEqual(t, pgx.ReadCommitted, level)
			} else {
				spent += 5
			}
			return runs
		}
		runs := end(1)
		require.GreaterOrEqual(t, runs, int64(2))
		require.LessOrEqual(t, runs, int64(8), "it may have two slices, and collide")
		require.LessOrEqual(t, end(100), int64(30))
		require.Equal(t, []int64{spent}, l.spent("hot"))
	}
}

// Whoever has a slice spends it, though nothing is left outside of it for the first look of a command.
func TestLeases_TheFirstLookDoesNotRefuseUnitsOfALease(t *testing.T) {
	t.Parallel()
	refusals := 0
	l := newLeased(t, metered.Config{EarlyLook: true, OnRefusal: func(context.Context, metered.RefusedCommand) { refusals++ }}, leases.Rule{Share: 1, MinSlice: 50, MaxSlice: 1000, TTL: time.Minute, Idle: time.Minute, SliceLasts: time.Minute}, pgx.QueryExecModeCacheStatement)
	limit := budget.Lifetime(200)
	spent := l.warm(limit)
	u, err := l.c.Budget.Usage(t.Context(), l.db, budget.Query{Scope: "hot"})
	require.NoError(t, err)
	rest := u[0].Available(limit.Max)
	_, err = metered.Do[pgtest.Uploaded](t.Context(), pgtest.NewClient(t, l.db, metered.Config{}), metered.Command{ID: "rest", Charges: []budget.Charge{{Scope: "hot", Amount: rest, Limits: []budget.Limit{limit}}}}, nil)
	require.NoError(t, err)
	spent += rest
	for range 20 {
		out, err := metered.Do[pgtest.Uploaded](t.Context(), l.c, metered.Command{ID: metered.NewID(), Charges: []budget.Charge{{Scope: "hot", Amount: 1, Limits: []budget.Limit{limit}}}}, nil)
		require.NoError(t, err)
		require.Positive(t, out.Receipt.Entries[0].Lease)
		spent++
	}
	require.Zero(t, refusals)
	require.Equal(t, []int64{spent}, l.spent("hot"))
}

// Sticky charges go to the ledger, and leases are no part of a command's identity.
func TestLeases_LeaveStickyChargesAndTheFingerprintAlone(t *testing.T) {
	t.Parallel()
	l := newLeased(t, metered.Config{}, patient, pgx.QueryExecModeCacheStatement)
	plain := pgtest.NewClient(t, l.db, metered.Config{})
	l.warm(millionth)
	cmd := metered.Command{ID: "op", Sticky: []budget.Charge{{Scope: "hot", Amount: 1, Limits: []budget.Limit{millionth}}},
		Charges: []budget.Charge{{Scope: "hot", Amount: 2, Limits: []budget.Limit{millionth}}}}
	out, err := metered.Do(t.Context(), l.c, cmd, pgtest.Upload("a"))
	require.NoError(t, err)
	require.Positive(t, out.Receipt.Entries[0].Lease)
	require.Positive(t, out.Sticky.Entries[0].Seq)
	require.Zero(t, out.Sticky.Entries[0].Lease)
	out, err = metered.Do(t.Context(), plain, cmd, pgtest.MustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
	cmd.ID = "other"
	_, err = metered.Do(t.Context(), plain, cmd, pgtest.Upload("b"))
	require.NoError(t, err)
	out, err = metered.Do(t.Context(), l.c, cmd, pgtest.MustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
}

// A command costs as many round trips with a lease as without. A client without leases sends the same statements as
// before.
func TestLeases_CostNoRoundTrip(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	l := newLeased(t, metered.Config{}, leases.Rule{TTL: time.Minute, Idle: time.Minute}, pgx.QueryExecModeCacheStatement)
	db, w := pgtest.Tap(t, l.db, nil)
	plain := pgtest.NewClient(t, db, metered.Config{})
	l.warm(millionth)
	flushes := func(c *metered.Client, w *pgtest.Wire, scope string) (fewest int) {
		for range 5 { // until statements are prepared, and the Pool does not sweep meanwhile by the same connection
			w.Each(func(*pgtest.Flush) {})
			_, err := metered.Do[pgtest.Uploaded](t.Context(), c, metered.Command{ID: metered.NewID(), Charges: []budget.Charge{{Scope: scope, Amount: 1, Limits: []budget.Limit{millionth}}}},
				func(context.Context, *metered.Tx) (u pgtest.Uploaded, _ error) { return u, nil })
			require.NoError(t, err)
			n := 0
			sent := w.Sent()
			begin := slices.IndexFunc(sent, func(f *pgtest.Flush) bool { return f.Has("begin_command") })
			for _, f := range sent {
				if f.Conn == sent[begin].Conn { // the Pool has others, for its own calls
					n++
				}
			}
			if fewest == 0 || n < fewest {
				fewest = n
			}
		}
		return fewest
	}
	require.Equal(t, 2, flushes(plain, w, "hot"))
	require.Equal(t, 2, flushes(plain, w, "cold"))
	require.Equal(t, 2, flushes(l.c, l.wire, "hot"))
}

// The charges of a repeated scope count against all of their limits, and its existence is asked for.
func TestLeases_ARepeatedScopeKeepsAllLimits(t *testing.T) {
	t.Parallel()
	l := newLeased(t, metered.Config{}, patient, pgx.QueryExecModeCacheStatement)
	l.warm(millionth, millionth)
	hot := func(must bool, limits ...budget.Limit) budget.Charge {
		return budget.Charge{Scope: "hot", Amount: 1, MustExist: must, Limits: limits}
	}
	do := func(charges ...budget.Charge) error {
		_, err := metered.Do[pgtest.Uploaded](t.Context(), l.c, metered.Command{ID: metered.NewID(), Input: 1}, func(ctx context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
			return pgtest.Uploaded{}, tx.Charge(charges...)
		})
		return err
	}
	require.ErrorIs(t, do(hot(false, millionth, millionth), hot(false, budget.Lifetime(1))), budget.ErrExceeded)
	require.ErrorIs(t, do(hot(false, millionth, millionth), hot(true, millionth, millionth)), budget.ErrScopeUnknown)
	require.NoError(t, do(hot(false, millionth, millionth), hot(false, millionth, millionth)))
}
