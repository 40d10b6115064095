package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// forUse is a draw of ann's wallet for a use.
func forUse(use string, amount int64) toDraw {
	return toDraw{Wallet: "ann", Amount: amount, Note: budget.Note{Use: use}}
}

// images and tokens are lots for one use each, and any is one for everything, which comes first of the three.
func (f *fixture) grantForUses() {
	one := 1
	f.grant(wallet.Grant{Amount: 40, Reference: "images", Uses: []string{"images"}, Priority: &one})
	f.grant(wallet.Grant{Amount: 30, Reference: "tokens", Uses: []string{"tokens", "tokens"}, Priority: &one})
	f.grant(wallet.Grant{Amount: 20, Reference: "any"})
}

func (f *fixture) shares(d wasDrawn) map[string]int64 {
	all := map[string]int64{}
	for _, l := range d.Lots {
		all[l.Reference] += l.Amount
	}
	return all
}

func (f *fixture) mustDraw(d toDraw) wasDrawn {
	f.Helper()
	drawn, err := f.tryDraw(d)
	require.NoError(f, err)
	return drawn
}

func TestUses_ADrawTakesLotsForItsUseInTheOrderOfAllLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grantForUses()
	b := f.balance()
	require.Equal(t, []int64{20, 60, 50, 20}, []int64{b.Units, b.For("images"), b.For("tokens"), b.For("mail")})
	d := f.mustDraw(forUse("images", 30))
	require.Equal(t, map[string]int64{"any": 20, "images": 10}, f.shares(d))
	require.EqualValues(t, 30, d.Left)
	require.Zero(t, d.Overdrawn)
	f.has(0) // a draw without a use
	var exceeded *budget.ExceededError
	_, err := f.tryDraw(forUse("tokens", 31))
	require.ErrorAs(t, err, &exceeded)
	require.EqualValues(t, 30, exceeded.Refusals[0].Available)
	require.EqualValues(t, 31, exceeded.Refusals[0].Requested)
	before := f.balance().Seq
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (any, error) { // the transaction is usable, and has nothing
		_, err := f.drawIn(ctx, tx, forUse("tokens", 31))
		require.ErrorIs(t, err, budget.ErrExceeded)
		return nil, nil
	})
	require.NoError(t, err)
	require.Equal(t, before, f.balance().Seq)
	up := forUse("tokens", 100)
	up.UpTo = true
	require.EqualValues(t, 30, f.mustDraw(up).Amount)
	require.Equal(t, map[string]int64{"images": 30}, f.left())
}

func TestUses_OverdraftIsUsedWhenNoLotForTheUseIsLeft(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 50})
	f.grantForUses()
	f.draw(45) // 25 of no lot: those for a use pay no overdraft, and none when they are granted
	d := f.mustDraw(forUse("images", 35))
	require.Equal(t, map[string]int64{"images": 35}, f.shares(d))
	require.Zero(t, d.Overdrawn)
	d = f.mustDraw(forUse("images", 15))
	require.EqualValues(t, 10, d.Overdrawn)
	require.EqualValues(t, -35, f.balance().Units)
	f.grant(wallet.Grant{Amount: 5, Reference: "mail", Uses: []string{"mail"}}) // pays none of it
	require.EqualValues(t, -35, f.balance().Units)
	f.grant(wallet.Grant{Amount: 5, Reference: "more", Uses: []string{"images"}}) // pays 5 of 10
	require.EqualValues(t, -30, f.balance().Units)
	_, err := f.tryDraw(forUse("images", 21))
	require.ErrorIs(t, err, budget.ErrExceeded)
	f.refund(d.Seq, 15) // of its overdraft first, then of no use's, then of the lot that paid
	require.Equal(t, map[string]int64{"images": 5, "tokens": 30, "mail": 5}, f.left())
	require.EqualValues(t, -20, f.balance().Units)
}

// A plan for a use repays what was overdrawn for it, so that an overdraft does not grow from month to month: when its lot begins, swept
// or not, and when units come back to it. What was overdrawn for no use is for others to pay.
func TestUses_ALotRepaysTheOverdraftThatWasDrawnForItsUse(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 90})
	f.grant(wallet.Grant{Amount: 100, Reference: "plan", Uses: []string{"images"}, Ends: wallet.EachPeriod(daily)})
	for range 4 { // each day 130 images, and each day the plan repays the 30 of the day before
		f.mustDraw(forUse("images", f.balance().For("images")+30))
		require.EqualValues(t, -30, f.balance().Units)
		f.clock.Advance(day)
		b := f.balance()
		require.Equal(t, []int64{0, 70}, []int64{b.Units, b.For("images")})
		f.sweeps()
		require.Equal(t, []any{b.Units, b.For("images")}, []any{f.balance().Units, f.balance().For("images")})
	}
	var lines []string
	for l, err := range f.book.Statement(t.Context(), f.pool, "ann", budget.EntriesOptions{NewestFirst: true, Max: 1}) {
		require.NoError(t, err)
		for _, m := range l.Lots {
			lines = append(lines, fmt.Sprint(l.Kind, " ", m.Kind, " ", m.Amount))
		}
	}
	require.Equal(t, []string{"credit applied 30", "credit paid back 30"}, lines)
	f.draw(20)
	d := f.mustDraw(forUse("images", 80)) // 10 of overdraft
	f.refund(d.Seq, 40)                   // 10 of that, and 30 images
	require.Equal(t, []int64{-20, 30}, []int64{f.balance().Units, f.balance().For("images")})
	f.grant(wallet.Grant{Amount: 25, Reference: "any"})
	require.Equal(t, []int64{5, 35}, []int64{f.balance().Units, f.balance().For("images")})
}

// A lot for one use pays nothing that was overdrawn for another, or for no use.
func TestUses_ALotRepaysNoOverdraftOfAnotherUse(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 90})
	f.grant(wallet.Grant{Amount: 1, Reference: "first"})
	f.mustDraw(forUse("images", 6))
	f.mustDraw(forUse("text", 7))
	f.draw(11)
	f.grant(wallet.Grant{Amount: 20, Reference: "images", Uses: []string{"images"}})
	require.Equal(t, []int64{-18, 15}, []int64{f.balance().Units, f.balance().For("images")})
	f.grant(wallet.Grant{Amount: 20, Reference: "both", Uses: []string{"images", "text"}})
	require.Equal(t, []int64{-11, 13}, []int64{f.balance().Units, f.balance().For("text")})
}

func TestUses_ARefundGoesBackToTheLotsThatPaid(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grantForUses()
	d := f.mustDraw(forUse("images", 50))
	f.refund(d.Seq, 25)
	require.Equal(t, map[string]int64{"images": 35, "tokens": 30}, f.left())
	f.refund(d.Seq, 25)
	require.Equal(t, map[string]int64{"images": 40, "tokens": 30, "any": 20}, f.left())
	kinds, _ := f.kinds(4)
	require.Equal(t, []string{"credit", "charge", "refund", "roll over", "refund", "roll over"}, kinds)
	f.has(20)
}

// A hold keeps units of lots for its use. Freed units go back to them, whoever frees them, and whenever that is written.
func TestUses_AHoldGivesUnitsBackToTheirUse(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grantForUses()
	place := func(id string, amount int64) {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
			return f.holds.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Hour, Lines: []holds.Line{f.book.Line("ann", amount)}, Note: budget.Note{Use: "images"}})
		})
		require.NoError(f, err)
	}
	place("a", 45)
	require.EqualValues(t, 15, f.balance().For("images"))
	f.release("a")
	require.Equal(t, map[string]int64{"images": 40, "tokens": 30, "any": 20}, f.left())
	place("b", 45)
	f.clock.Advance(time.Hour)
	for range 2 { // due, and then swept
		require.Equal(t, map[string]int64{"images": 40, "tokens": 30, "any": 20}, f.left())
		require.EqualValues(t, 20, f.balance().Units)
		_, err := f.holds.Sweep(t.Context(), f.pool, holds.SweepOptions{})
		require.NoError(t, err)
	}
	place("c", 45)
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) { // 5 more than it holds
		return f.holds.Capture(ctx, tx, holds.Capture{IDs: []string{"c"}, Lines: []holds.Line{f.book.Line("ann", 50)}, Over: holds.OverIfFits, Note: budget.Note{Use: "images"}})
	})
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"images": 10, "tokens": 30}, f.left())
}

// The end of a lot for a use is written and announced once, also when many wait for it, and no draw after it waits for all of them.
func TestUses_AnEndedLotPaysNothingSweptOrNot(t *testing.T) {
	t.Parallel()
	var told int64
	f := setUp(t, wallet.Config{Subscribers: []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
		told += b.Amount
		return nil
	}}})
	for range 100 {
		f.grant(wallet.Grant{Amount: 2, Ends: wallet.After(time.Hour), Uses: []string{"images"}})
	}
	f.grant(wallet.Grant{Amount: 7, Ends: wallet.After(time.Hour), Uses: []string{"images"}, Roll: &wallet.Roll{Cap: 5}, Reference: "rolls"})
	f.grant(wallet.Grant{Amount: 9})
	f.clock.Advance(time.Hour)
	require.EqualValues(t, 14, f.balance().For("images"))
	before := f.balance().Seq
	require.Equal(t, map[string]int64{"": 8, "rolls": 5}, f.shares(f.mustDraw(forUse("images", 13))))
	require.LessOrEqual(t, f.balance().Seq-before, int64(32+5), "a call writes the ends of 32 lots")
	_, err := f.tryDraw(forUse("images", 2))
	require.ErrorIs(t, err, budget.ErrExceeded)
	f.expire()
	require.EqualValues(t, 202, told)
	require.Equal(t, map[string]int64{"": 1}, f.left())
}

// A draw that lots for its use pay lowers no general credit: it arms no threshold, and reports none again.
func TestUses_AThresholdIsOfGeneralCredit(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, wallet.Config{Thresholds: []budget.Threshold{{Name: "low", Left: 10}}}, nil)
	f.grantForUses()
	f.mustDraw(forUse("images", 5)) // of any, which comes first
	require.Empty(t, f.crossed())
	f.mustDraw(forUse("images", 10))
	require.Equal(t, []string{"ann low 5"}, f.crossed())
	f.mustDraw(forUse("images", 30))
	f.mustDraw(forUse("tokens", 5))
	require.Empty(t, f.crossed())
	f.grant(wallet.Grant{Amount: 100, Uses: []string{"images"}})
	f.mustDraw(forUse("images", 50))
	require.Empty(t, f.crossed())
	f.grant(wallet.Grant{Amount: 20})
	f.mustDraw(forUse("mail", 12))
	require.Equal(t, []string{"ann low 8"}, f.crossed())
}

func TestUses_InCommandsSessionsChecksAndBatches(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	require.NoError(t, pgx.BeginFunc(t.Context(), p.pool, func(tx pgx.Tx) error {
		_, err := p.book.Grant(t.Context(), tx, wallet.Grant{Wallet: "ann", Amount: 100, Uses: []string{"images"}, Reference: "images"})
		return err
	}))
	balance := func() int64 {
		b, err := p.book.Balance(t.Context(), p.pool, "ann")
		require.NoError(t, err)
		require.Zero(t, b.Units)
		return b.For("images")
	}
	charge := func(amount int64, use string) budget.Charge {
		c := p.book.Charge("ann", amount, budget.Per(60, budget.Month, time.UTC, time.Time{}))
		c.Note.Use = use
		return c
	}
	// In a declared charge and in a draw of the function. The month's cap counts both.
	cmd := metered.Command{ID: "a", Input: 1, Charges: []budget.Charge{charge(10, "images")}, EarlyLook: true}
	first, err := metered.Do(t.Context(), p.c, cmd, p.drawing(forUse("images", 20)))
	require.NoError(t, err)
	require.Equal(t, []budget.LotMove{{Lot: first.Receipt.Entries[1].Lots[0].Lot, Reference: "images", Amount: 20}}, first.Receipt.Entries[1].Lots)
	again, err := metered.Do(t.Context(), p.c, cmd, p.drawing(forUse("images", 20)))
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.EqualValues(t, 70, balance())
	cmd.Charges[0].Note.Use = "tokens"
	_, err = metered.Do(t.Context(), p.c, cmd, p.drawing())
	require.ErrorIs(t, err, budget.ErrConflict, "a use belongs to the content of an id")
	for _, early := range []bool{false, true} {
		_, err = metered.Do(t.Context(), p.c, metered.Command{ID: "b", Input: 1, Charges: []budget.Charge{charge(5, "tokens")}, EarlyLook: early}, p.drawing())
		require.ErrorIs(t, err, budget.ErrExceeded)
	}
	_, err = metered.Do(t.Context(), p.c, metered.Command{ID: "c", Input: 1, Charges: []budget.Charge{charge(31, "images")}, EarlyLook: true}, p.drawing())
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Len(t, exceeded.Refusals, 1)
	require.EqualValues(t, 30, exceeded.Refusals[0].Available, "of the month's cap")
	// A refund by the receipt.
	require.NoError(t, pgx.BeginFunc(t.Context(), p.pool, func(tx pgx.Tx) error {
		_, err := p.c.Budget.Refund(t.Context(), tx, budget.Refund{Scope: "ann", Seq: first.Receipt.Entries[1].Seq, All: true})
		return err
	}))
	require.EqualValues(t, 90, balance())
	// A session holds for a use, settles more than it held, and gives back.
	s, err := metered.Open[int](t.Context(), p.c, metered.Reservation{ID: "s", TTL: time.Hour, Lines: []holds.Line{p.book.Line("ann", 30)}, Note: budget.Note{Use: "images"}})
	require.NoError(t, err)
	require.EqualValues(t, 60, balance())
	_, err = s.Settle(t.Context(), metered.Cost{Lines: []holds.Line{p.book.Line("ann", 35)}, Over: holds.OverIfFits}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 55, balance())
	// A check, and charges of a batch, agree with a charge.
	r, err := p.c.Budget.Check(t.Context(), p.pool, charge(10, "images"))
	require.NoError(t, err)
	require.EqualValues(t, 45, r.Entries[0].Standings[0].Available)
	require.NoError(t, pgx.BeginFunc(t.Context(), p.pool, func(tx pgx.Tx) error {
		real, err := p.c.Budget.Charge(t.Context(), tx, charge(10, "images"))
		require.NoError(t, err)
		require.Equal(t, r.Entries[0].Standings, real.Entries[0].Standings)
		return err
	}))
	require.EqualValues(t, 45, balance())
	for e, err := range p.c.Budget.Entries(t.Context(), p.pool, "ann", budget.EntriesOptions{NewestFirst: true, Max: 1}) {
		require.NoError(t, err)
		require.Equal(t, "images", e.Note.Use)
	}
}

// One call for two wallets takes of both or of none.
func TestUses_OfSeveralWalletsInOneCall(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	for _, name := range []string{"ann", "ben"} {
		f.grant(wallet.Grant{Wallet: name, Amount: 10, Uses: []string{"images"}})
	}
	charge := func(ann, ben int64) error {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
			var charges []budget.Charge
			for name, amount := range map[string]int64{"ann": ann, "ben": ben} {
				c := f.book.Charge(name, amount)
				c.Note.Use = "images"
				charges = append(charges, c)
			}
			return f.ledger.Charge(ctx, tx, charges...)
		})
		return err
	}
	require.NoError(t, charge(4, 7))
	var exceeded *budget.ExceededError
	require.ErrorAs(t, charge(5, 5), &exceeded)
	require.Len(t, exceeded.Refusals, 1)
	require.Equal(t, "ben", exceeded.Refusals[0].Scope)
	require.EqualValues(t, 3, exceeded.Refusals[0].Available)
	require.NoError(t, charge(6, 3))
	require.Empty(t, f.balance().Lots)
}

func TestUses_OfAGrantAreItsContent(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	g := wallet.Grant{Wallet: "ann", Amount: 10, Reference: "r", Uses: []string{"b", "a", "b"}}
	f.grant(g)
	g.Uses = []string{"a", "b"}
	require.True(t, f.grant(g).Replayed)
	for _, uses := range [][]string{nil, {"a"}} {
		g.Uses = uses
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Grant(ctx, tx, g) })
		require.ErrorIs(t, err, wallet.ErrConflict)
	}
	require.Equal(t, []string{"a", "b"}, f.balance().Lots[0].Uses)
	for _, uses := range [][]string{{""}, make([]string, 17), {"a\x00"}} {
		g.Reference, g.Uses = "x", uses
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Grant(ctx, tx, g) })
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument)
		require.Equal(t, "Grant.Uses", argument.Field)
	}
}

// Verify finds a lot for a use whose units others could draw.
func TestUses_VerifyFindsUnitsThatLeftTheirUse(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grantForUses()
	_, err := f.pool.Exec(t.Context(), `update metered.lot_moves m set kept = m.kept - 5, rest = m.rest + 5 from metered.lots l where l.reference = 'images' and m.lot = l.no and m.version = l.version`)
	require.NoError(t, err)
	report, err := f.ledger.Verify(t.Context(), f.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.NotEmpty(t, report.Differences)
	_, err = f.pool.Exec(t.Context(), `update metered.lot_moves m set kept = m.kept + 5, rest = m.rest - 5 from metered.lots l where l.reference = 'images' and m.lot = l.no and m.version = l.version`)
	require.NoError(t, err)
}

// Many draw, hold, release, capture and refund for different uses of one wallet at once, at each isolation level and at all of them.
// Afterwards each lot has exactly the sum of their answers, no lot paid for another use, and each wallet is used up to its last unit.
func TestUses_UnderStressAllSumsAreExact(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	f := setUp(t, wallet.Config{Overdraft: 15})
	type worker struct {
		wallet string
		levels []pgx.TxIsoLevel
	}
	workers := []worker{{"w mixed", anyLevel}}
	for i, level := range anyLevel {
		workers = append(workers, worker{fmt.Sprint("w", i), []pgx.TxIsoLevel{level}})
	}
	var wg sync.WaitGroup
	var ids atomic.Int64
	for _, w := range workers {
		one := 1
		for _, g := range []wallet.Grant{{Amount: 60, Uses: []string{"images"}}, {Amount: 60, Uses: []string{"tokens"}}, {Amount: 40, Uses: []string{"images", "tokens"}, Priority: &one}, {Amount: 60}} {
			g.Wallet, g.Reference = w.wallet, fmt.Sprint(g.Uses)
			f.grant(g)
		}
		for n := range 4 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(n), 7))
				try := func(call func(tx pgx.Tx) error) error {
					for {
						err := pgx.BeginTxFunc(f.Context(), f.pool, pgx.TxOptions{IsoLevel: w.levels[r.IntN(len(w.levels))]}, call)
						if !metered.Retryable(err) {
							return err
						}
					}
				}
				ctx := f.Context()
				for range 12 {
					d := toDraw{Wallet: w.wallet, Amount: 1 + r.Int64N(12), UpTo: r.IntN(3) == 0, Note: budget.Note{Use: []string{"", "images", "tokens"}[r.IntN(3)]}}
					var err error
					switch r.IntN(3) {
					case 0:
						var drawn wasDrawn
						err = try(func(tx pgx.Tx) (err error) { drawn, err = f.drawIn(ctx, tx, d); return err })
						if err == nil && r.IntN(3) == 0 {
							err = try(func(tx pgx.Tx) error {
								_, err := f.ledger.Refund(ctx, tx, budget.Refund{Scope: w.wallet, Seq: drawn.Seq, Amount: 1 + r.Int64N(drawn.Amount)})
								return err
							})
						}
					case 1:
						c := f.book.Charge(w.wallet, d.Amount)
						c.Note = d.Note
						err = try(func(tx pgx.Tx) error { _, err := f.ledger.Charge(ctx, tx, c); return err })
					default:
						id := fmt.Sprint("h", ids.Add(1))
						err = try(func(tx pgx.Tx) error {
							_, err := f.holds.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Hour, Lines: []holds.Line{f.book.Line(w.wallet, d.Amount)}, Note: d.Note})
							return err
						})
						if err != nil {
							break
						}
						err = try(func(tx pgx.Tx) error {
							if r.IntN(2) == 0 {
								_, err := f.holds.Release(ctx, tx, holds.Release{IDs: []string{id}})
								return err
							}
							_, err := f.holds.Capture(ctx, tx, holds.Capture{IDs: []string{id}, Lines: []holds.Line{{Scope: w.wallet, Amount: 1 + r.Int64N(d.Amount)}}})
							return err
						})
					}
					if err != nil && !errors.Is(err, budget.ErrExceeded) {
						f.Errorf("%s: %v", w.wallet, err)
					}
				}
			})
		}
	}
	wg.Wait()
	for _, w := range workers {
		for _, use := range []string{"images", "tokens", ""} { // the rest, and then nothing is left
			for {
				if _, err := f.tryDraw(toDraw{Wallet: w.wallet, Amount: 50, UpTo: true, Note: budget.Note{Use: use}}); err != nil {
					require.ErrorIs(t, err, budget.ErrExceeded)
					break
				}
			}
		}
		b, err := f.book.Balance(t.Context(), f.pool, w.wallet)
		require.NoError(t, err)
		require.Empty(t, b.Lots)
		require.EqualValues(t, -15, b.Units)
		var net, wrong int64
		require.NoError(t, f.pool.QueryRow(t.Context(), `select spent - refunded from metered.ledger where scope = $1 order by seq desc limit 1`, w.wallet).Scan(&net))
		require.EqualValues(t, 60+60+40+60+15, net)
		require.NoError(t, f.pool.QueryRow(t.Context(), `
			select count(*) from metered.lot_moves m join metered.lots l on l.no = m.lot join metered.ledger e on e.scope = m.scope and e.seq = m.seq
			where m.scope = $1 and m.kind in ('t', 'h') and (l.plan).uses is not null and not (l.plan).uses @> array[coalesce(e.note ->> 'use', '')]`, w.wallet).Scan(&wrong))
		require.Zero(t, wrong, "units that paid for another use")
	}
}
