package console_test

import (
	"encoding/xml"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/pgtest"
)

// points are the values of the table below a plot.
func points(t *testing.T, figure *html.Node) (at []time.Time, used []int64) {
	t.Helper()
	for _, row := range all(all(figure, "tbody")[0], "tr") {
		stamp, _ := attr(all(row, "time")[0], "datetime")
		when, err := time.Parse(time.RFC3339Nano, stamp)
		require.NoError(t, err)
		n, err := strconv.ParseInt(strings.NewReplacer("\u202f", "", "−", "-").Replace(text(all(row, "td")[0])), 10, 64)
		require.NoError(t, err)
		at, used = append(at, when), append(used, n)
	}
	return at, used
}

// Each point of a plot is the sum of the ledger's entries up to that time.
func TestUsage_PlotsTheSumsOfEntries(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	clock := pgtest.SetClock(t, w.pool, time.Date(2026, 3, 1, 8, 0, 0, 0, time.UTC))
	type entry struct {
		at     time.Time
		amount int64 // less refunds
	}
	var charges []entry
	var credited []entry
	for i := range 90 {
		amount := int64(i%11 + 1)
		require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
			receipt, err := w.client.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "s", Amount: amount})
			if err != nil {
				return err
			}
			if i%5 == 0 {
				_, err = w.client.Budget.Refund(t.Context(), tx, budget.Refund{Scope: "s", Seq: receipt.Entries[0].Seq, Amount: 1})
				amount--
			}
			if i%9 == 0 {
				_, err = w.client.Budget.Credit(t.Context(), tx, budget.Credit{Scope: "s", Amount: 4})
				credited = append(credited, entry{clock.Now(), 4})
			}
			return err
		}))
		charges = append(charges, entry{clock.Now(), amount})
		clock.Advance(time.Duration(40+i*7%45) * time.Second)
	}
	sum := func(list []entry, after, upTo time.Time) (n int64) {
		for _, e := range list {
			if e.at.After(after) && !e.at.After(upTo) {
				n += e.amount
			}
		}
		return n
	}
	page := w.see("scope", "scope", "s", "limits", "100/20m, 5000/lifetime")
	figures := all(page, "figure")
	require.Len(t, figures, 2)
	at, used := points(t, figures[0])
	require.GreaterOrEqual(t, len(at), 60)
	for i := range at {
		end := at[i].Add(-time.Microsecond) // points are right before their time
		require.Equal(t, sum(charges, end.Add(-20*time.Minute), end), used[i], "at %s", at[i])
	}
	usage, err := w.client.Budget.Usage(t.Context(), w.pool, budget.Query{Scope: "s", Window: 20 * time.Minute}, budget.Query{Scope: "s"})
	require.NoError(t, err)
	require.Equal(t, usage[0].Used, used[len(used)-1])
	at, used = points(t, figures[1])
	require.Equal(t, usage[1].Used, used[len(used)-1])
	for i := range at {
		end := at[i].Add(-time.Microsecond)
		require.Equal(t, sum(charges, time.Time{}, end)-sum(credited, time.Time{}, end), used[i], "at %s", at[i])
	}

	// The plot says that entries were purged, and does not draw 0 for them.
	clock.Advance(2 * time.Hour)
	for range 40 {
		w.charge("s", 3)
	}
	_, err = w.client.Budget.Purge(t.Context(), w.pool, budget.PurgeOptions{OlderThan: time.Hour})
	require.NoError(t, err)
	page = w.see("scope", "scope", "s", "limits", "100/20m, 100/1d")
	figures = all(page, "figure")
	_, used = points(t, figures[0])
	require.Equal(t, int64(120), used[len(used)-1])
	require.Contains(t, text(figures[1]), "reaches purged entries")
	require.Empty(t, all(figures[1], "img"))
	require.Contains(t, text(byID(t, page, "stands")), "not known")
}

// After a purge the usage of a limit can be unknown. The overview leaves that limit out and shows the others, and so
// does a refusal from before the purge.
func TestOverview_AfterAPurge(t *testing.T) {
	t.Parallel()
	short, long := budget.PerWindow(100, 20*time.Minute).Named("short"), budget.PerWindow(1000, 24*time.Hour).Named("long")
	w := newWorld(t, console.Config{Limits: func(string) []budget.Limit { return []budget.Limit{long, short} }}, "")
	clock := pgtest.SetClock(t, w.pool, pgtest.Tomorrow(9))
	for range 40 {
		w.charge("s", 2)
	}
	require.Error(t, w.order("too much", "s", 50, short))
	clock.Advance(2 * time.Hour)
	for range 40 {
		w.charge("s", 2)
	}
	_, err := w.client.Budget.Purge(t.Context(), w.pool, budget.PurgeOptions{OlderThan: time.Hour})
	require.NoError(t, err)
	nearly := text(byID(t, w.see(""), "nearly"))
	require.Contains(t, nearly, "s short 80 0 100 20")
	require.NotContains(t, nearly, "long")
	require.Contains(t, text(byID(t, w.see("operation", "tenant", "shop", "id", "too much"), "refusals")), "s short 50 18 80")
}

// Holds are bars from where they begin to where they end, in the colours of their states.
func TestUsage_DrawsHolds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	for i := range 4 {
		require.NoError(t, w.order(fmt.Sprint("order ", i), "s", 5))
	}
	page := w.see("scope", "scope", "s")
	require.Len(t, all(byID(t, page, "holds"), "tr"), 5, "four, and the header")
	response, drawing := w.get(w.url("holds.svg", "scope", "s"))
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.NoError(t, xml.Unmarshal(drawing, new(struct{})))
	require.GreaterOrEqual(t, strings.Count(string(drawing), "fill=\"#C98A12\""), 4, "four are held: %s", drawing)
}
