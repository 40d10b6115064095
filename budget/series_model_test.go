package budget_test

import (
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
)

// between is the usage from a time on until before another.
func (m *model) between(from, to time.Time) budget.RangeUsage {
	u := budget.RangeUsage{From: from, To: to}
	counted := m.counted()
	in := func(i int) bool { return !counted[i].Before(from) && counted[i].Before(to) }
	for i, e := range m.entries {
		if e.kind == "refund" && in(e.ref-1) {
			u.RefundedOfCharged += e.amount
		}
		if !in(i) {
			continue
		}
		switch e.kind {
		case "charge":
			u.Charged += e.amount
			u.Charges++
		case "credit":
			u.Credited += e.amount
		case "refund":
			u.RefundsMade += e.amount
		}
	}
	return u
}

// knows reports whether a purge left the entries with the sums before a time.
func (m *model) knows(t time.Time) bool {
	repaired := false
	for _, e := range m.entries {
		repaired = repaired || e.kind == "clock repair"
	}
	return m.kept == 1 || m.counted()[m.kept-1].Before(t) || !repaired && !m.entries[0].at.Before(t)
}

// sequence are the numbers of the entries of a range.
func (m *model) sequence(from, to time.Time) (all []int64) {
	for i, at := range m.counted() {
		if kept := i == 0 || i+1 >= m.kept; kept && !at.Before(from) && at.Before(to) {
			all = append(all, int64(i+1))
		}
	}
	return all
}

// compareSeries asks for random ranges of time, mostly such that begin or end at an entry.
func (h *history) compareSeries() {
	ctx := h.outer.Context()
	m := h.model()
	edge := func(name string) time.Time {
		t := h.now
		if n := len(m.entries); n > 0 {
			t = m.entries[rapid.IntRange(0, n-1).Draw(h.T, name)].at
		}
		return t.Add(h.micros(name+" beside", -3, 3))
	}
	from, to := edge("from"), edge("to")
	if !from.Before(to) {
		from, to = to, from.Add(time.Microsecond)
	}
	// Nanoseconds make no difference.
	within := func(t time.Time) time.Time { return t.Add(-time.Duration(rapid.IntRange(0, 999).Draw(h.T, "ns"))) }
	least := to.Sub(from)/50 + time.Microsecond
	bucket := (least + h.micros("bucket", 0, 30)).Truncate(time.Microsecond)
	known := true
	var want []budget.RangeUsage
	for at := from; at.Before(to); at = at.Add(bucket) {
		next := at.Add(bucket)
		if to.Before(next) {
			next = to
		}
		known = known && m.knows(at) && m.knows(next)
		want = append(want, m.between(at, next))
	}
	got, err := h.ledger.Series(ctx, h.conn, m.scope, within(from), within(to), budget.Unit(bucket.String()), nil)
	h.requireKnown(m, known, err)
	if known {
		require.Equal(h, want, got)
	}
	if rapid.IntRange(0, 3).Draw(h.T, "whole") > 0 {
		return
	}
	known = m.knows(from) && m.knows(to)
	whole, err := h.ledger.UsageBetween(ctx, h.conn, m.scope, from, to)
	h.requireKnown(m, known, err)
	if known {
		require.Equal(h, m.between(from, to), whole)
	}
	var seqs []int64
	for e, entriesErr := range h.ledger.Entries(ctx, h.conn, m.scope, budget.EntriesOptions{From: from, To: to}) {
		if err = entriesErr; err == nil {
			seqs = append(seqs, e.Seq)
		}
	}
	h.requireKnown(m, known, err)
	if known {
		require.Equal(h, m.sequence(from, to), seqs)
	}
}

// requireKnown wants the error of purged entries, which names the time from which there are answers.
func (h *history) requireKnown(m *model, known bool, err error) {
	if known {
		require.NoError(h, err)
		return
	}
	var purged *budget.PurgedError
	require.ErrorAs(h, err, &purged)
	since := m.counted()[m.kept-1].Add(time.Microsecond)
	require.Equal(h, m.scope, purged.Scope)
	require.True(h, since.Equal(purged.KnownFrom), "%v, want %v", purged.KnownFrom, since)
	_, err = h.ledger.UsageBetween(h.outer.Context(), h.conn, m.scope, since, later(since, h.now).Add(time.Hour))
	require.NoError(h, err)
	_, err = h.ledger.UsageBetween(h.outer.Context(), h.conn, m.scope, since.Add(-time.Microsecond), later(since, h.now).Add(time.Hour))
	require.ErrorIs(h, err, budget.ErrWindowPurged)
}
