package budget_test

import (
	"cmp"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// history drives a ledger and its models side by side.
type history struct {
	*rapid.T
	outer  *testing.T
	pool   *pgxpool.Pool
	conn   *pgxpool.Conn
	ledger *budget.Ledger
	clock  *pgtest.Clock
	now    time.Time
	models [2]*model
	quiet  bool // charges ask for no standings, mostly
	kinds  []budget.Limit
}

func (h *history) tx() pgx.Tx { return autocommit{Querier: h.conn} }

func (h *history) set(now time.Time) {
	h.now = now
	h.clock.Set(now)
}

func (h *history) micros(label string, lo, hi int) time.Duration {
	return time.Duration(rapid.IntRange(lo, hi).Draw(h.T, label)) * time.Microsecond
}

func (h *history) model() *model { return rapid.SampledFrom(h.models[:]).Draw(h.T, "scope") }

// bulk charges and refunds the first scope n times, time going by, in one round trip.
func (h *history) bulk(n int) {
	if n == 0 {
		return
	}
	m, batch := h.models[0], &pgx.Batch{}
	step := h.micros("step", 0, 3)
	refundEvery := rapid.IntRange(2, 20).Draw(h.T, "refund every")
	for i := range n {
		if m.kept == 1 && len(m.entries) > 0 && i%refundEvery == 0 {
			seq := int64(len(m.entries) - i*7%min(len(m.entries), 200))
			if _, err := m.refund(h.now, seq, 1); err == nil {
				batch.Queue(`select status from metered.refund($1, null, $2, 1, 1000, null, false)`, m.scope, seq)
			}
		} else {
			c := budget.Charge{Scope: m.scope, Amount: int64(i%5 + 1)}
			call, err := prepareCharges(h.ledger, c)
			require.NoError(h, err)
			batch.Queue(chargeSQL, chargeArgs(call)...)
			m.add(h.now, "charge", c.Amount, 0)
		}
		if step > 0 {
			h.now = h.now.Add(step)
			batch.Queue(`select setval('pgtest.clock', $1)`, h.now.UnixMicro())
		}
	}
	require.NoError(h, h.conn.SendBatch(h.outer.Context(), batch).Close())
	h.clock.Set(h.now)
}

func (h *history) advance() {
	before := h.usages()
	h.set(h.now.Add(h.micros("advance", 1, rapid.SampledFrom([]int{3, 30, 300, 3000}).Draw(h.T, "at most"))))
	for i, used := range h.usages() {
		if before[i] != unknown {
			require.LessOrEqual(h, used, before[i], "usage rises while nobody acts")
		}
	}
}

func (h *history) stepBack() {
	h.set(h.now.Add(-h.micros("step back", 1, rapid.SampledFrom([]int{5, 25, 60, 500}).Draw(h.T, "at most"))))
}

func (h *history) charge() {
	ctx := h.outer.Context()
	var charges []budget.Charge
	for _, m := range h.models[:rapid.IntRange(1, 2).Draw(h.T, "scopes")] {
		c := budget.Charge{Scope: m.scope, Amount: int64(rapid.IntRange(1, 9).Draw(h.T, "amount"))}
		for range rapid.IntRange(0, 3).Draw(h.T, "limits") {
			c.Limits = append(c.Limits, h.limit(m))
		}
		c.NoStandings = h.quiet && rapid.IntRange(0, 7).Draw(h.T, "asks for standings") > 0
		charges = append(charges, c)
	}
	want := budget.Receipt{}
	var refusals []budget.Refusal
	var wantErr error
	for i, c := range charges {
		standings, refused, err := h.models[i].judge(h.now, c)
		want.Entries = append(want.Entries, budget.Posted{Scope: c.Scope, Amount: c.Amount, Standings: standings})
		refusals = append(refusals, refused...)
		if wantErr = err; err != nil {
			break
		}
	}
	looked, checkErr := h.ledger.Check(ctx, h.conn, charges...)
	got, err := h.ledger.Charge(ctx, h.tx(), charges...)
	if wantErr != nil {
		require.ErrorIs(h, checkErr, wantErr)
		if wantErr == budget.ErrWindowPurged && !slices.ContainsFunc(charges, func(c budget.Charge) bool { return !c.NoStandings }) && err != wantErr {
			h.decidedByABound(charges, got, err)
			return
		}
		require.ErrorIs(h, err, wantErr)
		return
	}
	if len(refusals) > 0 {
		var exceeded *budget.ExceededError
		require.ErrorAs(h, checkErr, &exceeded)
		require.Equal(h, refusals, exceeded.Refusals)
		require.ErrorAs(h, err, &exceeded)
		require.Equal(h, refusals, exceeded.Refusals)
		h.retry(refusals)
		return
	}
	require.NoError(h, checkErr)
	require.Equal(h, want, looked)
	require.NoError(h, err)
	for i, c := range charges {
		want.Entries[i].At = h.models[i].add(h.now, "charge", c.Amount, 0)
		want.Entries[i].Seq = h.models[i].seq()
		if c.NoStandings {
			want.Entries[i].Standings = nil
		}
		require.True(h, want.Entries[i].At.Equal(got.Entries[i].At), "%v, want %v", got.Entries[i].At, want.Entries[i].At)
		got.Entries[i].At = want.Entries[i].At
	}
	require.Equal(h, want, got)
}

// chargeUpTo charges the scopes the same amount: by the model the largest that no limit refuses.
func (h *history) chargeUpTo() {
	asked := int64(rapid.IntRange(1, 30).Draw(h.T, "up to"))
	var charges []budget.Charge
	for _, m := range h.models[:rapid.IntRange(1, 2).Draw(h.T, "scopes")] {
		c := budget.Charge{Scope: m.scope, Amount: asked, NoStandings: h.quiet}
		for range rapid.IntRange(1, 3).Draw(h.T, "limits") {
			c.Limits = append(c.Limits, h.limit(m))
		}
		charges = append(charges, c)
	}
	var want budget.Receipt
	var refusals []budget.Refusal
	var wantErr error
	for amount := asked; amount > 0; amount-- {
		want, refusals = budget.Receipt{}, nil
		for i, c := range charges {
			c.Amount = amount
			standings, refused, err := h.models[i].judge(h.now, c)
			wantErr = cmp.Or(wantErr, err)
			want.Entries = append(want.Entries, budget.Posted{Scope: c.Scope, Amount: amount, Standings: standings})
			refusals = append(refusals, refused...)
		}
		if wantErr != nil || len(refusals) == 0 {
			break
		}
	}
	if wantErr == budget.ErrWindowPurged {
		for i := range charges { // no bound decides then
			charges[i].NoStandings = false
		}
	}
	got, err := h.ledger.Charge(h.outer.Context(), h.tx(), upTo(charges)...)
	if wantErr != nil {
		require.ErrorIs(h, err, wantErr)
		return
	}
	if len(refusals) > 0 {
		var exceeded *budget.ExceededError
		require.ErrorAs(h, err, &exceeded)
		for i := range refusals {
			refusals[i].Requested = asked
		}
		require.Equal(h, refusals, exceeded.Refusals)
		for i := range refusals {
			refusals[i].Requested = 1
		}
		h.retry(refusals)
		return
	}
	require.NoError(h, err)
	for i, e := range want.Entries {
		at := h.models[i].add(h.now, "charge", e.Amount, 0)
		require.True(h, at.Equal(got.Entries[i].At), "%v, want %v", got.Entries[i].At, at)
		want.Entries[i].At, want.Entries[i].Seq = got.Entries[i].At, h.models[i].seq()
		if charges[i].NoStandings {
			want.Entries[i].Standings = nil
		}
	}
	require.Equal(h, want, got)
}

// decidedByABound is for charges with a window that reaches purged entries. The model still has these
// entries: a charge that was let in fits, and a charge that was refused does not.
func (h *history) decidedByABound(charges []budget.Charge, got budget.Receipt, err error) {
	fits := true
	for i, c := range charges {
		for _, limit := range c.Limits {
			fits = fits && (limit.Observe || h.models[i].trulyUsed(h.now, limit)+c.Amount <= limit.Max)
		}
	}
	switch {
	case err == nil:
		require.True(h, fits, "a bound lets in a charge that the purged entries refuse")
		for i, c := range charges {
			h.models[i].add(h.now, "charge", c.Amount, 0)
			require.Equal(h, h.models[i].seq(), got.Entries[i].Seq)
		}
	case errors.Is(err, budget.ErrExceeded):
		require.False(h, fits, "a bound refuses")
	default:
		require.ErrorIs(h, err, budget.ErrWindowPurged)
	}
}

// limit is a limit that is mostly near to the units used.
func (h *history) limit(m *model) budget.Limit {
	limit := rapid.SampledFrom(h.kinds).Draw(h.T, "kind of limit")
	used, _ := m.used(h.now, limit)
	limit.Max = max(0, used+int64(rapid.IntRange(-20, 12).Draw(h.T, "room")))
	limit.Observe = rapid.IntRange(0, 7).Draw(h.T, "is tried") == 7
	return limit
}

// retry waits as long as each refusal says: then it fits, and not a microsecond before.
func (h *history) retry(refusals []budget.Refusal) {
	for _, r := range refusals {
		if r.RetryAfter == budget.Never {
			continue
		}
		again := budget.Charge{Scope: r.Scope, Amount: r.Requested, Limits: []budget.Limit{r.Limit}}
		h.clock.Set(h.now.Add(r.RetryAfter - time.Microsecond))
		_, err := h.ledger.Check(h.outer.Context(), h.conn, again)
		require.ErrorIs(h, err, budget.ErrExceeded)
		h.clock.Set(h.now.Add(r.RetryAfter))
		_, err = h.ledger.Check(h.outer.Context(), h.conn, again)
		require.NoError(h, err)
	}
	h.clock.Set(h.now)
}

func (h *history) credit() {
	m := h.model()
	amount := int64(rapid.IntRange(1, 20).Draw(h.T, "credit"))
	got, err := h.ledger.Credit(h.outer.Context(), h.tx(), budget.Credit{Scope: m.scope, Amount: amount})
	require.NoError(h, err)
	at := m.add(h.now, "credit", amount, 0)
	require.Equal(h, m.seq(), got.Seq)
	require.True(h, at.Equal(got.At))
}

func (h *history) refund() {
	m := h.model()
	seq := int64(rapid.IntRange(1, len(m.entries)+2).Draw(h.T, "refunded entry"))
	amount := int64(rapid.IntRange(1, 5).Draw(h.T, "refund"))
	remaining, wantErr := m.refund(h.now, seq, amount)
	got, err := h.ledger.Refund(h.outer.Context(), h.tx(), budget.Refund{Scope: m.scope, Seq: seq, Amount: amount})
	if wantErr == nil {
		require.NoError(h, err)
		require.Equal(h, m.seq(), got.Seq)
		return
	}
	require.ErrorIs(h, err, wantErr)
	if wantErr == budget.ErrRefundExceeds {
		var exceeds *budget.RefundExceedsError
		require.ErrorAs(h, err, &exceeds)
		require.Equal(h, budget.RefundExceedsError{Requested: amount, Remaining: remaining}, *exceeds)
	}
}

func (h *history) purge() {
	m := h.model()
	age := rapid.SampledFrom(historyWindows[1:]).Draw(h.T, "older than")
	batch := rapid.SampledFrom([]int{16, 17, 31, 32, 100}).Draw(h.T, "batch")
	opts := budget.PurgeOptions{Scope: m.scope, OlderThan: age, Batch: batch, DryRun: true}
	dry, err := h.ledger.Purge(h.outer.Context(), h.pool, opts)
	require.NoError(h, err)
	opts.DryRun = false
	report, err := h.ledger.Purge(h.outer.Context(), h.pool, opts)
	require.NoError(h, err)
	require.Equal(h, dry.Entries, report.Entries)
	require.Equal(h, m.purge(h.now.Add(-age)), report.Entries)
}

func (h *history) repair() {
	m := h.model()
	got, err := h.ledger.RepairClock(h.outer.Context(), h.tx(), m.scope, budget.Note{})
	require.NoError(h, err)
	ahead := m.repair(h.now)
	require.Equal(h, ahead, got.Ahead)
	require.Equal(h, ahead > 0, got.Repaired)
}
