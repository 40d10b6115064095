package carvejobs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/leases/carvejobs"
)

// site is one cluster: a server of its own, as the process that carves sees it, through a wire, and as those beside it do.
type site struct {
	server *pgserver.Server
	local  *pgxpool.Pool
	app    *metered.Client // of programs beside it
	wire   *pgtest.Wire
}

// world are two clusters, and a budget at home.
type world struct {
	*testing.T
	home, away *site
	clusters   *carvejobs.Clusters
	budget     int64
	direct     int64            // charged at home
	charged    map[string]int64 // acknowledged, by child
	writtenOff map[string]bool
}

func newWorld(t *testing.T, credit int64) *world {
	w := &world{T: t, budget: credit, charged: map[string]int64{}, writtenOff: map[string]bool{}}
	clients := map[string]*metered.Client{}
	for name, s := range map[string]**site{"home": &w.home, "away": &w.away} {
		server, local := pgtest.Start(t, pgserver.Options{Durable: true, Settings: map[string]string{"fsync": "off"}}) // servers crash, the machine does not
		tapped, wire := pgtest.Tap(t, local, func(c *pgxpool.Config) { c.MaxConns = 8 })
		clients[name] = pgtest.NewClient(t, tapped, metered.Config{})
		*s = &site{server, local, pgtest.NewClient(t, local, metered.Config{}), wire}
	}
	var err error
	w.clusters, err = carvejobs.New(clients, carvejobs.Config{RetryAfter: 50 * time.Millisecond})
	require.NoError(t, err)
	for _, s := range []*site{w.home, w.away} {
		workers := river.NewWorkers()
		w.clusters.AddWorkers(workers)
		client, err := river.NewClient(riverpgxv5.New(s.local), &river.Config{
			Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
			FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond, PollOnly: true,
			Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		})
		require.NoError(t, err)
		require.NoError(t, client.Start(context.Background()))
		t.Cleanup(func() {
			ctx, cancel := pgtest.Patient(t)
			defer cancel()
			_ = client.StopAndCancel(ctx)
		})
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), w.home.local, func(tx pgx.Tx) error {
		_, err := w.home.app.Budget.Credit(t.Context(), tx, budget.Credit{Scope: "acme", Amount: credit})
		return err
	}))
	return w
}

func (w *world) link(child string) carvejobs.Link {
	return carvejobs.Link{Home: "home", Away: "away", Child: child}
}

// eventually repeats do until it succeeds: servers are killed beside it.
func (w *world) eventually(what string, do func(ctx context.Context) error) {
	w.Helper()
	var err error
	for deadline := pgtest.Patience(w); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) { // as WaitFor, with errors
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		err = do(ctx)
		cancel()
		if err == nil {
			return
		}
	}
	w.Fatalf("%s: %v", what, err)
}

func (w *world) carve(child string, amount int64, ttl time.Duration) {
	w.Helper()
	w.eventually("carve", func(ctx context.Context) error {
		l, err := w.clusters.Carve(ctx, carvejobs.RemoteCarving{
			Link: w.link(child), TTL: ttl,
			From: budget.Charge{Scope: "acme", Amount: amount, Limits: []budget.Limit{budget.Prepaid(0)}, Note: budget.Note{Actor: "ann"}},
		})
		if err == nil && l.Granted != amount {
			w.Errorf("%+v", l)
		}
		return err
	})
}

// charge charges a child beside its cluster, in a command, once.
func (w *world) charge(child string, n int, amount int64) {
	w.Helper()
	w.eventually("charge", func(ctx context.Context) error {
		_, err := metered.Do[int](ctx, w.away.app, metered.Command{
			ID: fmt.Sprint(child, "/", n), Charges: []budget.Charge{{Scope: child, Amount: amount, Limits: []budget.Limit{budget.Prepaid(0)}}},
		}, nil)
		return err
	})
	w.charged[child] += amount
}

func (w *world) close(child string) {
	w.Helper()
	w.eventually("close", func(ctx context.Context) error {
		_, err := w.clusters.End(ctx, w.link(child), budget.Note{Actor: "ann"})
		return err
	})
}

// get returns the lease of a child at a site.
func (w *world) get(ctx context.Context, s *site, child string) (leases.Lease, error) {
	carver, err := leases.NewCarver(s.app.Budget)
	if err != nil {
		return leases.Lease{}, err
	}
	return carver.Get(ctx, s.local, child)
}

func (w *world) credited(child string) {
	w.Helper()
	w.eventually("the credit", func(ctx context.Context) error { _, err := w.get(ctx, w.away, child); return err })
}

var errOpen = errors.New("it is not settled")

func (w *world) settled(child string) (l leases.Lease) {
	w.Helper()
	w.eventually("the settlement", func(ctx context.Context) (err error) {
		if l, err = w.get(ctx, w.home, child); err == nil && l.SettledAt.IsZero() {
			err = errOpen
		}
		return err
	})
	return l
}

// childSide is the state of a child on its own cluster.
type childSide struct {
	Scope          string
	Used, Credited int64
	Credits        int
	Closed         bool
}

const childrenSQL = `
select distinct on (scope) scope, spent - refunded, credited,
    (select count(*) from metered.ledger y where y.scope = l.scope and y.kind = 'd')::int, coalesce(next_due = '-infinity', false)
from metered.ledger l order by scope, seq desc`

const parentSQL = `
select l.child, l.granted, coalesce(l.spent, 0), l.settled_at is not null from metered.leases l where l.mode = 'r'`

// addsUp checks both sides against each other: units used away count at home, once, and no unit was used that home did
// not give. The child's side is read first: units that it has used by then count at home already.
func (w *world) addsUp() {
	w.Helper()
	ctx := context.Background()
	rows, err := w.away.local.Query(ctx, childrenSQL)
	require.NoError(w, err)
	children, err := pgx.CollectRows(rows, pgx.RowToStructByPos[childSide])
	require.NoError(w, err)
	away := map[string]childSide{}
	for _, c := range children {
		away[c.Scope] = c
	}
	var child string
	var granted, spent, open, captured int64
	var settled bool
	home := map[string]bool{}
	rows, err = w.home.local.Query(ctx, parentSQL)
	require.NoError(w, err)
	_, err = pgx.ForEachRow(rows, []any{&child, &granted, &spent, &settled}, func() error {
		home[child] = true
		c := away[child]
		require.LessOrEqual(w, c.Credits, 1, "credited once at most")
		require.Contains(w, []int64{0, granted}, c.Credited)
		require.LessOrEqual(w, c.Used, c.Credited)
		switch {
		case settled && w.writtenOff[child]:
			require.Equal(w, granted, spent)
		case settled:
			require.True(w, c.Closed || c.Credits == 0, child)
			require.Equal(w, c.Used, spent, child)
		}
		if settled {
			captured += spent
		} else {
			open += granted
		}
		return nil
	})
	require.NoError(w, err)
	for scope, c := range away {
		require.True(w, home[scope] || c.Credited == 0, scope)
	}
	u, err := w.home.app.Budget.Usage(ctx, w.home.local, budget.Query{Scope: "acme"})
	require.NoError(w, err)
	require.Equal(w, []int64{captured + w.direct, open}, []int64{u[0].Spent, u[0].Leased})
	require.LessOrEqual(w, u[0].Spent+u[0].Leased, w.budget)
	for child, charged := range w.charged {
		require.Equal(w, charged, away[child].Used, child)
	}
	for _, s := range []*site{w.home, w.away} {
		report, err := s.app.Budget.Verify(ctx, s.local, budget.VerifyOptions{})
		require.NoError(w, err)
		require.Empty(w, report.Differences)
	}
}

// rescue gives the jobs of a worker that lost its connection to another one, as River's rescuer does after a while.
func (s *site) rescue(ctx context.Context) error {
	_, err := s.local.Exec(ctx, `update river_job set state = 'available' where state = 'running'`)
	return err
}
