package console_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// read is the reads of the tables since the database was made.
type read struct {
	Table      string
	Rows       int64
	Sequential int64 // rows read one after the other
	Fetched    int64 // rows found by an index
}

func (w *world) readSoFar() map[string]read {
	w.t.Helper()
	pgtest.FlushStatistics(w.t, w.reader) // the page's one connection
	pgtest.FlushStatistics(w.t, w.pool)
	rows, err := w.pool.Query(w.t.Context(), `select relname, n_live_tup, seq_tup_read, coalesce(idx_tup_fetch, 0) from pg_stat_user_tables where schemaname = 'metered'`)
	require.NoError(w.t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[read])
	require.NoError(w.t, err)
	all := map[string]read{}
	for _, r := range list {
		all[r.Table] = r
	}
	return all
}

// With ten thousand scopes, a scope of many entries, and many holds and operations, each page is a few statements, reads no
// large table from end to end, and little by indexes.
func TestScale_PagesReadLittleOfMuch(t *testing.T) {
	t.Parallel()
	const scopes, long = 10_000, 5000
	w := newWorld(t, console.Config{Limits: func(string) []budget.Limit {
		return []budget.Limit{budget.PerWindow(1, time.Hour), budget.Lifetime(1 << 40)} // the first is used up everywhere
	}}, "")
	w.crowd(scopes, 1)
	for range long / bounds.MaxBatch {
		charges := make([]budget.Charge, bounds.MaxBatch)
		for i := range charges {
			charges[i] = budget.Charge{Scope: "crowd/05000", Amount: 1}
		}
		require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
			_, err := w.client.Budget.ChargeEach(t.Context(), tx, charges...)
			return err
		}))
	}
	w.many("event", 15_000)
	for i := range 30 {
		require.NoError(t, w.order(fmt.Sprint("order ", i), "crowd/05000", 1))
	}
	_, err := w.pool.Exec(t.Context(), "analyze metered.ledger, metered.operations, metered.holds")
	require.NoError(t, err)

	const statements, fetched = 40, 6000
	for name, most := range map[string]int64{
		"":                           40_000, // it looks for hot scopes in the newest records
		"scopes":                     fetched,
		"scopes?prefix=crowd%2F09":   fetched,
		"scopes?after=crowd%2F05000": fetched,
		"scopes?kind=wallets":        2 * fetched, // it looks at 2,000 scopes
		"scope?scope=crowd%2F05000":  fetched,
		"scope?scope=crowd%2F05000&amount=5&limits=6000/1h": fetched,
		"scope?scope=crowd%2F05000&before=2500":             fetched,
		"usage.svg?scope=crowd%2F05000&limit=1000/1h":       fetched,
		"holds":                            fetched,
		"holds?scope=crowd%2F05000":        fetched,
		"operations":                       fetched,
		"operations?name=order":            25_000, // it looks at the newest 10,000, twice
		"operation?tenant=shop&id=order+1": fetched,
		"leases":                           fetched,
	} {
		before, asked := w.readSoFar(), w.queries.n.Load()
		began := time.Now()
		response, body := w.get(w.url("") + name)
		took := time.Since(began)
		require.Equal(t, http.StatusOK, response.StatusCode, name)
		require.Less(t, len(body), 300_000, name)
		asked = w.queries.n.Load() - asked
		require.LessOrEqual(t, asked, int64(statements), "%q asks too often", name)
		sum := int64(0)
		for table, now := range w.readSoFar() {
			if now.Rows > 10_000 { // a call may look at so many
				sequential := now.Sequential - before[table].Sequential
				if name == "" && table == "ledger" {
					sequential = max(0, sequential-20_000) // its last pages, twice: of 30,000 entries
				}
				require.Zero(t, sequential, "%q reads %s from end to end", name, table)
			}
			sum += now.Fetched - before[table].Fetched
		}
		if name == "" { // it has a thousand scopes' last entries, by 3,200 rows, and few usages
			require.Less(t, w.readSoFar()["ledger"].Fetched-before["ledger"].Fetched, int64(4000), "too many usages")
		}
		require.LessOrEqual(t, sum, most, "%q reads too much", name)
		t.Logf("%-60s %3d statements, %5d rows, %6d bytes, %v", name, asked, sum, len(body), took.Round(time.Millisecond))
	}

	// Pages go on from one to the next until the end, and show each scope once.
	seen, address := map[string]bool{}, "scopes?prefix=crowd%2F09"
	for address != "" {
		response, body := w.get(w.url("") + address)
		require.Equal(t, http.StatusOK, response.StatusCode)
		page := parse(t, body)
		address = ""
		for _, a := range all(all(page, "main")[0], "a") {
			href, _ := attr(a, "href")
			if rel, _ := attr(a, "rel"); rel == "next" {
				address = href
			} else if strings.HasPrefix(href, "scope?") {
				require.False(t, seen[href], href)
				seen[href] = true
			}
		}
	}
	require.Len(t, seen, 1000)
}

// many records n usage events.
func (w *world) many(prefix string, n int) {
	w.t.Helper()
	for from := 0; from < n; from += bounds.MaxBatch {
		events := make([]budget.UsageEvent, min(n-from, bounds.MaxBatch))
		for i := range events {
			events[i] = budget.UsageEvent{ID: fmt.Sprint(prefix, from+i), Charge: budget.Charge{Scope: fmt.Sprintf("crowd/%05d", from+i), Amount: 1}}
		}
		require.NoError(w.t, pgx.BeginFunc(w.t.Context(), w.pool, func(tx pgx.Tx) error {
			_, err := w.client.Budget.Ingest(w.t.Context(), tx, events...)
			return err
		}))
	}
}
