package main

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

var noon = pgtest.Tomorrow(12)

// quiet are processes that work no jobs. Nobody sweeps.
var quiet = config{holdFor: 5 * time.Minute, refresh: 100 * time.Millisecond}

// hall is a database with two organisations in it, and processes that serve it.
type hall struct {
	t     *testing.T
	pool  *pgxpool.Pool
	app   *app
	apps  []*app
	bases []string

	org, event, otherOrg, otherEvent string
	admin                            *browser
	seats, blocks                    []string
}

func open(t *testing.T, processes int, cfg config) *hall {
	t.Helper()
	return openOn(t, pgtest.Open(t), processes, cfg)
}

// openOn is open with a database, and with further processes that run already.
func openOn(t *testing.T, pool *pgxpool.Pool, processes int, cfg config, running ...string) *hall {
	t.Helper()
	h := &hall{t: t, pool: pool, bases: running}
	require.NoError(t, setUp(t.Context(), pool))
	for range processes {
		a, err := newApp(pool, cfg)
		require.NoError(t, err)
		a.start(context.Background())
		server := httptest.NewUnstartedServer(a.handler())
		server.Config.RegisterOnShutdown(a.live.close)
		server.Start()
		t.Cleanup(func() {
			a.live.close()
			server.CloseClientConnections()
			server.Close()
			a.stop()
		})
		h.apps, h.bases = append(h.apps, a), append(h.bases, server.URL)
	}
	var err error
	h.app, err = newApp(pool, cfg) // one that serves nobody, to ask
	require.NoError(t, err)
	h.org = one[string](h, `select id::text from hall.organisations where name = 'City Theatre'`)
	h.otherOrg = one[string](h, `select id::text from hall.organisations where name = 'Harbour Hall'`)
	h.event = one[string](h, `select id::text from hall.events where org = $1`, h.org)
	h.otherEvent = one[string](h, `select id::text from hall.events where org = $1`, h.otherOrg)
	h.admin = h.login(one[string](h, `select id::text from hall.users where org = $1 and role = 'manager'`, h.org))
	h.seats, h.blocks = h.seatsOf(h.event), all[string](h, `select id::text from hall.blocks where event = $1 order by position`, h.event)
	require.Len(t, h.seats, 500)
	return h
}

func (h *hall) seatsOf(event string) []string {
	return all[string](h, `select id::text from hall.seats where event = $1 order by ordinal`, event)
}

func one[T any](h *hall, sql string, args ...any) T {
	h.t.Helper()
	return pgtest.Value[T](h.t, h.pool, sql, args...)
}

func all[T any](h *hall, sql string, args ...any) []T {
	h.t.Helper()
	rows, err := h.pool.Query(context.Background(), sql, args...)
	require.NoError(h.t, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(h.t, err)
	return list
}

func (h *hall) exec(sql string, args ...any) {
	h.t.Helper()
	_, err := h.pool.Exec(context.Background(), sql, args...)
	require.NoError(h.t, err)
}

// counted is how many answers there were of each status.
func counted(answers []answer) map[int]int {
	n := map[int]int{}
	for _, a := range answers {
		n[a.Status]++
	}
	return n
}

// written counts the rows of a hold.
type written struct{ Holds, Events, Entries, Jobs, Operations, Audit int }

func (h *hall) written() (w written) {
	h.t.Helper()
	require.NoError(h.t, h.pool.QueryRow(context.Background(), `
		select (select count(*) from metered.holds), (select count(*) from metered.hold_events), (select count(*) from metered.ledger),
		    (select count(*) from river_job), (select count(*) from metered.operations), (select count(*) from hall.audit where code = '')`).
		Scan(&w.Holds, &w.Events, &w.Entries, &w.Jobs, &w.Operations, &w.Audit))
	return w
}

// refusals are the codes of failures in the audit table, oldest first.
func (h *hall) refusals() []string {
	h.t.Helper()
	return all[string](h, `select code from hall.audit where code <> '' order by id`)
}

// charged is a user's usage of the window.
func (h *hall) charged(user string) int64 {
	h.t.Helper()
	usage, err := h.app.metered.Budget.Usage(context.Background(), h.pool, budget.Query{Scope: budget.ScopeKey("holds", user, ""), Window: perUser.Window})
	require.NoError(h.t, err)
	return usage[0].Used
}

// verify checks the ledger, and the seats' copy against the library's state of each.
func (h *hall) verify() {
	h.t.Helper()
	ctx := context.Background()
	pgtest.RequireVerified(h.t, h.pool, h.app.metered.Budget)
	m, err := h.app.readMap(ctx, h.org, h.event)
	require.NoError(h.t, err)
	keys := make([]holds.Key, len(h.seats))
	for i, seat := range h.seats {
		keys[i] = seatKey(seat)
	}
	claimed, err := h.app.metered.Holds.Claimed(ctx, h.pool, h.org, keys...)
	require.NoError(h.t, err)
	for i, seat := range h.seats {
		claim, taken := claimed[seatKey(seat)]
		want := byte('s')
		switch {
		case !taken:
			want = 'a'
		case claim.State == holds.Held:
			want = 'h'
		case isBlock(claim):
			want = 'b'
		}
		require.Equal(h.t, string(want), m.Seats[i:i+1], "seat %d", i)
	}
	for _, block := range m.Blocks {
		usage, err := h.app.metered.Budget.Usage(ctx, h.pool, budget.Query{Scope: budget.ScopeKey("block", block.ID, "")})
		require.NoError(h.t, err)
		if usage[0].Held > 0 && usage[0].HoldDue <= 0 {
			continue // of holds that are over, and not freed yet
		}
		require.Equal(h.t, usage[0].Used+usage[0].Held, block.Taken)
	}
}
