package leases_test

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

func (h *history) level() pgx.TxIsoLevel { return rapid.SampledFrom(levels).Draw(h.T, "level") }

func (h *history) amount() int64 { return int64(rapid.IntRange(1, 15).Draw(h.T, "amount")) }

func (h *history) in(f func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(h.Context(), h.db, pgx.TxOptions{IsoLevel: h.level()}, f)
}

// used takes note of a use that was let in, and that it fits: by the time of use, in each window.
func (h *history) used(u *use) {
	h.uses = append(h.uses, u)
	at := later(h.now, h.last)
	for _, l := range h.limits {
		sum := int64(0)
		for _, x := range h.uses {
			if l.Window <= 0 || x.at.After(at.Add(-l.Window)) {
				sum += x.amount
			}
		}
		if l.Window <= 0 {
			sum -= h.credited
		}
		require.LessOrEqual(h.T, sum, l.Max, "in %v", l.Window)
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (h *history) entered(at time.Time) time.Time {
	at = at.UTC()
	h.last = later(h.last, at)
	return at
}

func (h *history) refusedOr(err error) bool {
	if errors.Is(err, budget.ErrExceeded) {
		return true
	}
	require.NoError(h.T, err)
	return false
}

func (h *history) charge() {
	var r budget.Receipt
	c := budget.Charge{Scope: h.scope, Amount: h.amount(), Limits: h.limits}
	if h.refusedOr(h.in(func(tx pgx.Tx) (err error) { r, err = h.ledger.Charge(h.Context(), tx, c); return err })) {
		return
	}
	at := h.entered(r.Entries[0].At)
	h.used(&use{amount: c.Amount, at: at, counted: at, seq: r.Entries[0].Seq})
}

func (h *history) sent(c budget.Charge) string {
	call, err := prepareCharges(h.ledger, c)
	require.NoError(h.T, err)
	return ledger.Charges(call.Charges)
}

func (h *history) open() {
	mode := rapid.SampledFrom([]string{"rows", "rows", "memory"}).Draw(h.T, "mode")
	terms := ledger.LeaseTerms{Mode: mode, Owner: owner, Least: 1, Share: rapid.IntRange(1, 3).Draw(h.T, "share"), TTL: h.duration("ttl", 10_000)}
	l := &modelLease{mode: mode}
	var no, fence *int64
	require.NoError(h.T, h.in(func(tx pgx.Tx) error {
		return tx.QueryRow(h.Context(), `select o.no, o.fence, o.granted
			from metered.open_lease(($1::metered.new_charge[])[1], $2::metered.lease_terms, '1 min', 5000) o`,
			h.sent(budget.Charge{Scope: h.scope, Amount: 2 * h.amount(), Limits: h.limits}), terms.String()).Scan(&no, &fence, &l.granted)
	}))
	if no == nil {
		return
	}
	h.entered(pgtest.Value[time.Time](h.fixture, h.db, `select at from metered.ledger where scope = $1 order by seq desc limit 1`, h.scope))
	l.no, l.fence, l.ends = *no, *fence, h.now.Add(terms.TTL)
	h.leases = append(h.leases, l)
}

func (h *history) duration(what string, most int) time.Duration {
	return time.Duration(rapid.IntRange(1, most).Draw(h.T, what)) * time.Millisecond
}

func (h *history) lease(mode string) *modelLease {
	var of []*modelLease
	for _, l := range h.leases {
		if mode == "" || l.mode == mode {
			of = append(of, l)
		}
	}
	if len(of) == 0 {
		return nil
	}
	return rapid.SampledFrom(of).Draw(h.T, "lease")
}

// spend spends from a lease, in a transaction that is rolled back now and then.
func (h *history) spend() { h.spendWith(nil) }

// both spends from a lease and charges the ledger with one call, all or none.
func (h *history) both() {
	h.spendWith(&budget.Charge{Scope: h.scope, Amount: h.amount(), Limits: h.limits})
}

func (h *history) spendWith(direct *budget.Charge) {
	l := h.lease("rows")
	if l == nil {
		return
	}
	amount := min(int64(rapid.IntRange(1, 5).Draw(h.T, "spend")), l.granted-l.next)
	if amount < 1 {
		return
	}
	undone := rapid.IntRange(0, 5).Draw(h.T, "undone") == 0
	sent := []ledger.Charge{{Scope: h.scope, Amount: amount, Lease: &ledger.Slice{No: l.no, Fence: l.fence, Offset: l.next}}}
	if direct != nil {
		call, err := prepareCharges(h.ledger, *direct)
		require.NoError(h.T, err)
		sent = append(sent, call.Charges[0])
	}
	var a ledger.Answer
	err := h.in(func(tx pgx.Tx) error {
		err := tx.QueryRow(h.Context(), `select seqs, ats, refused from metered.charge_leased($1::metered.new_charge[], '1 min', 5000, null, 'answer', true)`,
			ledger.Charges(sent)).Scan(&a.Seqs, &a.Ats, &a.Refused)
		if err == nil && undone {
			return errUndone
		}
		return err
	})
	if l.next += amount; errors.Is(err, errUndone) {
		return
	}
	require.NoError(h.T, err)
	if direct == nil {
		require.Equal(h.T, !h.now.Before(l.ends), a.Refused != nil, "%s", a.Refused)
	}
	if a.Refused != nil {
		l.next -= amount
		return
	}
	l.spent += amount
	h.rows++
	h.used(&use{amount: amount, at: later(h.now, h.last), lease: l.no})
	if direct != nil {
		at := h.entered(a.Ats[1])
		h.used(&use{amount: direct.Amount, at: at, counted: at, seq: a.Seqs[1]})
	}
}

// settle ends a lease, by its owner, or by a stranger, which works only after the lease's end.
func (h *history) settle() {
	l := h.lease("")
	if l == nil {
		return
	}
	who := rapid.SampledFrom([]string{owner, owner, "stranger"}).Draw(h.T, "who")
	var told *int64
	captured := l.spent
	if l.mode == "memory" {
		if captured = l.granted; who == owner && rapid.Bool().Draw(h.T, "tells") {
			captured = int64(rapid.IntRange(0, int(l.granted)).Draw(h.T, "reported"))
			told = &captured
		}
	}
	var status string
	var spent *int64
	require.NoError(h.T, h.db.QueryRow(h.Context(), `select status, spent from metered.settle_lease($1, $2, $3, 5000, null, null)`, l.no, who, told).Scan(&status, &spent))
	if who != owner && h.now.Before(l.ends) {
		require.Equal(h.T, "early", status)
		return
	}
	require.Equal(h.T, "settled", status)
	require.Equal(h.T, captured, *spent)
	var at time.Time
	var first int64
	require.NoError(h.T, h.db.QueryRow(h.Context(), `select settled_at, (select min(e.seq) from metered.ledger e where e.scope = l.scope and e.seq > l.opened_seq and e.hold = 'lease/' || l.no)
		from metered.leases l where no = $1`, l.no).Scan(&at, &first))
	at = h.entered(at)
	for _, u := range h.uses {
		if u.lease == l.no {
			require.False(h.T, at.Before(u.at), "settled before it was spent")
			u.counted, u.seq = at, first
		}
	}
	if l.mode == "memory" && captured > 0 {
		h.used(&use{amount: captured, at: at, counted: at, seq: first})
	}
	h.leases = slices.DeleteFunc(h.leases, func(x *modelLease) bool { return x == l })
}

func (h *history) place() {
	h.serial++
	id, amount := fmt.Sprint(h.scope, "/", h.serial), h.amount()
	if h.refusedOr(h.in(func(tx pgx.Tx) error {
		_, err := h.book.Place(h.Context(), tx, holds.Placement{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: h.scope, Amount: amount, Limits: h.limits}}})
		return err
	})) {
		return
	}
	h.holds[id] = amount
	h.entered(later(h.now, h.last))
}

func (h *history) endHold() {
	if len(h.holds) == 0 {
		return
	}
	ids := []string{}
	for id := range h.holds {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	id := rapid.SampledFrom(ids).Draw(h.T, "hold")
	captures := rapid.Bool().Draw(h.T, "captures")
	require.NoError(h.T, h.in(func(tx pgx.Tx) (err error) {
		if captures {
			_, err = h.book.Capture(h.Context(), tx, holds.Capture{IDs: []string{id}, All: true})
		} else {
			_, err = h.book.Release(h.Context(), tx, holds.Release{IDs: []string{id}})
		}
		return err
	}))
	at := h.entered(later(h.now, h.last))
	if captures {
		h.used(&use{amount: h.holds[id], at: at, counted: at, seq: pgtest.Value[int64](h.fixture, h.db, `select max(seq) from metered.ledger where scope = $1 and kind = 'u'`, h.scope)})
	}
	delete(h.holds, id)
}

// refund takes back part of an entry. A lease's newest spends are taken back first.
func (h *history) refund() {
	var of []*use
	for _, u := range h.uses {
		if u.seq > 0 && u.amount > 0 {
			of = append(of, u)
		}
	}
	if len(of) == 0 {
		return
	}
	u := rapid.SampledFrom(of).Draw(h.T, "refunded")
	amount := int64(rapid.IntRange(1, int(u.amount)).Draw(h.T, "refund"))
	err := h.in(func(tx pgx.Tx) error {
		_, err := h.ledger.Refund(h.Context(), tx, budget.Refund{Scope: h.scope, Seq: u.seq, Amount: amount})
		return err
	})
	if errors.Is(err, budget.ErrEntryPurged) {
		u.seq = 0
		return
	}
	require.NoError(h.T, err)
	h.entered(later(h.now, h.last))
	h.refunded += amount
	for _, x := range slices.Backward(h.uses) {
		if x.seq == u.seq {
			less := min(amount, x.amount)
			x.amount, amount = x.amount-less, amount-less
		}
	}
	require.Zero(h.T, amount)
}

func (h *history) credit() {
	amount := h.amount()
	require.NoError(h.T, h.in(func(tx pgx.Tx) error {
		_, err := h.ledger.Credit(h.Context(), tx, budget.Credit{Scope: h.scope, Amount: amount})
		return err
	}))
	h.entered(later(h.now, h.last))
	h.credited += amount
}

func (h *history) advance() { h.set(h.now.Add(h.duration("advance", 8000))) }

func (h *history) stepBack() { h.set(h.now.Add(-h.duration("back", 4000))) }

func (h *history) set(now time.Time) {
	h.now = now
	h.clock.Set(now)
}

func (h *history) repair() {
	var done budget.ClockState
	require.NoError(h.T, h.in(func(tx pgx.Tx) (err error) {
		done, err = h.ledger.RepairClock(h.Context(), tx, h.scope, budget.Note{})
		return err
	}))
	if !done.Repaired {
		return
	}
	h.last = h.now
	for _, u := range h.uses {
		if u.at.After(h.now) {
			u.at = h.now
		}
		if !u.counted.IsZero() && u.counted.After(h.now) {
			u.counted = h.now
		}
	}
}

func (h *history) purge() {
	_, err := h.ledger.Purge(h.Context(), h.db, budget.PurgeOptions{Scope: h.scope, OlderThan: 20 * time.Second, Batch: 16})
	require.NoError(h.T, err)
	opts := purge.Options{OlderThan: h.duration("purge", 10_000) + time.Second, Batch: rapid.IntRange(1, 5).Draw(h.T, "batch"), DryRun: true}
	told, err := purge.Leases.Delete(h.Context(), h.db, opts)
	require.NoError(h.T, err)
	opts.DryRun = false
	deleted, err := purge.Leases.Delete(h.Context(), h.db, opts)
	require.NoError(h.T, err)
	require.Equal(h.T, told, deleted)
}
