package budget_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

func TestLimit_ConstructorsSayTheKind(t *testing.T) {
	t.Parallel()
	require.Equal(t, budget.Limit{Max: 9, Window: time.Hour}, budget.PerWindow(9, time.Hour))
	require.Equal(t, budget.Limit{Max: 9, Window: budget.Forever}, budget.Lifetime(9))
	require.Equal(t, budget.Limit{Max: 0, Window: budget.OfCredit}, budget.Prepaid())
	nine := budget.Lifetime(9)
	require.Equal(t, budget.Limit{Max: 9, Window: budget.Forever, Name: "stock"}, nine.Named("stock"))
	require.Empty(t, nine.Name, "Named returns another one")
	require.True(t, budget.Lifetime(9) == nine, "limits can be compared")
}

// "2 a minute" whose window was forgotten must not become "2 for life".
func TestCharge_ALimitWithoutAWindowSaysWhatToWriteInstead(t *testing.T) {
	t.Parallel()
	l := newLedger(t, budget.Config{})
	for _, limit := range []budget.Limit{{Max: 2}, {Max: 2, Name: "a minute"}, budget.PerWindow(2, 0)} {
		_, err := l.Charge(t.Context(), untouchable{t: t}, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{limit}})
		require.ErrorIs(t, err, budget.ErrArgument)
		require.EqualError(t, err, "budget: invalid argument: charges[0].Limits[0].Window: is missing: "+
			"write budget.PerWindow(2, window), or budget.Lifetime(2) for a limit over the scope's lifetime")
	}
}

func TestUsage_NoWindowAndForeverAreBothTheLifetime(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	mustCharge(t, pool, l, "a", 3, budget.Lifetime(5))
	clock.Advance(1000 * time.Hour)
	_, err := charge(t.Context(), pool, l, "a", 3, budget.Lifetime(5))
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Equal(t, int64(3), usage(t, pool, l, "a", 0).Used)
	require.Equal(t, int64(3), usage(t, pool, l, "a", budget.Forever).Used)
	require.Zero(t, usage(t, pool, l, "a", time.Hour).Used)
}

func TestLimit_AsJSONSaysItsKindAndComesBack(t *testing.T) {
	t.Parallel()
	for text, limit := range map[string]budget.Limit{
		`{"max":9,"window_us":60000000}`:                 budget.PerWindow(9, time.Minute),
		`{"name":"stock","max":9,"lifetime":true}`:       budget.Lifetime(9).Named("stock"),
		`{"max":0,"lifetime":true,"of_credit":true}`:     budget.Prepaid(),
		`{"max":7,"lifetime":true,"of_credit":true}`:     budget.CreditLine(7),
		`{"max":0,"lifetime":true}`:                      budget.Lifetime(0),
		`{"max":1,"window_us":3155760000000000}`:         budget.PerWindow(1, budget.MaxWindow),
		`{"max":4611686018427387904,"lifetime":true}`:    budget.Lifetime(budget.MaxLimit),
		`{"name":"\u003ca\u003e","max":2,"window_us":1}`: budget.PerWindow(2, time.Microsecond).Named("<a>"),
		`{"max":2}`: {Max: 2}, // refused when it is used, as it was before
	} {
		written, err := json.Marshal(limit)
		require.NoError(t, err)
		require.Equal(t, text, string(written))
		back := budget.Lifetime(77).Named("overwritten")
		require.NoError(t, json.Unmarshal(written, &back))
		require.Equal(t, limit, back)

		receipt := budget.Receipt{Entries: []budget.Posted{{Scope: "a", Standings: []budget.Standing{{Limit: limit, Used: 1, Available: 8}}}}}
		written, err = json.Marshal(receipt)
		require.NoError(t, err)
		require.Contains(t, string(written), `{"limit":`+text+`,"used":1,"held":0,"available":8}`)
		var again budget.Receipt
		require.NoError(t, json.Unmarshal(written, &again))
		require.Equal(t, receipt, again)
	}
	for _, text := range []string{
		`{"max":9,"window_us":-1}`, `{"max":9,"window_us":3155760000000001}`, `{"max":9,"window_us":60000000,"lifetime":true}`, `{"max":9,"of_credit":true}`,
	} {
		require.ErrorIs(t, json.Unmarshal([]byte(text), new(budget.Limit)), budget.ErrArgument, text)
	}
}
