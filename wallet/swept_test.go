package wallet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// sweeps ends the holds and lots that are due.
func (f *fixture) sweeps() {
	f.Helper()
	_, err := f.holds.Sweep(f.Context(), f.pool, holds.SweepOptions{})
	require.NoError(f, err)
	_, err = f.book.Sweep(f.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(f, err)
}

// endsPerCall sets how many ends of lots one call writes at most that it could leave to others.
func (f *fixture) endsPerCall(n int) {
	f.Helper()
	_, err := f.pool.Exec(f.Context(), fmt.Sprintf("create or replace function metered._ends_per_call() returns int language sql immutable as 'select %d'", n))
	require.NoError(f, err)
}

func (f *fixture) placeAtLeast(id string, amount, least int64, ttl time.Duration) error {
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		line := f.book.Line("ann", amount)
		line.AtLeast = least
		return f.holds.Place(ctx, tx, holds.Placement{ID: id, TTL: ttl, Lines: []holds.Line{line}})
	})
	return err
}

// A hold that falls due at 33 h gives its units back to a lot that ends at 39 h before that lot ends, though all of it is written at 40 h.
func TestWallet_TheFirstDueHappensFirst(t *testing.T) {
	t.Parallel()
	for name, swept := range map[string]bool{"swept": true, "not swept": false} {
		for times, lasts := range []time.Duration{0, 0, day} { // a lot that rolls over again is read in another way
			t.Run(fmt.Sprintf("%s, %d times", name, times), func(t *testing.T) {
				t.Parallel()
				f := setUp(t, wallet.Config{Overdraft: 200})
				f.grant(wallet.Grant{Amount: 111, Reference: "a", Ends: wallet.After(39 * time.Hour), Roll: &wallet.Roll{Cap: 76, Lasts: lasting(lasts), Times: times}})
				f.place("h", 93, 33*time.Hour)
				f.clock.Set(noon.Add(34 * time.Hour))
				require.EqualValues(t, 111, f.balance().Units)
				if swept {
					f.sweeps()
				}
				f.clock.Set(noon.Add(40 * time.Hour))
				b := f.balance()
				require.EqualValues(t, 76, b.Units)
				require.Len(t, b.Lots, 1)
				require.EqualValues(t, 76, b.Lots[0].Amount)
				f.grant(wallet.Grant{Amount: 1}) // writes all of it at once
				require.EqualValues(t, -100, f.draw(177).Left)
				require.EqualValues(t, b.Lots[0].Lot, pgxLot(f, "from_lot is not null"))
			})
		}
		t.Run(name+", overdrawn", func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{Overdraft: 200})
			f.grant(wallet.Grant{Amount: 93, Reference: "a", Ends: wallet.After(39 * time.Hour)})
			f.place("h", 93, 33*time.Hour)
			f.draw(100)
			f.clock.Set(noon.Add(34 * time.Hour))
			if swept {
				f.sweeps()
			}
			f.clock.Set(noon.Add(40 * time.Hour))
			require.EqualValues(t, -7, f.balance().Units, "the units were there when the hold fell due")
			require.EqualValues(t, -8, f.draw(1).Left)
		})
	}
}

// pgxLot is the number of the wallet's only lot of which that holds.
func pgxLot(f *fixture, where string) (no int64) {
	f.Helper()
	require.NoError(f, f.pool.QueryRow(f.Context(), "select no from metered.lots where "+where).Scan(&no))
	return no
}

// At the same instant a lot ends before a hold gives its units back.
func TestWallet_AtTheSameInstantLotsEndFirst(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 10, Lasts: wallet.For(time.Hour)}})
	f.place("h", 4, time.Hour)
	f.clock.Set(noon.Add(time.Hour))
	require.EqualValues(t, 6, f.balance().Units)
	f.sweeps()
	f.has(6)
}

// Units that a due hold has set free can be revoked, and can roll over, by the first call that comes.
func TestRevoke_TakesUnitsThatADueHoldFreed(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]func(f *fixture) (taken int64){
		"revoke": func(f *fixture) int64 {
			r, err := f.revoke(wallet.Revoke{Reference: "a"})
			require.NoError(f, err)
			require.Zero(f, r.Missing)
			return r.Amount
		},
		"roll over": func(f *fixture) int64 {
			return f.rollover(wallet.Rollover{Reference: "a", Cap: 100, For: day}).Amount
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Amount: 100, Reference: "a", Ends: wallet.After(2 * day)})
			f.place("a", 100, time.Hour)
			f.clock.Set(noon.Add(time.Hour))
			require.EqualValues(t, 100, f.balance().Units)
			require.EqualValues(t, 100, first(f))
			f.has(map[string]int64{"revoke": 0, "roll over": 100}[name])
		})
	}
}

// A payment bounces: its units are taken back from the lots that have them by now.
func TestRevoke_FindsUnitsThatWentOnInOtherLots(t *testing.T) {
	t.Parallel()
	for name, swept := range map[string]bool{"written": true, "not written": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Amount: 300, Reference: "pay", Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 200, Lasts: wallet.For(day)}, LateRefunds: wallet.Forever})
			d := f.draw(50)
			f.clock.Set(noon.Add(2 * time.Hour))
			f.refund(d.Seq, 40) // late: a lot of its own
			if swept {
				f.sweeps()
			}
			f.draw(30)
			lots := f.balance().Lots
			require.Len(t, lots, 2)
			require.Equal(t, "pay", lots[0].Reference, "of the lot that had the units first")
			r, err := f.revoke(wallet.Revoke{Reference: "pay", Amount: 180})
			require.NoError(t, err)
			require.Equal(t, wallet.Revoked{Lot: r.Lot, Amount: 180, Seq: r.Seq}, r)
			r, err = f.revoke(wallet.Revoke{Reference: "pay"})
			require.NoError(t, err)
			require.Equal(t, wallet.Revoked{Lot: r.Lot, Amount: 30, Missing: 40, Seq: r.Seq}, r, "10 were drawn before it ended, and 30 after")
			f.has(0)
			_, err = f.revoke(wallet.Revoke{Reference: "pay"})
			require.NoError(t, err)
		})
	}
}

// A lot that paid overdraft back gets the units again when the draw is refunded, in either order: credit that ends does
// not become credit that never ends.
func TestRefund_OfOverdraftMakesNoCreditThatNeverEnds(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]int{"the older first": 0, "the newer first": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{Overdraft: 100})
			draws := []wasDrawn{f.draw(30)}
			f.grant(wallet.Grant{Amount: 30, Reference: "pay", Ends: wallet.After(time.Hour), LateRefunds: wallet.Lapse})
			draws = append(draws, f.draw(30))
			f.refund(draws[first].Seq, 30)
			f.refund(draws[1-first].Seq, 30)
			require.Equal(t, map[string]int64{"pay": 30}, f.left())
			f.clock.Set(noon.Add(time.Hour))
			require.Zero(t, f.balance().Units)
		})
	}
}

// Held units of a lot that has ended are shown with that lot, and not with the one that it goes on in.
func TestBalance_ShowsHeldUnitsOfALotThatHasEndedAsItsOwn(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(time.Hour)}})
	f.place("h", 4, 3*time.Hour)
	f.clock.Set(noon.Add(time.Hour))
	before := f.balance()
	require.Len(t, before.Lots, 2)
	require.Equal(t, "a", before.Lots[0].Reference)
	require.Equal(t, noon.Add(time.Hour), before.Lots[0].Expires)
	require.EqualValues(t, []int64{0, 4, 5, 0}, []int64{before.Lots[0].Units, before.Lots[0].Held, before.Lots[1].Units, before.Lots[1].Held})
	f.sweeps()
	after := f.balance()
	after.Seq = before.Seq
	require.Equal(t, before, after)
}

// A hold that is captured in part captures units of the lot that is drawn first, though another one ends before it.
func TestCapture_FollowsPriorityBeforeTheEndOfLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 5, Reference: "late", Ends: wallet.After(day), Priority: new(int)})
	soon := 1
	f.grant(wallet.Grant{Amount: 5, Reference: "soon", Ends: wallet.After(time.Hour), Priority: &soon})
	f.place("h", 10, 30*time.Minute)
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.holds.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "ann", Amount: 5}}})
	})
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"soon": 5}, f.left())
}

// trail is one run of a history.
type trail struct {
	*fixture
	said []string
}

func (h *trail) say(what string, answer any, err error) {
	raw, jsonErr := json.Marshal(answer)
	require.NoError(h, jsonErr)
	if err != nil {
		raw = []byte(err.Error())
	}
	h.said = append(h.said, what+": "+string(raw))
}

// play is a random history of a wallet: its acts depend only on the seed, and on which calls were let in.
func (h *trail) play(seed uint64, swept bool) {
	r := rand.New(rand.NewPCG(seed, 1))
	f, ctx := h.fixture, h.Context()
	var draws []int64
	var amounts []int64
	var open []string
	grants, steps := 0, 40
	for n := range steps {
		switch k := r.IntN(20); {
		case k < 5 || n == 0: // the scope is a wallet from the first step on
			g := wallet.Grant{Wallet: "ann", Amount: 1 + r.Int64N(30), Reference: fmt.Sprint(grants), Priority: new(int), Ends: wallet.After(time.Duration(1+r.IntN(10)) * time.Hour)}
			*g.Priority = r.IntN(2)
			if r.IntN(3) == 0 {
				g.Roll = &wallet.Roll{Cap: 1 + r.Int64N(20), Lasts: lasting([]time.Duration{0, time.Hour, 5 * time.Hour}[r.IntN(3)])}
			}
			g.LateRefunds = []time.Duration{wallet.Lapse, wallet.Forever, 2 * time.Hour}[r.IntN(3)]
			granted := f.grant(g)
			granted.Seq = 0
			h.say("grant", granted, nil)
			grants++
		case k < 9:
			amount, upTo := 1+r.Int64N(30), r.IntN(3) == 0
			d, err := f.tryDraw(toDraw{Amount: amount, UpTo: upTo})
			if err == nil {
				draws, amounts = append(draws, d.Seq), append(amounts, d.Amount)
			}
			d.Seq = 0
			h.say("draw", d, err)
		case k < 13:
			id, amount, ttl := fmt.Sprint("h", n), 1+r.Int64N(20), time.Duration(1+r.IntN(8))*time.Hour
			least := r.Int64N(amount+1) * r.Int64N(2)
			err := f.placeAtLeast(id, amount, least, ttl)
			if err == nil {
				open = append(open, id)
			}
			h.say("place", nil, err)
		case k < 15 && len(open) > 0:
			id, capture, amount := open[r.IntN(len(open))], r.IntN(2) == 0, 1+r.Int64N(15)
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
				if capture {
					return f.holds.Capture(ctx, tx, holds.Capture{IDs: []string{id}, Over: holds.OverIfFits, Lines: []holds.Line{{Scope: "ann", Amount: amount, Limits: []budget.Limit{f.book.Limit()}}}})
				}
				return f.holds.Release(ctx, tx, holds.Release{IDs: []string{id}})
			})
			h.say("end", nil, err)
		case k < 17 && len(draws) > 0:
			i := r.IntN(len(draws))
			amount := 1 + r.Int64N(amounts[i])
			p, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
				return f.ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: draws[i], Amount: amount})
			})
			if err == nil {
				h.say("refund", p.Amount, nil)
			} else {
				h.say("refund", "refused", nil)
			}
		case k < 18 && grants > 0:
			v, err := f.revoke(wallet.Revoke{Reference: fmt.Sprint(r.IntN(grants)), Amount: r.Int64N(20)})
			v.Seq = 0
			h.say("revoke", v, err)
		case k < 19 && grants > 0:
			o := f.rollover(wallet.Rollover{Reference: fmt.Sprint(r.IntN(grants)), Cap: 1 + r.Int64N(10), For: 3 * time.Hour})
			o.Seq, o.At = 0, time.Time{}
			h.say("roll over", o, nil)
		default:
			f.clock.Advance(6 * time.Hour)
		}
		f.clock.Advance([]time.Duration{0, 0, 10 * time.Minute, time.Hour, 2 * time.Hour}[r.IntN(5)])
		if swept {
			f.sweeps()
		}
		b := f.balance()
		b.Seq = 0
		h.say("balance", b, nil)
		u, err := f.ledger.Usage(ctx, f.pool, budget.Query{Scope: "ann", Window: 3 * time.Hour})
		require.NoError(h, err)
		h.say("usage", []int64{u[0].Used, u[0].Held}, nil)
		_, err = f.ledger.Check(ctx, f.pool, f.book.Charge("ann", 15))
		h.say("check", nil, err)
		hours, err := f.ledger.Series(ctx, f.pool, "ann", noon, f.clock.Now().Truncate(time.Hour).Add(time.Hour), budget.Hour, nil)
		h.say("series", hours, err)
	}
	f.clock.Advance(1000 * time.Hour)
	f.sweeps()
	for _, sql := range []string{
		"select json_agg(json_build_array(no, amount, rest, drawn, held, lapsed, revoked, rolled, from_lot, origin, expires_at, granted_at) order by no)::text from metered.lots",
		"select json_agg(json_build_array(id, state, ended_at) order by id)::text from metered.holds",
		"select json_agg(json_build_array(kind, at, amount, hold, n) order by at, kind, amount, hold)::text from (select kind, at, amount, hold, count(*) as n from metered.ledger where kind in ('c', 'u', 'r', 'd') and ref is null group by 1, 2, 3, 4) e where kind <> 'd'",
	} {
		var text *string
		require.NoError(h, f.pool.QueryRow(ctx, sql).Scan(&text))
		h.say("in the end", text, nil)
	}
}

// The same history has the same answers, balances and lots whether a sweep runs at each step or never, and also where
// calls leave ends of lots to later calls. And the ledgers of the first two are the same, entry by entry.
// The short form finds a due hold that frees units into a lot that has ended.
func TestWallet_NoAnswerDependsOnSweeps(t *testing.T) {
	t.Parallel()
	histories := pgtest.Size[uint64](1, 2)
	seed := pgtest.Seed(t)
	for n := range histories {
		runs := []struct {
			swept bool
			ends  int
		}{{true, 32}, {false, 32}, {false, 0}, {true, 1}}
		var first *trail
		var entries []string
		for i, run := range runs[:pgtest.Sizes(3, 4, 4)] {
			t.Run(fmt.Sprint(n, " ", run.swept, " ", run.ends), func(t *testing.T) {
				h := &trail{fixture: setUp(t, wallet.Config{Overdraft: 20})}
				h.endsPerCall(run.ends)
				h.play(seed+n, run.swept)
				rows, err := h.pool.Query(t.Context(), `select json_build_array(seq, kind, amount, at, spent, refunded, credited, held, hold, ref)::text from metered.ledger order by seq`)
				require.NoError(t, err)
				text, err := pgx.CollectRows(rows, pgx.RowTo[string])
				require.NoError(t, err)
				if i == 0 {
					first, entries = h, text
					return
				}
				for j := range h.said {
					if run.ends < 32 && strings.HasPrefix(h.said[j], "series") {
						continue // ends that a call leaves to others are credited until those write them
					}
					require.Equal(t, first.said[j], h.said[j], "%d: %s", j, strings.Join(h.said[max(0, j-8):j], "\n"))
				}
				if i == 1 {
					require.Equal(t, entries, text)
				}
			})
		}
	}
}

// owing is a wallet with a debt of 3 units, which lags though all its ends are written.
func owing(t *testing.T) *fixture {
	f := setUp(t, wallet.Config{Overdraft: 20})
	f.endsPerCall(0)
	f.grant(wallet.Grant{Reference: "a", Amount: 17, Ends: wallet.After(time.Hour)})
	f.clock.Advance(time.Hour)
	f.draw(3)
	f.revokesNothing() // and writes the end
	require.True(t, f.lags())
	return f
}

func (f *fixture) lags() bool {
	return pgtest.Value[bool](f, f.pool, `select lots_end <= at from metered.ledger order by seq desc limit 1`)
}

func (f *fixture) revokesNothing() {
	f.Helper()
	revoked, err := f.revoke(wallet.Revoke{Reference: "a"})
	require.NoError(f, err)
	require.Zero(f, revoked.Amount)
}

// A call that writes nothing, and a repair of the clock, leave the debt of a wallet.
func TestOverdraft_OutlivesCallsThatWriteNothing(t *testing.T) {
	t.Parallel()
	f := owing(t)
	for range 2 {
		f.revokesNothing()
		require.Zero(t, f.rollover(wallet.Rollover{Reference: "a", Cap: 1}).Amount)
		require.EqualValues(t, 3, f.balance().Overdrawn)
		f.verify()
		f.clock.Advance(-10 * time.Minute)
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.ClockState, error) {
			return f.ledger.RepairClock(ctx, tx, "ann", budget.Note{})
		})
		require.NoError(t, err)
		f.verify()
	}
	f.grant(wallet.Grant{Amount: 10})
	require.EqualValues(t, 7, f.balance().Units)
	f.verify()
}

// The next draw finds no end to write, and those after it cost no more than of any wallet.
func TestDraw_CatchesUp(t *testing.T) {
	t.Parallel()
	f := owing(t)
	f.draw(1)
	require.False(t, f.lags())
	require.EqualValues(t, 4, f.balance().Overdrawn)
	f.verify()
	f.grant(wallet.Grant{Amount: 10})
	require.EqualValues(t, 6, f.balance().Units)
	f.verify()
}

// A child that was carved, and is closed, still has lots that end.
func TestVerify_KnowsAClosedChildWithALotThatGoesOn(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	carver, err := leases.NewCarver(f.ledger)
	require.NoError(t, err)
	f.grant(wallet.Grant{Amount: 50})
	for _, child := range []string{"swept", "settled"} {
		_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
			return carver.Carve(ctx, tx, leases.Carving{From: f.book.Charge("ann", 10), Child: child, TTL: day})
		})
		require.NoError(t, err)
		f.grant(wallet.Grant{Wallet: child, Amount: 20, Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(time.Hour)}})
	}
	closed := func(child string) {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
			return carver.End(ctx, tx, child, budget.Note{})
		})
		require.NoError(t, err)
		f.verify()
	}
	closed("swept")
	f.clock.Set(noon.Add(time.Hour))
	closed("settled")
	for range 2 {
		f.sweeps()
		f.verify()
		f.clock.Advance(time.Hour)
	}
}
