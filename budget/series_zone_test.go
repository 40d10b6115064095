package budget_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A program whose data of a zone is not the server's gets an error that says when the two differ, and no units on another day. The server
// knows a zone of the same name that is an hour further on.
func TestSeries_OfAZoneThatTheServerShowsOtherwiseIsAnError(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	l := newLedger(t, budget.Config{})
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	from := time.Date(2026, 6, 1, 0, 0, 0, 0, berlin)
	days := func(in *time.Location) error {
		_, err := l.Series(t.Context(), pool, "s", from, from.AddDate(0, 0, 3), budget.Day, in)
		return err
	}
	for _, in := range []*time.Location{berlin, time.UTC, nil, time.FixedZone("there", 3600), time.FixedZone("Asia/Tokyo", 9*3600)} {
		require.NoError(t, days(in), "%v", in)
	}
	err = days(time.FixedZone("Europe/Berlin", 3600))
	require.ErrorIs(t, err, fault.New("budget_time_zone", ""))
	require.ErrorContains(t, err, "Europe/Berlin at 2026-05-31T23:00:00+01:00")
	err = days(time.FixedZone("Europe/Nowhere", 3600))
	require.ErrorIs(t, err, fault.New("budget_time_zone", ""))
	require.ErrorContains(t, err, "Europe/Nowhere")
}
