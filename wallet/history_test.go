package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/wallet"
)

// TestMain sets how many random histories are tried. The short form finds a refund that goes to another lot.
func TestMain(m *testing.M) {
	pgtest.Histories(40, 300)
	os.Exit(m.Run())
}

// Random histories of a wallet agree with the model in every answer, and in the units of each lot after it, at three
// isolation levels, with steps of the clock in both directions and transactions that are rolled back. At the end every
// unit of every lot was drawn, has lapsed, was revoked, went on, or is there.
func TestWallets_AgreeWithTheModel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUp(t, wallet.Config{})
	rapid.Check(t, func(rt *rapid.T) { newHistory(rt, f).run() })
	t.Log(seenActs.String())
	if pgtest.Size(0, 1) == 0 {
		return
	}
	for _, kind := range []string{"draw", "grant", "reserve", "refund", "lapsed", "refused", "carve", "end a child", "repaired"} { // every long run has these
		require.Positive(t, seenActs.count(kind), "no history had it: %s", kind)
	}
}

// The same where each call leaves all but one of the lots that have ended to the calls after it: in every answer, and
// in the units of each lot at the end.
func TestWallets_AgreeWithTheModelDespiteABacklog(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	f := setUp(t, wallet.Config{})
	f.endsPerCall(1)
	rapid.Check(t, func(rt *rapid.T) {
		h := newHistory(rt, f)
		h.lags = true
		h.run()
	})
}

// The same where nobody sweeps before the end: what is due happens when it is due, and not when it is written.
func TestWallets_AgreeWithTheModelUnswept(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	f := setUp(t, wallet.Config{})
	rapid.Check(t, func(rt *rapid.T) {
		h := newHistory(rt, f)
		h.unswept = true
		h.run()
	})
}

var historySerial atomic.Int64

// history drives a wallet and its model side by side. Each has a scope of its own.
type history struct {
	*rapid.T
	f       *fixture
	book    *wallet.Book
	level   pgx.TxIsoLevel
	scope   string
	name    string // of the act
	now     time.Time
	m       *model
	nos     []int64 // the numbers of the model's lots
	lags    bool    // lots that have ended may not be written
	unswept bool
	ids     int
	lates   time.Duration
	told    int64 // lapsed units that subscribers got, unless that was rolled back
	least   int64 // how far below zero it may be: captures can allow more than the overdraft
}

func newHistory(rt *rapid.T, f *fixture) *history {
	cfg := wallet.Config{
		Overdraft:   rapid.SampledFrom([]int64{0, 5, 20}).Draw(rt, "overdraft"),
		Priorities:  map[string]int{"paid": 10, "promotional": 5},
		LateRefunds: rapid.SampledFrom([]time.Duration{wallet.Lapse, wallet.Forever, 20 * time.Second}).Draw(rt, "late refunds"),
	}
	h := &history{T: rt, f: f, now: noon, scope: fmt.Sprint("wallet ", historySerial.Add(1)), m: &model{overdraft: cfg.Overdraft, owed: map[string]int64{}}}
	cfg.Subscribers = []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
		h.told += b.Amount
		return nil
	}}
	var err error
	h.book, err = wallet.New(f.ledger, cfg)
	require.NoError(rt, err)
	h.level = rapid.SampledFrom([]pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}).Draw(rt, "level")
	h.lates, h.least = cfg.LateRefunds, -cfg.Overdraft
	f.clock.Set(noon)
	return h
}

func (h *history) run() {
	acts := map[string]func(){"grant": h.grant, "draw": h.draw, "reserve": h.reserve, "capture": h.capture, "release": h.release,
		"extend": h.extend, "refund": h.refund, "credit": h.credit, "sweep": h.sweep, "revoke": h.revoke, "end renewals": h.endRenewals, "reinstate": h.reinstate, "resume renewals": h.resumeRenewals, "set an end": h.setEnd, "roll over": h.rollOver, "expire": h.expire, "advance": h.advance,
		"carve": h.carve, "end a child": h.endChild, "repair": h.repair, "step back": func() { h.set(h.now.Add(-h.seconds("back", 1, 5, 20))) }}
	names := []string{"grant", "grant", "grant", "draw", "draw", "draw", "draw", "reserve", "reserve", "reserve", "capture", "capture", "release", "extend",
		"refund", "refund", "refund", "refund", "refund", "refund", "credit", "end renewals", "reinstate", "reinstate", "resume renewals", "set an end", "set an end", "sweep", "revoke", "revoke", "roll over", "expire", "carve", "end a child",
		"advance", "advance", "advance", "advance", "step back", "repair"}
	swept := !h.unswept && rapid.Bool().Draw(h.T, "swept")
	if h.unswept {
		names = slices.DeleteFunc(names, func(name string) bool { return name == "sweep" || name == "expire" })
	}
	if h.lags { // a repair writes the ends that are left, and with them holds that are due
		names = slices.DeleteFunc(names, func(name string) bool { return name == "repair" })
	}
	for range rapid.IntRange(4, 40).Draw(h.T, "length") {
		h.name = rapid.SampledFrom(names).Draw(h.T, "act")
		acts[h.name]()
		h.check()
		if swept {
			h.sweep()
			h.expire()
			h.check()
		}
	}
	h.checkRead()
	h.set(mLater(h.now, h.m.last).Add(time.Hour))
	h.sweep()
	h.check()
	h.checkAnnounced()
	for _, l := range h.m.lots {
		if l.lapsed > 0 {
			seenActs.add("lapsed")
		}
		if l.rolled > 0 && l.grant.Roll != nil {
			seenActs.add("rolled")
		}
	}
	if !pgtest.Long {
		return // the fixture verifies all scopes at its end
	}
	report, err := h.f.ledger.Verify(h.Context(), h.f.pool, budget.VerifyOptions{Scope: h.scope})
	require.NoError(h.T, err)
	require.Empty(h.T, report.Differences)
}

// try makes one call in a transaction of its own, and sometimes rolls it back. If the call was let in, want changes the
// model.
func try[R any](h *history, call func(ctx context.Context, tx pgx.Tx) (R, error), want func(*model) error) (r R, err error) {
	after := h.m.clone()
	wantErr := want(after)
	told := h.told
	rollBack := errors.New("rolled back")
	undo := rapid.IntRange(1, 8).Draw(h.T, "roll back") == 8
	var txErr error
	for again := true; again; {
		txErr = pgx.BeginTxFunc(h.Context(), h.f.pool, pgx.TxOptions{IsoLevel: h.level}, func(tx pgx.Tx) error {
			r, err = call(h.Context(), tx)
			if undo || sqlstate.Behind(err) != "" {
				return rollBack
			}
			return nil
		})
		scope := sqlstate.Behind(err)
		again = scope != "" // more is due than a call writes: go through it in steps, as RunTx does
		for more := again; more; {
			h.told = told
			require.NoError(h.T, h.f.pool.QueryRow(h.Context(), "select metered.catch_up($1, 60000)", scope).Scan(&more))
		}
	}
	if wantErr != nil {
		require.ErrorIs(h.T, err, wantErr, h.name)
		seenActs.add("refused")
	} else {
		require.NoError(h.T, err, h.name)
		seenActs.add(h.name)
	}
	if undo {
		h.told = told
		require.ErrorIs(h.T, txErr, rollBack)
		if wantErr == nil {
			return r, rollBack
		}
		return r, err
	}
	require.NoError(h.T, txErr)
	// A call that names a lot writes what is due before it knows that there is none.
	if wantErr == nil || errors.Is(wantErr, wallet.ErrUnknownLot) || errors.Is(wantErr, wallet.ErrExpired) {
		h.m = after
		h.number()
		h.numberDraws()
	}
	return r, err
}

// number finds the numbers of the lots, in the order in which they came. Numbers are no order: where one call writes that
// units of a lot went on twice, the last lot's number is not set aside before others are given.
func (h *history) number() {
	rows, err := h.f.pool.Query(h.Context(), `select no from metered.lot_rows where scope = $1 order by age[3], age[1]`, h.scope)
	require.NoError(h.T, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(h.T, err)
	require.Len(h.T, all, len(h.m.lots))
	h.nos = make([]int64, len(all))
	for n, i := range h.m.inTurn() {
		h.nos[i] = all[n]
	}
}

// numberDraws finds the entries of draws and of captures: each has one, in the order in which they were made.
func (h *history) numberDraws() {
	rows, err := h.f.pool.Query(h.Context(), `select seq from metered.ledger where scope = $1 and kind in ('c', 'u') order by seq`, h.scope)
	require.NoError(h.T, err)
	seqs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(h.T, err)
	require.Len(h.T, seqs, len(h.m.draws), h.name)
	for i, seq := range seqs {
		h.m.draws[i].seq = seq
	}
}

// kept is where a lot is, as the database has it.
type kept struct {
	Amount, Rest, Drawn, Held, Lapsed, Revoked, Rolled, Pending int64
	Ends                                                        time.Time
}

// check compares each lot, and the balance.
func (h *history) check() {
	rows, err := h.f.pool.Query(h.Context(),
		`select amount, rest + case when (plan).uses is null then 0 else kept end, drawn, held, lapsed, revoked, rolled, pending, coalesce(nullif(expires_at, 'infinity'), '0001-01-01 00:00:00+00') from metered.lots where scope = $1 order by age[3], age[1]`, h.scope)
	require.NoError(h.T, err)
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[kept])
	require.NoError(h.T, err)
	for i := range got {
		got[i].Ends = got[i].Ends.UTC()
	}
	want := []kept{}
	for _, i := range h.m.inTurn() {
		l := h.m.lots[i]
		want = append(want, kept{l.amount, l.rest(), l.drawn, l.kept, l.lapsed, l.revoked, l.rolled, l.pending, l.ends})
	}
	if !h.lags {
		require.Equal(h.T, want, got, "%s", h.name)
	}
	h.checkBalance()
}

// shelf names lots that a balance cannot separate until the end of one is written: they share all of this.
type shelf struct {
	category string
	priority int
	ends     time.Time
	uses     string
}

func (h *history) checkBalance() {
	b, err := h.book.Balance(h.Context(), h.f.pool, h.scope)
	require.NoError(h.T, err)
	m := h.m.settled(h.now)
	require.Equal(h.T, m.units(), b.Units, "%s: units", h.name)
	require.Equal(h.T, m.held(), b.Held, "%s: held", h.name)
	require.Equal(h.T, max(0, -m.units()), b.Overdrawn, "%s: overdrawn", h.name)
	require.GreaterOrEqual(h.T, b.Units, h.least, "%s: below the overdraft", h.name)
	want, got, sum := map[shelf]int64{}, map[shelf]int64{}, int64(0)
	for i := range m.lots {
		if l := &m.lots[i]; l.rest() > 0 {
			want[shelf{l.category, l.priority, l.ends, fmt.Sprint(mSorted(l.uses))}] += l.rest()
		}
	}
	for _, l := range b.Lots {
		if l.Units > 0 {
			got[shelf{l.Category, l.Priority, l.Expires, fmt.Sprint(l.Uses)}] += l.Units
			if l.Uses == nil {
				sum += l.Units
			}
		}
	}
	require.Equal(h.T, want, got, "%s: units of the lots", h.name)
	if m.opened {
		require.Equal(h.T, max(0, b.Units), sum, "%s: lots add up to the balance", h.name)
	}
	for _, use := range []string{"images", "tokens", "mail"} {
		require.Equal(h.T, m.unitsFor(use), b.For(use), "%s: for %s", h.name, use)
	}
	require.True(h.T, slices.IsSortedFunc(b.Lots, func(x, y wallet.Lot) int { return x.Priority - y.Priority }), h.name)
}

// mSorted are uses in their order.
func mSorted(uses []string) []string {
	uses = slices.Clone(uses)
	slices.Sort(uses)
	return uses
}

// checkRead draws as many units as a read reports, with the overdraft, and finds that one more is refused.
func (h *history) checkRead() {
	for _, use := range []string{"", "images", "tokens"} {
		h.checkReadFor(use)
	}
}

func (h *history) checkReadFor(use string) {
	b, err := h.book.Balance(h.Context(), h.f.pool, h.scope)
	require.NoError(h.T, err)
	all := h.m.settled(h.now).available(use)
	charge := h.book.Charge(h.scope, max(0, all)+1)
	charge.Note.Use = use
	_, err = h.f.ledger.Check(h.Context(), h.f.pool, charge)
	exceeded := (*budget.ExceededError)(nil)
	require.ErrorAs(h.T, err, &exceeded)
	require.Equal(h.T, max(0, all), exceeded.Refusals[0].Available)
	if all <= 0 {
		return
	}
	tx, err := h.f.pool.Begin(h.Context())
	require.NoError(h.T, err)
	d, err := drawIn(h.Context(), tx, h.f.ledger, h.book, toDraw{Wallet: h.scope, Amount: all, Note: budget.Note{Use: use}})
	require.NoError(h.T, err)
	require.Equal(h.T, max(0, h.m.overdraft+min(0, b.Units)), d.Overdrawn)
	require.NoError(h.T, tx.Rollback(h.Context()))
}

// checkAnnounced has a sweep announce the lapses that no sweep has announced yet: then each was announced once.
func (h *history) checkAnnounced() {
	for range 2 { // the second has nothing to announce
		tx, err := h.f.pool.Begin(h.Context())
		require.NoError(h.T, err)
		_, err = h.book.Expire(h.Context(), tx, h.scope)
		require.NoError(h.T, err)
		require.NoError(h.T, tx.Commit(h.Context()))
	}
	h.m.expire(h.now)
	h.lags = false
	require.Equal(h.T, pgxValue[int64](h, "select coalesce(sum(amount), 0)::bigint from metered.lot_moves where kind = 'e' and scope = '"+h.scope+"'"), h.told)
	h.check()
}

func (h *history) set(to time.Time) {
	h.now = to
	h.f.clock.Set(to)
}

func (h *history) seconds(label string, of ...int) time.Duration {
	return time.Duration(rapid.SampledFrom(of).Draw(h.T, label)) * time.Second
}
