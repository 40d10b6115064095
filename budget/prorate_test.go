package budget_test

import (
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

func TestProrate_IsThePartOfThePeriodThatIsLeft(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	periods := []budget.Period{
		budget.Per(1, budget.Day, berlin, time.Time{}).Period, budget.Per(1, budget.Month, berlin, time.Time{}).Period,
		budget.Per(1, budget.Year, time.UTC, time.Time{}).Period, budget.PerPeriod(1, 31*time.Hour, start).Period,
	}
	rapid.Check(t, func(rt *rapid.T) {
		p := rapid.SampledFrom(periods).Draw(rt, "period")
		amount := rapid.Int64Range(0, bounds.MaxLimit).Draw(rt, "amount")
		from := start.Add(time.Duration(rapid.Int64Range(0, int64(1000*24*time.Hour)).Draw(rt, "from")))
		begins, ends, err := p.At(from)
		require.NoError(rt, err)
		if rapid.Bool().Draw(rt, "the first moment") {
			from = begins
		}
		got, err := p.Prorate(amount, from)
		require.NoError(rt, err)
		left := big.NewInt(ends.Sub(from.Truncate(time.Microsecond)).Microseconds())
		want := left.Mul(left, big.NewInt(amount))
		want.Div(want, big.NewInt(ends.Sub(begins).Microseconds()))
		require.Equal(rt, want.Int64(), got)
	})
	for _, amount := range []int64{-1, bounds.MaxLimit + 1} {
		_, err := periods[0].Prorate(amount, start)
		require.ErrorContains(t, err, "amount")
	}
	_, err = budget.Period{}.Prorate(1, start)
	require.Error(t, err)
}
