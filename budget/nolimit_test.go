package budget_test
import ("testing"; "time"; "github.com/stretchr/testify/require")
func TestProbe(t *testing.T) {
	pool, l, clock := open(t)
	for range 40 { mustCharge(t, pool, l, "a", 1) }
	require.NoError(t, refund(t.Context(), pool, l, "a", 1, 1))
	clock.Advance(time.Hour)
	purge(t, pool, l, time.Minute)
	require.Error(t, refund(t.Context(), pool, l, "a", 1, 1))
}
