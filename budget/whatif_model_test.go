package budget_test

import (
	"errors"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

// whatIf looks at each moment of a charge, and at the range's beginning.
func (m *model) whatIf(limit budget.Limit, from, to time.Time) budget.Trial {
	trial := budget.Trial{Scope: m.scope, Limit: limit}
	for i, at := range append([]time.Time{from.Add(-time.Microsecond)}, m.counted()...) {
		after := at.Add(time.Microsecond)                // the use before it has the charges of that moment
		if i > 0 && at.Before(from) || after.After(to) { // the last moment before the range may be of another period
			continue
		}
		since := after.Add(-limit.Window)
		if !limit.Period.IsZero() {
			if since = m.span(at, limit.Period).start; i == 0 {
				since = m.span(from, limit.Period).start
			}
		}
		used := m.between(since, after)
		trial.Used = max(trial.Used, used.Used())
		charged := m.between(at, after)
		if i > 0 && used.Used() > limit.Max && charged.Used() > 0 && (trial.RefusedAt.IsZero() || at.Before(trial.RefusedAt)) {
			trial.RefusedAt = at
		}
	}
	trial.Available = max(0, limit.Max-trial.Used)
	return trial
}

// periods is how many periods a range has a part of.
func (m *model) periods(p budget.Period, from, to time.Time) (n int) {
	for ; from.Before(to); n++ {
		from = m.span(from, p).end
	}
	return n
}

// compareWhatIf tries another plan on a part of the history.
func (h *history) compareWhatIf() {
	m := h.model()
	limit := rapid.SampledFrom(h.kinds).Draw(h.T, "other limit")
	if limit.Lifetime {
		return
	}
	limit.Max = rapid.Int64Range(0, 60).Draw(h.T, "other max")
	from, to := h.now.Add(-h.micros("since", 1, 400)), h.now.Add(h.micros("until", 1, 5))
	if len(m.entries) > 0 && rapid.Bool().Draw(h.T, "since an entry") {
		from = rapid.SampledFrom(m.counted()).Draw(h.T, "entry")
	}
	if !from.Before(to) {
		return
	}
	earliest := from.Add(-limit.Window)
	if !limit.Period.IsZero() {
		earliest = m.span(from, limit.Period).start
	}
	got, err := h.ledger.WhatIf(h.outer.Context(), h.conn, limit, from, to, m.scope)
	var purged *budget.PurgedError
	if errors.As(err, &purged) {
		require.True(h, m.kept > 1 && !m.counted()[m.kept-1].Before(earliest), "all entries are there")
		return
	}
	if !limit.Period.IsZero() && m.periods(limit.Period, from, to) > bounds.MaxBuckets {
		require.ErrorIs(h, err, budget.ErrArgument) // as it is documented: the clock stepped far, and a period has microseconds
		return
	}
	require.NoError(h, err)
	want := m.whatIf(limit, from, to)
	want.RefusedAt = want.RefusedAt.UTC()
	require.Equal(h, []budget.Trial{want}, got)
}
