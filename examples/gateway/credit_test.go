package main

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

func TestCredit_IsGrantedOnceDrawnInOrderAndLapses(t *testing.T) {
	t.Parallel()
	f := openGateway(t, false)
	y, m, d := time.Now().UTC().Date()
	clock := pgtest.SetClock(t, f.pool, time.Date(y, m, d+1, 12, 0, 0, 0, time.UTC))
	grant := func(id, category string, amount int64, expires time.Time) int {
		status, _ := f.do(t.Context(), http.MethodPost, "/v1/credit", "admin-of-acme", "", fmt.Sprintf(
			`{"id": %q, "category": %q, "amount": %d, "expires": %q}`, id, category, amount, expires.Format(time.RFC3339)))
		return status
	}
	balance := func() wallet.Balance {
		t.Helper()
		b, err := f.wallet.Balance(t.Context(), f.pool, credit("acme"))
		require.NoError(t, err)
		return b
	}
	soon, late := clock.Now().Add(time.Hour), clock.Now().Add(24*time.Hour)
	for range 2 {
		require.Equal(t, http.StatusOK, grant("payment-1", "paid", 6*dollar, soon.Add(-time.Minute)))
		require.Equal(t, http.StatusOK, grant("gift-1", "promotional", 1*dollar, soon))
		require.Equal(t, http.StatusOK, grant("gift-2", "promotional", 1*dollar, late))
	}
	require.Equal(t, http.StatusConflict, grant("payment-1", "paid", 7*dollar, soon))
	require.Equal(t, http.StatusConflict, grant("late", "paid", 7*dollar, clock.Now()))
	require.Equal(t, int64(8*dollar), balance().Units)

	h := f.ask(f.bases[0], "key-of-ann", "", "How is a stream metered?", 0)
	require.Equal(t, "stop", h.Finish)
	b := balance()
	require.Equal(t, []int64{1*dollar - h.Cost, 1 * dollar, 6 * dollar}, []int64{b.Lots[0].Units, b.Lots[1].Units, b.Lots[2].Units}, "given credit goes first")
	clock.Set(soon)
	require.Equal(t, int64(1*dollar), balance().Units, "at its end a lot has ended, swept or not")
	again := f.ask(f.bases[0], "key-of-ann", "", "How is a stream metered?", 0)
	require.Equal(t, "stop", again.Finish)
	require.NoError(t, f.sweep(t.Context(), nil))
	require.Equal(t, 1*dollar-again.Cost, balance().Units)
	bill := f.bill(clock.Now().In(f.zone()).Format("2006-01"))
	bill.requireAddsUp(t)
	require.Equal(t, h.Cost+again.Cost, bill.Total)
	require.Equal(t, creditItem{Opening: 0, Credited: h.Cost + 1*dollar, Closing: 1*dollar - again.Cost}, bill.Credit)
	f.requireSettled()
}
