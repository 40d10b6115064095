package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// purse is a client with a book of wallets, whose clock stands.
type purse struct {
	*testing.T
	pool  *pgxpool.Pool
	c     *metered.Client
	book  *wallet.Book
	clock *pgtest.Clock
}

func newPurse(t *testing.T, cfg wallet.Config) *purse {
	t.Helper()
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{MaxTTL: 48 * time.Hour}})
	book, err := wallet.New(c.Budget, cfg)
	require.NoError(t, err)
	p := &purse{t, pool, c, book, pgtest.SetClock(t, pool, pgtest.Tomorrow(9))}
	t.Cleanup(func() {
		report, err := c.Budget.Verify(context.Background(), pool, budget.VerifyOptions{})
		require.NoError(t, err)
		require.Empty(t, report.Differences)
	})
	return p
}

func (p *purse) grant(name string, amount int64, lasts time.Duration) {
	p.Helper()
	require.NoError(p, pgx.BeginFunc(p.Context(), p.pool, func(tx pgx.Tx) error {
		g := wallet.Grant{Wallet: name, Amount: amount, Reference: fmt.Sprint(amount, lasts)}
		if lasts > 0 {
			g.Ends = wallet.After(lasts)
		}
		_, err := p.book.Grant(p.Context(), tx, g)
		return err
	}))
}

func (p *purse) left(name string) int64 {
	p.Helper()
	b, err := p.book.Balance(p.Context(), p.pool, name)
	require.NoError(p, err)
	return b.Units
}

// lots returns the drawn, held and lapsed units of each lot of a wallet.
func (p *purse) lots(name string) (all [][3]int64) {
	p.Helper()
	rows, err := p.pool.Query(p.Context(), `select drawn, held, lapsed from metered.lots where scope = $1 order by no`, name)
	require.NoError(p, err)
	type lot struct{ Drawn, Held, Lapsed int64 }
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[lot])
	require.NoError(p, err)
	for _, l := range got {
		all = append(all, [3]int64{l.Drawn, l.Held, l.Lapsed})
	}
	return all
}

func (p *purse) drawing(draws ...toDraw) metered.Func[pgtest.Uploaded] {
	return func(_ context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
		var errs []error
		for _, d := range draws {
			errs = append(errs, tx.Charge(d.of(p.book)))
		}
		return pgtest.Uploaded{Name: "drawn"}, errors.Join(errs...)
	}
}

// Charges up to so much are on the receipt of the command, after its own charges, first and in each replay.
func TestTx_AChargeUpToIsOnTheReceiptAndAReplaySaysTheSame(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	p.grant("ann", 7, time.Hour)
	p.grant("ben", 4, 0)
	both := func(amount int64) []budget.Charge {
		return []budget.Charge{upTo(p.book.Charge("ann", amount)), upTo(p.book.Charge("ben", amount))}
	}
	cmd := metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{p.book.Charge("ann", 2)}}
	out, err := metered.Do(t.Context(), p.c, cmd, func(_ context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
		return pgtest.Uploaded{Name: "drawn"}, errors.Join(tx.Charge(toDraw{Wallet: "ann", Amount: 1}.of(p.book)), tx.Charge(both(9)...))
	})
	require.NoError(t, err)
	got := [][2]any{}
	for _, e := range out.Receipt.Entries {
		got = append(got, [2]any{e.Scope, e.Amount})
	}
	require.Equal(t, [][2]any{{"ann", int64(2)}, {"ann", int64(1)}, {"ann", int64(4)}, {"ben", int64(4)}}, got)
	require.EqualValues(t, 0, out.Receipt.Entries[3].Standings[0].Available)
	require.Zero(t, p.left("ann"))
	p.grant("ben", 50, 0)
	again, err := metered.Do(t.Context(), p.c, cmd, pgtest.MustNotRun(t))
	require.NoError(t, err)
	require.True(t, again.Replayed)
	op, err := p.c.Lookup(t.Context(), p.pool, "", "op")
	require.NoError(t, err)
	for _, on := range []budget.Receipt{again.Receipt, op.Receipt} {
		require.Len(t, on.Entries, 4)
		for i, e := range on.Entries {
			want := out.Receipt.Entries[i]
			want.Standings = nil
			require.True(t, want.At.Equal(e.At))
			want.At = e.At
			require.Equal(t, want, e)
			require.Equal(t, i > 0, len(e.Lots) == 1)
		}
	}
	require.Empty(t, op.Holds)

	_, err = metered.Do(t.Context(), p.c, metered.Command{ID: "more", Input: 1}, func(_ context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
		return pgtest.Uploaded{Name: "more"}, tx.Charge(both(3)...)
	})
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "ann", exceeded.Refusals[0].Scope)
	require.EqualValues(t, 3, exceeded.Refusals[0].Requested)
	require.EqualValues(t, 50, p.left("ben"), "nothing was charged")
	require.Zero(t, pgtest.Value[int](t, p.pool, "select count(*)::int from metered.operations where id = 'more'"))
}

func TestTx_DrawIsOnRecordAndAReplaySaysTheSame(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	p.grant("ann", 7, time.Hour)
	p.grant("ann", 5, 0)
	p.grant("ben", 4, 0)
	cmd := metered.Command{ID: "op", Input: 1}
	fn := p.drawing(toDraw{Wallet: "ann", Amount: 9}, toDraw{Wallet: "ben", Amount: 9, UpTo: true}, toDraw{Wallet: "ann", Amount: 9, UpTo: true})
	out, err := metered.Do(t.Context(), p.c, cmd, fn)
	require.NoError(t, err)
	drawn := out.Receipt.Entries
	require.Len(t, drawn, 3)
	require.Equal(t, []int64{9, 4, 3}, []int64{drawn[0].Amount, drawn[1].Amount, drawn[2].Amount})
	require.EqualValues(t, 7, drawn[0].Lots[0].Amount)
	require.EqualValues(t, 3, drawn[0].Standings[0].Available)
	for i := range drawn {
		drawn[i].At, drawn[i].Standings = drawn[i].At.UTC(), nil
	}
	require.Equal(t, [][3]int64{{7, 0, 0}, {5, 0, 0}}, p.lots("ann"))
	p.grant("ben", 50, 0)
	for range 2 {
		again, err := metered.Do(t.Context(), p.c, cmd, pgtest.MustNotRun(t))
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, drawn, again.Receipt.Entries, "though there is more by now")
	}
	op, err := p.c.Lookup(t.Context(), p.pool, "", "op")
	require.NoError(t, err)
	require.Equal(t, drawn, op.Receipt.Entries)
	require.Empty(t, op.Holds)
	require.Nil(t, pgtest.Value[*string](t, p.pool, "select holds::text from metered.operations_words"), "draws are no holds")
	require.EqualValues(t, 50, p.left("ben"))

	entries := map[string]int{}
	for e, err := range p.c.Budget.Entries(t.Context(), p.pool, "ann", budget.EntriesOptions{}) {
		require.NoError(t, err)
		entries[e.Operation]++
	}
	require.Equal(t, map[string]int{"": 2, "op": 2}, entries, "the entries name the operation")
}

func TestTx_ADrawThatIsRefusedLeavesNothingOfItsCommand(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{Overdraft: 2})
	p.grant("ann", 5, 0)
	p.grant("ben", 5, 0)
	for _, d := range []toDraw{{Wallet: "ben", Amount: 8}, {Wallet: "nobody", Amount: 3, UpTo: false}} {
		cmd := metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{p.book.Charge("ann", 1)}}
		_, err := metered.Do(t.Context(), p.c, cmd, p.drawing(toDraw{Wallet: "ann", Amount: 2}, d))
		var exceeded *budget.ExceededError
		require.ErrorAs(t, err, &exceeded)
		require.Equal(t, d.Wallet, exceeded.Refusals[0].Scope)
		require.Equal(t, "credit", exceeded.Refusals[0].Limit.Name)
		require.Equal(t, http.StatusPaymentRequired, httpmetered.ProblemOf(err).Status)
		require.Equal(t, [][3]int64{{0, 0, 0}}, p.lots("ann"))
	}
	_, err := metered.Do(t.Context(), p.c, metered.Command{ID: "op"}, p.drawing(toDraw{Wallet: "ann", Amount: 1}))
	require.ErrorIs(t, err, budget.ErrArgument, "the id would stand for any draw")
	_, err = metered.Do(t.Context(), p.c, metered.Command{ID: "op", Input: 1}, p.drawing(toDraw{Wallet: "ann"}))
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = metered.Do(t.Context(), p.c, metered.Command{ID: "op", Input: 1}, func(context.Context, *metered.Tx) (pgtest.Uploaded, error) {
		return pgtest.Uploaded{}, (&metered.Tx{}).Charge(p.book.Charge("ann", 1))
	})
	require.ErrorIs(t, err, guardtx.ErrDone)
	out, err := metered.Do(t.Context(), p.c, metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{p.book.Charge("ann", 1)}},
		p.drawing(toDraw{Wallet: "ann", Amount: 9, UpTo: true}))
	require.ErrorIs(t, err, budget.ErrExceeded, "the draw comes first, and leaves nothing for the charge")
	require.Empty(t, out.Receipt)
}

// A draw that a command declares is a charge: the fingerprint has it, it costs no round trip, and its receipt names it for a refund.
func TestCommand_ADeclaredDrawIsACharge(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	p.grant("ann", 7, time.Hour)
	p.grant("ann", 5, 0)
	tapped, w := pgtest.Tap(t, p.pool, func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	c := pgtest.NewClient(t, tapped, metered.Config{})
	cmd := metered.Command{ID: "op", Charges: []budget.Charge{p.book.Charge("ann", 9)}}
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "warm"}, pgtest.Upload("warm"))
	require.NoError(t, err)
	w.Each(nil)
	out, err := metered.Do[pgtest.Uploaded](t.Context(), c, cmd, nil)
	require.NoError(t, err)
	require.Len(t, w.Sent(), 1, "claim, draw, record and COMMIT")
	again, err := metered.Do[pgtest.Uploaded](t.Context(), c, cmd, nil)
	require.NoError(t, err)
	require.Equal(t, out.Receipt.Entries[0].Seq, again.Receipt.Entries[0].Seq)
	require.EqualValues(t, 3, p.left("ann"))
	cmd.Charges[0].Amount = 8
	_, err = metered.Do[pgtest.Uploaded](t.Context(), c, cmd, nil)
	require.ErrorIs(t, err, budget.ErrConflict)

	// Drawn in a command, the same with a Tx.Charge: two round trips as well.
	w.Each(nil)
	_, err = metered.Do(t.Context(), c, metered.Command{ID: "drawn", Input: 1}, p.drawing(toDraw{Wallet: "ann", Amount: 1}))
	require.NoError(t, err)
	require.Len(t, w.Sent(), 2)

	refund := metered.Command{ID: "refund", Input: 1}
	_, err = metered.Do(t.Context(), c, refund, func(_ context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
		return pgtest.Uploaded{}, tx.Refund(budget.Refund{Scope: "ann", Seq: out.Receipt.Entries[0].Seq, Amount: 4})
	})
	require.NoError(t, err)
	require.Equal(t, [][3]int64{{5, 0, 0}, {1, 0, 0}}, p.lots("ann"), "the last lot first")
}

func TestDoTx_DrawsAreTheCallersToCommit(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	p.grant("ann", 10, time.Hour)
	tx, err := p.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = metered.DoTx(t.Context(), p.c, tx, metered.Command{ID: "too much", Input: 1}, p.drawing(toDraw{Wallet: "ann", Amount: 11}))
	require.ErrorIs(t, err, budget.ErrExceeded)
	out, err := metered.DoTx(t.Context(), p.c, tx, metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{p.book.Charge("ann", 2)}},
		p.drawing(toDraw{Wallet: "ann", Amount: 3}))
	require.NoError(t, err)
	require.EqualValues(t, 7, out.Receipt.Entries[1].Standings[0].Available, "before the charge")
	require.EqualValues(t, 10, p.left("ann"), "for others")
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, [][3]int64{{0, 0, 0}}, p.lots("ann"))
}

// A hold that a command places keeps its units of a lot past the end of the lot: it is captured as if nothing had
// happened, and the rest lapses.
func TestCommand_AHoldOfAWalletOutlivesTheLot(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	p.grant("ann", 10, time.Hour)
	p.grant("ann", 5, 0)
	hold := holds.Placement{ID: "stream", Lines: []holds.Line{p.book.Line("ann", 8)}, TTL: 3 * time.Hour}
	_, err := metered.Do[pgtest.Uploaded](t.Context(), p.c, metered.Command{ID: "begin", Holds: []holds.Placement{hold}}, nil)
	require.NoError(t, err)
	p.clock.Advance(2 * time.Hour)
	require.EqualValues(t, 5, p.left("ann"), "2 lapsed, and 8 are held")
	_, err = metered.Do(t.Context(), p.c, metered.Command{ID: "end", Input: 1}, func(_ context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
		return pgtest.Uploaded{}, errors.Join(tx.Capture(holds.Capture{IDs: []string{"stream"}, Lines: []holds.Line{p.book.Line("ann", 6)}}),
			tx.Charge(toDraw{Wallet: "ann", Amount: 1}.of(p.book)))
	})
	require.NoError(t, err)
	require.Equal(t, [][3]int64{{6, 0, 4}, {1, 0, 0}}, p.lots("ann"))
	require.EqualValues(t, 4, p.left("ann"))
}

// Two commands that draw from the same wallets in opposite orders, and charge them, queue and do not deadlock.
func TestDo_DrawsInOppositeOrdersDoNotDeadlock(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	p.grant("ann", 1000, 0)
	p.grant("ben", 1000, 0)
	names := []string{"ann", "ben"}
	require.NoError(t, pgtest.InParallel(8, func(w int) error {
		for i := range 10 {
			a, b := names[w%2], names[1-w%2]
			cmd := metered.Command{ID: fmt.Sprint(w, "/", i), Input: 1, Charges: []budget.Charge{p.book.Charge(b, 2)}}
			out, err := metered.Do(context.Background(), p.c, cmd, p.drawing(toDraw{Wallet: a, Amount: 1}, toDraw{Wallet: b, Amount: 3, UpTo: true}))
			if err != nil {
				return err
			}
			if len(out.Receipt.Entries) != 3 {
				return fmt.Errorf("%d entries", len(out.Receipt.Entries))
			}
		}
		return nil
	}))
	require.EqualValues(t, 1000-40*1-40*5, p.left("ann"))
	require.EqualValues(t, 1000-40*1-40*5, p.left("ben"))
}

// A lease holds units of the wallet's lots, and its charges draw these units after a lot's end, too.
func TestLeases_OfAWalletAreOfItsLots(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	p.grant("hot", 600, 5*time.Minute)
	p.grant("hot", 400, 0)
	lent, err := leases.New(p.pool, p.c.Budget, leases.Config{Rules: []leases.Rule{{Prefix: "hot", Share: 1, MinSlice: 70, TTL: time.Hour, Idle: time.Hour}}, NoRecall: true})
	require.NoError(t, err)
	defer func() { _ = lent.Close(context.Background()) }()
	c := pgtest.NewClient(t, p.pool, metered.Config{Leases: lent})
	var spent, leased, first int64
	charge := func() int64 {
		out, err := metered.Do[pgtest.Uploaded](t.Context(), c, metered.Command{ID: fmt.Sprint(spent), Charges: []budget.Charge{p.book.Charge("hot", 1)}}, nil)
		require.NoError(t, err)
		spent++
		require.Less(t, spent, int64(500), "no charge took units of the lease") // which a few charges in quick succession open
		return out.Receipt.Entries[0].Lease
	}
	for first == 0 {
		first = charge()
	}
	leased++
	p.clock.Advance(10 * time.Minute)
	for leased < 4 {
		if charge() == first {
			leased++
		}
	}
	require.NoError(t, lent.Close(t.Context()))
	_, err = p.book.Sweep(t.Context(), p.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	lots := p.lots("hot")
	drawn := lots[0][0]
	require.GreaterOrEqual(t, drawn, leased, "the lease holds units of the first lot")
	// Charges beside the lease draw the second lot once the first one has ended.
	require.Equal(t, [][3]int64{{drawn, 0, 600 - drawn}, {spent - drawn, 0, 0}}, lots, "drawn, held and lapsed")
	require.Equal(t, 400-(spent-drawn), p.left("hot"))
}

// A carved budget belongs to the wallet's lots: its used units are drawn from them, past the end of a lot, too, and
// the rest of that lot lapses.
func TestCarver_FromAWallet(t *testing.T) {
	t.Parallel()
	p := newPurse(t, wallet.Config{})
	p.grant("ann", 10, 5*time.Minute)
	p.grant("ann", 20, 0)
	carver, err := leases.NewCarver(p.c.Budget)
	require.NoError(t, err)
	in := func(f func(tx pgx.Tx) error) { require.NoError(t, pgx.BeginFunc(t.Context(), p.pool, f)) }
	in(func(tx pgx.Tx) error {
		_, err := carver.Carve(t.Context(), tx, leases.Carving{Child: "ann/run", From: p.book.Charge("ann", 15), TTL: time.Hour})
		return err
	})
	require.Equal(t, [][3]int64{{0, 10, 0}, {0, 5, 0}}, p.lots("ann"))
	p.clock.Advance(10 * time.Minute)
	require.EqualValues(t, 15, p.left("ann"))
	in(func(tx pgx.Tx) error {
		_, err := p.c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "ann/run", Amount: 7, Limits: []budget.Limit{budget.Prepaid(0)}})
		return err
	})
	in(func(tx pgx.Tx) error {
		_, err := carver.End(t.Context(), tx, "ann/run", budget.Note{})
		return err
	})
	require.Equal(t, [][3]int64{{7, 0, 3}, {0, 0, 0}}, p.lots("ann"), "5 are free again")
	require.EqualValues(t, 20, p.left("ann"))
}
