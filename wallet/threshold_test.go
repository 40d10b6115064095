package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/wallet"
)

var errNotNow = errors.New("not now")

// setUpReporting is setUp, with a book that reports thresholds into a table. For a wallet in failing the report fails.
func setUpReporting(t *testing.T, cfg wallet.Config, failing *atomic.Value) *fixture {
	t.Helper()
	f := setUp(t, wallet.Config{})
	_, err := f.pool.Exec(t.Context(), `create table crossed (n bigint generated always as identity, wallet text, name text, seq bigint, left_over bigint)`)
	require.NoError(t, err)
	f.ledger, err = budget.New(budget.Config{LockTimeout: time.Minute, OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		_, err := tx.Exec(ctx, `insert into crossed (wallet, name, seq, left_over) values ($1, $2, $3, $4)`, c.Scope, c.Threshold.Name, c.Seq, c.Available)
		if failing != nil && failing.Load() == c.Scope {
			return errNotNow
		}
		return err
	}})
	require.NoError(t, err)
	f.holds, err = holds.New(f.ledger, holds.Config{MaxTTL: 365 * day, MaxLifetime: 365 * day})
	require.NoError(t, err)
	f.book, err = wallet.New(f.ledger, cfg)
	require.NoError(t, err)
	return f
}

// crossed returns the reports, in order, each with the units left and whether its entry is the last one, and forgets them.
func (f *fixture) crossed() []string {
	f.Helper()
	rows, err := f.pool.Query(f.Context(), `with gone as (delete from crossed returning *)
		select format('%s %s %s%s', wallet, name, left_over, case when seq <> (select max(l.seq) from metered.ledger l where l.scope = wallet) then ' earlier' end)
		from gone order by n`)
	require.NoError(f, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(f, err)
	return all
}

func (f *fixture) expire() wallet.SweepReport {
	f.Helper()
	r, err := f.book.Sweep(f.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(f, err)
	return r
}

func low(left int64) wallet.Config {
	return wallet.Config{Thresholds: []budget.Threshold{{Name: "low", Left: left}}}
}

func TestThresholds_AreReportedByEachCallThatLowersABalance(t *testing.T) {
	t.Parallel()
	for by, lower := range map[string]func(f *fixture){
		"draw": func(f *fixture) { f.draw(60) },
		"draw up to": func(f *fixture) {
			_, err := f.tryDraw(toDraw{Amount: 1000, UpTo: true})
			require.NoError(f, err)
		},
		"charge": func(f *fixture) {
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
				return f.ledger.Charge(ctx, tx, f.book.Charge("ann", 60))
			})
			require.NoError(f, err)
		},
		"line": func(f *fixture) { f.place("r", 60, day) },
		"sweep": func(f *fixture) {
			f.clock.Set(noon.Add(time.Hour))
			require.Equal(f, wallet.SweepReport{Ended: 1, Batches: 1}, f.expire())
		},
		"sweep of the wallet": func(f *fixture) {
			f.clock.Set(noon.Add(time.Hour))
			r, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.SweepReport, error) {
				return f.book.Expire(ctx, tx, "ann")
			})
			require.NoError(f, err)
			require.Equal(f, wallet.SweepReport{Ended: 1, Batches: 1}, r)
		},
		"revoke": func(f *fixture) {
			_, err := f.revoke(wallet.Revoke{Reference: "hour", Amount: 55})
			require.NoError(f, err)
		},
		"revoke of another lot": func(f *fixture) {
			f.clock.Set(noon.Add(time.Hour))
			r, err := f.revoke(wallet.Revoke{Reference: "kept", Amount: 1})
			require.NoError(f, err)
			require.EqualValues(f, 1, r.Amount)
		},
		"rollover of another lot": func(f *fixture) {
			f.clock.Set(noon.Add(time.Hour))
			require.EqualValues(f, 5, f.rollover(wallet.Rollover{Reference: "kept", Cap: 5, For: day}).Amount)
		},
		"charge after it": func(f *fixture) {
			f.clock.Set(noon.Add(time.Hour))
			f.draw(1)
		},
	} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			f := setUpReporting(t, low(50), nil)
			f.grant(wallet.Grant{Amount: 40, Reference: "kept"})
			f.grant(wallet.Grant{Amount: 60, Reference: "hour", Ends: wallet.After(time.Hour)})
			f.draw(1)
			require.Empty(t, f.crossed())
			lower(f)
			left := map[string]int64{"draw": 39, "draw up to": 0, "charge": 39, "line": 39, "revoke": 44, "revoke of another lot": 39, "charge after it": 39}[by]
			if left == 0 && by != "draw up to" {
				left = 40
			}
			want := fmt.Sprintf("ann low %d", left)
			if by == "rollover of another lot" {
				want += " earlier" // by the lapse, before the rollover
			}
			require.Equal(t, []string{want}, f.crossed())
			f.clock.Set(noon.Add(2 * time.Hour))
			f.expire()
			if units := f.balance().Units; units > 0 {
				f.draw(units)
			}
			require.Empty(t, f.crossed(), "once")
			f.grant(wallet.Grant{Amount: 100})
			f.draw(60)
			require.Equal(t, []string{"ann low 40"}, f.crossed(), "a grant arms it")
			f.verify()
		})
	}
}

// Left counts available units, with the overdraft. Used counts overdrawn units.
func TestThresholds_AndOverdraft(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, wallet.Config{Overdraft: 100, Thresholds: []budget.Threshold{
		{Name: "150 can be drawn", Left: 150}, {Name: "none of its own", Left: 100}, {Name: "20 owed", Used: 20, Rearm: 20}, {Name: "nothing can be drawn"},
	}}, nil)
	require.Equal(t, "credit", f.book.Limit().Name)
	f.grant(wallet.Grant{Amount: 100})
	for _, step := range []struct {
		draw int64
		told []string
	}{{49, []string{}}, {1, []string{"ann 150 can be drawn 150"}}, {50, []string{"ann none of its own 100"}}, {20, []string{"ann 20 owed 80"}}, {80, []string{"ann nothing can be drawn 0"}}} {
		f.draw(step.draw)
		require.Equal(t, step.told, f.crossed())
	}
	_, err := f.tryDraw(toDraw{Amount: 1})
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "credit", exceeded.Refusals[0].Limit.Name)
	f.verify()
}

// When OnThreshold fails, the sweep leaves that wallet alone, and the next pass reports it.
func TestThresholds_AFailureLeavesTheWalletToTheNextPass(t *testing.T) {
	t.Parallel()
	var failing atomic.Value
	failing.Store("bob")
	var told []string
	cfg := low(50)
	cfg.Subscribers = []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
		told = append(told, b.Wallet)
		return nil
	}}
	f := setUpReporting(t, cfg, &failing)
	for _, name := range []string{"ann", "bob", "cid"} {
		f.grant(wallet.Grant{Wallet: name, Amount: 60, Ends: wallet.After(time.Hour)})
		f.grant(wallet.Grant{Wallet: name, Amount: 40, Reference: "kept"})
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
		_, err := f.book.Revoke(t.Context(), tx, wallet.Revoke{Wallet: "bob", Reference: "kept"})
		require.NoError(t, err, "60 are left")
		_, err = f.drawIn(t.Context(), tx, toDraw{Wallet: "bob", Amount: 20})
		require.ErrorIs(t, err, errNotNow)
		return nil
	}))
	f.clock.Set(noon.Add(time.Hour))
	r, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.ErrorIs(t, err, errNotNow)
	require.ErrorContains(t, err, `OnThreshold: scope "bob" crosses`)
	require.Equal(t, wallet.SweepReport{Ended: 2, Announced: 2, Failed: 1, Batches: 1}, r)
	require.Equal(t, []string{"ann low 40", "cid low 40"}, f.crossed())
	failing.Store("nobody")
	require.Equal(t, wallet.SweepReport{Ended: 1, Announced: 1, Batches: 1}, f.expire())
	require.Equal(t, []string{"bob low 0"}, f.crossed())
	require.Equal(t, []string{"ann", "cid", "bob"}, told)
	f.verify()
}

// A command that crosses by a draw runs again before its COMMIT. A replay reports nothing.
func TestThresholds_AreReportedByACommandsDraw(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, low(50), nil)
	f.grant(wallet.Grant{Amount: 100})
	c, err := metered.New(f.pool, metered.Config{Config: budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		_, err := tx.Exec(ctx, `insert into crossed (wallet, name, seq, left_over) values ($1, $2, $3, $4)`, c.Scope, c.Threshold.Name, c.Seq, c.Available)
		return err
	}}})
	require.NoError(t, err)
	for range 2 {
		out, err := metered.Do(t.Context(), c, metered.Command{ID: "once", Input: 1}, func(_ context.Context, tx *metered.Tx) (int, error) {
			return 0, tx.Charge(toDraw{Wallet: "ann", Amount: 70}.of(f.book))
		})
		require.NoError(t, err)
		require.EqualValues(t, 70, out.Receipt.Entries[0].Amount)
	}
	require.Equal(t, []string{"ann low 30"}, f.crossed())
	f.verify()
}

// Sweeps, revokes and draws race for one crossing: one of them reports it.
func TestThresholds_AreReportedOnceInARace(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUpReporting(t, low(50), nil)
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		name := string(level)
		f.grant(wallet.Grant{Wallet: name, Amount: 60, Reference: "hour", Ends: wallet.After(time.Hour)})
		f.grant(wallet.Grant{Wallet: name, Amount: 40, Reference: "kept"})
		f.clock.Advance(time.Hour)
		require.NoError(t, pgtest.InParallel(8, func(worker int) error {
			for {
				err := pgx.BeginTxFunc(f.Context(), f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) (err error) {
					switch worker % 4 {
					case 0:
						_, err = f.book.Expire(f.Context(), tx, name)
					case 1:
						_, err = f.book.Revoke(f.Context(), tx, wallet.Revoke{Wallet: name, Reference: "kept", Amount: 1})
					case 2:
						_, err = f.drawIn(f.Context(), tx, toDraw{Wallet: name, Amount: 1})
					default:
						_, err = f.book.Rollover(f.Context(), tx, wallet.Rollover{Wallet: name, Reference: "kept", Cap: 3, For: day})
					}
					return err
				})
				if !sqlstate.Collided(err) {
					return err
				}
			}
		}))
		require.Len(t, f.crossed(), 1, level)
	}
}

func TestThresholds_NeedSomebodyToHearOfThem(t *testing.T) {
	t.Parallel()
	l, err := budget.New(budget.Config{})
	require.NoError(t, err)
	_, err = wallet.New(l, low(5))
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "Config.Thresholds", argument.Field)
	l, err = budget.New(budget.Config{RequireActor: true, OnThreshold: func(context.Context, pgx.Tx, budget.Crossing) error { return nil }})
	require.NoError(t, err)
	_, err = wallet.New(l, wallet.Config{Thresholds: []budget.Threshold{{Name: "half", Percent: 50}}})
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "Config.Thresholds[0].Percent", argument.Field)
	_, err = wallet.New(l, low(5))
	require.NoError(t, err)
}

// A threshold on spending alone ignores held units: captures, draws and the ends of lots report it.
func TestThresholds_OnSpendingIgnoreHeldUnits(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, wallet.Config{Thresholds: []budget.Threshold{{Name: "low", Left: 50}, {Name: "spent", Left: 50, Spent: true}}}, nil)
	capture := func(wallet, id string, amount int64, keep bool) {
		f.capture(holds.Capture{IDs: []string{id}, Keep: keep, Lines: []holds.Line{f.book.Line(wallet, amount)}})
	}
	place := func(wallet, id string, amount int64) {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
			return f.holds.Place(ctx, tx, holds.Placement{ID: id, TTL: day, Lines: []holds.Line{f.book.Line(wallet, amount)}})
		})
		require.NoError(t, err)
	}
	f.grant(wallet.Grant{Amount: 100})
	place("ann", "a", 60)
	require.Equal(t, []string{"ann low 40"}, f.crossed())
	capture("ann", "a", 49, true)
	require.Empty(t, f.crossed(), "51 are not spent")
	capture("ann", "a", 1, true)
	require.Equal(t, []string{"ann spent 40"}, f.crossed())
	f.grant(wallet.Grant{Amount: 5})
	f.draw(5)
	require.Equal(t, []string{"ann spent 40"}, f.crossed(), "armed at 55, whatever is held")

	f.grant(wallet.Grant{Wallet: "bob", Amount: 60, Ends: wallet.After(time.Hour), Reference: "hour"})
	f.grant(wallet.Grant{Wallet: "bob", Amount: 40})
	place("bob", "b", 30)
	place("bob", "c", 5)
	require.Empty(t, f.crossed())
	f.clock.Set(noon.Add(time.Hour))
	f.expire()
	require.Equal(t, []string{"bob low 40"}, f.crossed(), "75 are there, with the held units of the lot")
	f.release("c")
	require.Empty(t, f.crossed())
	capture("bob", "b", 20, false)
	require.Equal(t, []string{"bob spent 40 earlier"}, f.crossed(), "the rest was freed after it")

	f.grant(wallet.Grant{Wallet: "dan", Amount: 60, Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Wallet: "dan", Amount: 40})
	place("dan", "e", 10)
	require.Empty(t, f.crossed())
	f.clock.Set(noon.Add(2 * time.Hour))
	capture("dan", "e", 5, true)
	require.Equal(t, []string{"dan spent 40"}, f.crossed(), "the ended lot is gone, written or not")

	f.grant(wallet.Grant{Wallet: "cid", Amount: 60, Reference: "more"})
	f.grant(wallet.Grant{Wallet: "cid", Amount: 40})
	place("cid", "d", 40)
	revoke := func(amount int64) {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) {
			return f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "cid", Reference: "more", Amount: amount})
		})
		require.NoError(t, err)
	}
	revoke(20)
	require.Equal(t, []string{"cid low 40"}, f.crossed())
	f.release("d")
	revoke(30)
	require.Equal(t, []string{"cid low 50", "cid spent 50"}, f.crossed(), "80 were there, which armed low")
}

// A hold that is due keeps nothing, also where the end of a lot is judged before anybody has swept the hold.
func TestThresholds_OfALotsEndCountNoHoldThatIsDue(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, low(25), nil)
	f.grant(wallet.Grant{Amount: 100, Reference: "ever"})
	f.grant(wallet.Grant{Amount: 95, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.place("h", 90, 30*time.Minute)
	f.clock.Advance(time.Hour)
	require.Equal(t, 1, f.expire().Ended)
	require.Empty(t, f.crossed(), "100 units are left")
	require.EqualValues(t, 100, f.balance().Units)
	f.verify()
}

// A sweep, a revocation or a rollover that crosses a threshold also writes the end of holds that fell due before. Those
// entries do not remember the report: their units lower no balance.
func TestThresholds_OfALotsEndAreRememberedFromItOn(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(f *fixture){
		"sweep": func(f *fixture) { require.Equal(f, 1, f.expire().Ended) },
		"revoke": func(f *fixture) {
			_, err := f.revoke(wallet.Revoke{Reference: "hour"})
			require.NoError(f, err)
		},
		"rollover": func(f *fixture) { f.rollover(wallet.Rollover{Reference: "ever", Cap: 1}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUpReporting(t, low(100), nil)
			f.grant(wallet.Grant{Amount: 100, Reference: "ever"})
			f.grant(wallet.Grant{Amount: 95, Reference: "hour", Ends: wallet.After(time.Hour)})
			f.place("h", 90, 30*time.Minute)
			f.clock.Advance(time.Hour)
			end(f)
			require.Len(t, f.crossed(), 1)
			f.verify()
			require.Zero(t, f.expire().Ended)
			require.Empty(t, f.crossed(), "it was reported")
		})
	}
}

// A wallet that remembers as many thresholds as a scope can refuses the draw that reaches another one, by the ledger's own error. The end of a lot is
// not refused.
func TestThresholds_ADrawBeyondTheirNumberIsRefused(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, low(50), nil)
	f.grant(wallet.Grant{Amount: 1000})
	later := 1
	f.grant(wallet.Grant{Amount: 60, Ends: wallet.After(time.Hour), Priority: &later})
	for n := range bounds.MaxScopeThresholds {
		name := fmt.Sprint("limit ", n)
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
			return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "ann", Amount: 1, Limits: []budget.Limit{
				budget.PerWindow(10_000, 1000*time.Hour).Named(name).WithThresholds(budget.Threshold{Name: name, Used: 1})}})
		})
		require.NoError(t, err)
	}
	require.Len(t, f.crossed(), bounds.MaxScopeThresholds)
	_, err := f.tryDraw(toDraw{Wallet: "ann", Amount: 950})
	require.ErrorIs(t, err, fault.New("budget_thresholds", ""))
	f.draw(930)
	f.clock.Set(noon.Add(time.Hour))
	f.expire()
	f.has(6)
	require.Empty(t, f.crossed())
	_, err = f.tryDraw(toDraw{Amount: 1})
	require.ErrorIs(t, err, fault.New("budget_thresholds", ""), "it is not lost: the next draw would report it")
	f.verify()
}
