package inspect_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

type resize struct{}

func (resize) Kind() string { return "resize" }

type fixture struct {
	*testing.T
	pool   *pgxpool.Pool // of the owner
	client *metered.Client
	role   *pgxpool.Pool // has GrantReportingSQL and River's jobs, and nothing else
}

func setUp(t *testing.T) *fixture {
	t.Helper()
	pool, client := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	return &fixture{t, pool, client, pgtest.AsRole(t, pool, metered.GrantReportingSQL, "grant select on river_job to $role")}
}

func (f *fixture) do(cmd metered.Command, fn metered.Func[any]) error {
	f.Helper()
	_, err := metered.Do(f.Context(), f.client, cmd, fn)
	return err
}

// charge charges in a command.
func (f *fixture) charge(id, scope string, amount int64) {
	f.Helper()
	require.NoError(f, f.do(metered.Command{ID: id, Name: "upload", Charges: []budget.Charge{{Scope: scope, Amount: amount}}}, nil))
}

// read calls f in a READ ONLY transaction of the reporting role.
func (f *fixture) read(fn func(ctx context.Context, r *inspect.Reader)) {
	f.Helper()
	tx, err := f.role.BeginTx(f.Context(), pgx.TxOptions{AccessMode: pgx.ReadOnly})
	require.NoError(f, err)
	defer func() { require.NoError(f, tx.Rollback(context.Background())) }()
	r, err := inspect.New(tx, "")
	require.NoError(f, err)
	fn(f.Context(), r)
}

func TestOverview_CountsOpenHoldsAndLeases(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	f.charge("a", "org/a", 5)
	for _, id := range []string{"open", "due"} {
		require.NoError(t, f.do(metered.Command{ID: id, Input: id}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := tx.Place(ctx, holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{{Scope: "org/h", Amount: 1}}}, nil)
			return nil, err
		}))
	}
	execute(t, f.pool, `update metered.holds set deadline = deadline - interval '2 min', due = due - interval '2 min' where id = 'due'`)
	execute(t, f.pool, openLeaseSQL)
	execute(t, f.pool, openLeaseSQL)
	execute(t, f.pool, `update metered.leases set ends_at = opened_at where no = 2`)
	inside, leave := make(chan struct{}), make(chan struct{})
	running := pgtest.Going(func() error {
		return f.do(metered.Command{ID: "runs"}, func(context.Context, *metered.Tx) (any, error) { close(inside); <-leave; return nil, nil })
	})
	<-inside
	f.read(func(ctx context.Context, r *inspect.Reader) {
		o, err := r.Overview(ctx)
		close(leave)
		require.NoError(t, err)
		require.Equal(t, metered.SchemaVersion, o.Version)
		require.Equal(t, inspect.Count{N: 3, Kind: inspect.Exact}, o.Scopes)
		require.Equal(t, inspect.Count{N: 5, Kind: inspect.Exact}, o.Entries)
		require.Equal(t, inspect.Count{N: 3, Kind: inspect.Exact}, o.Operations)
		require.Equal(t, []int64{1, 1, 1, 1}, []int64{o.OpenHolds.N, o.Unswept.N, o.LeasesOut.N, o.LeasesEnded.N})
		require.Equal(t, []int{1, 0}, []int{o.InFlight, o.Waiting})
		require.EqualValues(t, 10, o.UnitsOut)
		require.Equal(t, o.Now.Sub(o.OldestDue), o.SweepLag)
		require.Greater(t, o.SweepLag, 30*time.Second)
		require.True(t, o.NextDue.After(o.Now))
		require.Zero(t, o.ClockAhead)
	})
	require.NoError(t, <-running)
	execute(t, f.pool, `update metered.ledger set at = at + interval '1 h' where scope = 'org/a'`)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		o, err := r.Overview(ctx)
		require.NoError(t, err)
		require.Greater(t, o.ClockAhead, 50*time.Minute)
	})
}

// openLeaseSQL opens a lease of 10 units of org/l.
const openLeaseSQL = `select metered.open_lease(('org/l', null, 10, 0, '{}', null, null, null, null)::metered.new_charge,
	('rows', 'me', 1, 1, '1 min', null)::metered.lease_terms, '1 min', 1000)`

func TestHot_RanksByWaitsAndEntries(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	for i := range 40 {
		f.charge(fmt.Sprint("b", i), "org/b", 2)
	}
	f.charge("a", "org/a", 5)
	release := pgtest.LockScope(t, f.pool, f.client, "org/a")
	waiting := pgtest.Going(func() error {
		return f.do(metered.Command{ID: "waits", Charges: []budget.Charge{{Scope: "org/a", Amount: 1}}}, nil)
	})
	pgtest.WaitQueued(t, f.pool, 1)
	hidden := pgtest.LockScope(t, f.pool, f.client, "org/none")
	unknown := pgtest.Going(func() error {
		return f.do(metered.Command{ID: "waits, too", Charges: []budget.Charge{{Scope: "org/none", Amount: 1}}}, nil)
	})
	pgtest.WaitQueued(t, f.pool, 2)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		list, err := r.Hot(ctx, time.Hour, 10)
		require.NoError(t, err)
		require.Len(t, list.Scopes, 3)
		a, none, b := list.Scopes[0], list.Scopes[1], list.Scopes[2]
		require.Equal(t, []any{"org/a", int64(1), int64(5), 1}, []any{a.Scope, a.Entries, a.Units, a.Waiting})
		require.Positive(t, a.Longest)
		require.Equal(t, []any{"", f.client.Budget.LockKey("org/none"), 1}, []any{none.Scope, none.Key, none.Waiting})
		require.Equal(t, []any{"org/b", int64(40), int64(80), 0}, []any{b.Scope, b.Entries, b.Units, b.Waiting})
		require.InDelta(t, 80.0/3600, b.UnitsPS, 1e-9)
		require.Equal(t, f.client.Budget.LockKey("org/b"), b.Key)
		d, err := r.Scope(ctx, "org/a")
		require.NoError(t, err)
		require.Equal(t, 1, d.Waiting)
		o, err := r.Overview(ctx)
		require.NoError(t, err)
		require.Equal(t, []int{2, 2}, []int{o.InFlight, o.Waiting})
	})
	release()
	hidden()
	require.NoError(t, <-waiting)
	require.NoError(t, <-unknown)
	execute(t, f.pool, `update metered.ledger set at = at - interval '2 h' where scope = 'org/b' and seq <= 30`)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		d, err := r.Scope(ctx, "org/b")
		require.NoError(t, err)
		require.Equal(t, inspect.Rate{Within: time.Hour, Entries: 10, Units: 20}, d.Rates[1])
		require.Equal(t, inspect.Rate{Within: 24 * time.Hour, Entries: 40, Units: 80}, d.Rates[2])
	})
	report, err := f.client.Budget.Purge(t.Context(), f.pool, budget.PurgeOptions{Scope: "org/b", OlderThan: time.Hour})
	require.NoError(t, err)
	require.Positive(t, report.Entries)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		d, err := r.Scope(ctx, "org/b")
		require.NoError(t, err)
		require.True(t, d.Purged)
		require.True(t, d.Rates[2].Purged)
		require.Less(t, d.Rates[2].Entries, int64(40))
		require.GreaterOrEqual(t, d.Rates[2].Entries, int64(10))
	})
}

func TestScopes_ListsByPrefixInPages(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	execute(t, f.pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		select s, 1, metered.clock(), s, 0, 0, 0, 0, 'c', 'org/' || g from generate_series(1, 25) g, generate_series(1, 3) s`)
	f.charge("x", "team/1", 1)
	require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
		_, err := f.client.Budget.Create(t.Context(), tx, "new/1")
		return err
	}))
	f.read(func(ctx context.Context, r *inspect.Reader) {
		var names []string
		after := ""
		for pages := 1; ; pages++ {
			page, err := r.Scopes(ctx, inspect.ScopeFilter{Prefix: "org/1", After: after, Limit: 4})
			require.NoError(t, err)
			for _, s := range page.Scopes {
				names = append(names, s.Scope)
				require.Equal(t, []int64{3, 3, 3}, []int64{s.Seq, s.Spent, s.Used})
			}
			if after = page.Next; after == "" {
				require.Equal(t, 3, pages)
				break
			}
		}
		require.Equal(t, []string{"org/1", "org/10", "org/11", "org/12", "org/13", "org/14", "org/15", "org/16", "org/17", "org/18", "org/19"}, names)
		page, err := r.Scopes(ctx, inspect.ScopeFilter{Limit: 1000})
		require.NoError(t, err)
		require.Len(t, page.Scopes, 26)
		page, err = r.Scopes(ctx, inspect.ScopeFilter{Prefix: "none", Limit: 0})
		require.NoError(t, err)
		require.Empty(t, page.Scopes)
		d, err := r.Scope(ctx, "new/1")
		require.NoError(t, err)
		require.False(t, d.Created.IsZero())
		_, err = r.Scope(ctx, "none")
		require.ErrorIs(t, err, inspect.ErrUnknown)
		for _, limit := range []int{-1, inspect.MaxPage + 1} {
			_, err = r.Scopes(ctx, inspect.ScopeFilter{Limit: limit})
			require.ErrorIs(t, err, inspect.ErrArgument)
		}
	})
}

// Charges of a busy scope that are not in the chain yet count in lists, in its details and as hot.
func TestScopes_CountTallies(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.pool, pgtest.Tomorrow(9))
	f.charge("1", "channel", 5)
	execute(t, f.pool, "update metered.ledger set tallied = true where scope = 'channel'")
	clock.Advance(time.Microsecond) // one in 32 microseconds folds tallies, such as 9:00
	f.charge("2", "channel", 7)
	require.Equal(t, 1, pgtest.Count(t, f.pool, "metered.ledger"))
	require.Equal(t, 1, pgtest.Count(t, f.pool, "metered.tallies"))
	f.read(func(ctx context.Context, r *inspect.Reader) {
		list, err := r.Scopes(ctx, inspect.ScopeFilter{Limit: 10})
		require.NoError(t, err)
		require.Equal(t, int64(12), list.Scopes[0].Used)
		detail, err := r.Scope(ctx, "channel")
		require.NoError(t, err)
		require.Equal(t, int64(12), detail.Spent)
		hot, err := r.Hot(ctx, time.Minute, 10)
		require.NoError(t, err)
		require.Equal(t, int64(2), hot.Scopes[0].Entries)
		require.Equal(t, int64(12), hot.Scopes[0].Units)
	})
}

func TestOperations_HaveTheirOutcomes(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	require.NoError(t, f.do(metered.Command{ID: "op", Tenant: "ann", Name: "upload", Input: 1, Charges: []budget.Charge{{Scope: "org/a", Amount: 5}}},
		func(ctx context.Context, tx *metered.Tx) (any, error) {
			for _, key := range []string{"k", ""} {
				if _, err := tx.Enqueue(ctx, resize{}, &jobs.Options{Key: key, Tenant: "ann"}); err != nil {
					return nil, err
				}
			}
			_, err := tx.Place(ctx, holds.Placement{ID: "h", Tenant: "ann", TTL: time.Minute, Lines: []holds.Line{{Scope: "org/h", Amount: 1}}}, nil)
			return "secret result", err
		}))
	limit := budget.PerWindow(3, time.Minute).Named("burst")
	for i := range 3 {
		require.ErrorIs(t, f.do(metered.Command{ID: fmt.Sprint("no", i), Name: "burst", RecordRefusal: true,
			Charges: []budget.Charge{{Scope: "org/a", Amount: 4, Limits: []budget.Limit{limit, budget.Lifetime(1)}}}}, nil), budget.ErrExceeded)
	}
	f.charge("again", "org/a", 1)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		d, err := r.Operation(ctx, "ann", "op")
		require.NoError(t, err)
		require.Equal(t, []any{"upload", inspect.Committed, "ann", "op"}, []any{d.Name, d.State, d.Tenant, d.ID})
		require.Len(t, d.Charges, 1)
		require.Equal(t, []any{"org/a", int64(5), int64(1)}, []any{d.Charges[0].Scope, d.Charges[0].Amount, d.Charges[0].Seq})
		require.Equal(t, []inspect.HoldRef{{Tenant: "ann", ID: "h", State: "held"}}, d.Holds)
		require.Empty(t, d.Jobs.Unreadable)
		require.Len(t, d.Jobs.Jobs, 2)
		require.Equal(t, []string{"resize", "available", "k", "ann"}, []string{d.Jobs.Jobs[0].Kind, d.Jobs.Jobs[0].State, d.Jobs.Jobs[0].Key, d.Jobs.Jobs[0].Tenant})
		refused, err := r.Operation(ctx, "", "no1")
		require.NoError(t, err)
		require.Equal(t, []any{inspect.Refused, "budget_exceeded"}, []any{refused.State, refused.Code})
		require.Contains(t, refused.Refusal, "burst")
		_, err = r.Operation(ctx, "", "none")
		require.ErrorIs(t, err, inspect.ErrUnknown)

		ids := func(filter inspect.OperationFilter) (ids []string) {
			for {
				page, err := r.Operations(ctx, filter)
				require.NoError(t, err)
				for _, o := range page.Operations {
					ids = append(ids, o.ID)
				}
				if filter.After = page.Next; page.Next == "" {
					return ids
				}
			}
		}
		require.Equal(t, []string{"again", "no2", "no1", "no0", "op"}, ids(inspect.OperationFilter{Limit: 2}))
		require.Equal(t, []string{"no2", "no1", "no0"}, ids(inspect.OperationFilter{State: inspect.Refused, Limit: 1}))
		require.Equal(t, []string{"again", "op"}, ids(inspect.OperationFilter{Name: "upload"}))
		tenant := "ann"
		require.Equal(t, []string{"op"}, ids(inspect.OperationFilter{Tenant: &tenant}))
		require.Equal(t, []string{"op"}, ids(inspect.OperationFilter{Before: d.At.Add(time.Microsecond)}))
		require.Equal(t, []string{"again", "no2", "no1", "no0"}, ids(inspect.OperationFilter{Since: d.At.Add(time.Microsecond)}))
		_, err = r.Operations(ctx, inspect.OperationFilter{After: "?"})
		require.ErrorIs(t, err, inspect.ErrArgument)

		refusals, err := r.Refusals(ctx, time.Hour, 0)
		require.NoError(t, err)
		require.Equal(t, []any{5, true, 2}, []any{refusals.Looked, refusals.Whole, len(refusals.Refusals)})
		for i, label := range []string{"lifetime 1", "burst"} {
			got := refusals.Refusals[i]
			require.Equal(t, []any{"budget_exceeded", label, "burst", int64(3)}, []any{got.Code, got.Limit, got.Name, got.Count})
		}
		list, err := r.Jobs(ctx, []int64{1 << 40, d.JobIDs[0]})
		require.NoError(t, err)
		require.Equal(t, []bool{true, false}, []bool{list.Jobs[0].Gone, list.Jobs[1].Gone})
		list, err = r.WithRiver("elsewhere").Jobs(ctx, d.JobIDs)
		require.NoError(t, err)
		require.Contains(t, list.Unreadable, "there is no table")
		require.False(t, list.Jobs[0].Gone)
	})
	stranger := pgtest.AsRole(t, f.pool, metered.GrantReportingSQL, "")
	r, err := inspect.New(stranger, "")
	require.NoError(t, err)
	d, err := r.Operation(t.Context(), "ann", "op")
	require.NoError(t, err)
	require.Contains(t, d.Jobs.Unreadable, "may not read")
	require.Len(t, d.Jobs.Jobs, 2)
}

func TestHolds_ListsByStateAndScope(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	for i := range 5 {
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			_, err := f.client.Holds.Place(t.Context(), tx, holds.Placement{Tenant: fmt.Sprint("t", i%2), ID: fmt.Sprint("h", i), TTL: time.Duration(10-i) * time.Minute,
				Lines: []holds.Line{{Scope: fmt.Sprint("org/", i%2), Amount: 1}}})
			return err
		}))
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
		_, err := f.client.Holds.Release(t.Context(), tx, holds.Release{Tenant: "t0", IDs: []string{"h2"}})
		return err
	}))
	execute(t, f.pool, openLeaseSQL)
	f.read(func(ctx context.Context, r *inspect.Reader) {
		ids := func(filter inspect.HoldFilter) (ids []string) {
			filter.Limit = 2
			for {
				page, err := r.Holds(ctx, filter)
				require.NoError(t, err)
				for _, h := range page.Holds {
					ids = append(ids, h.ID)
				}
				if filter.After = page.Next; page.Next == "" {
					return ids
				}
			}
		}
		tenant := "t0"
		require.Equal(t, []string{"h4", "h3", "h2", "h1", "h0"}, ids(inspect.HoldFilter{}))
		require.Equal(t, []string{"h4", "h2", "h0"}, ids(inspect.HoldFilter{Tenant: &tenant}))
		require.Equal(t, []string{"h3", "h1"}, ids(inspect.HoldFilter{Scope: "org/1"}))
		require.Equal(t, []string{"h2"}, ids(inspect.HoldFilter{State: holds.Released}))
		require.Equal(t, []string{"h4", "h0"}, ids(inspect.HoldFilter{State: holds.Held, Scope: "org/0"}), "first due first")
		require.Empty(t, ids(inspect.HoldFilter{State: holds.Held, Scope: "org/1", Tenant: &tenant}))
		d, err := r.Hold(ctx, "t0", "h2")
		require.NoError(t, err)
		require.Equal(t, []any{holds.Released, 2}, []any{d.Hold.State, len(d.History)})
		_, err = r.Hold(ctx, "t0", "none")
		require.ErrorIs(t, err, holds.ErrUnknown)

		for state, n := range map[inspect.LeaseState]int{"": 1, inspect.LeaseOpen: 1, inspect.LeaseOut: 1, inspect.LeaseEnded: 0, inspect.LeaseSettled: 0} {
			for scope, any := range map[string]int{"": n, "org/l": n, "org/1": 0} {
				page, err := r.Leases(ctx, inspect.LeaseFilter{State: state, Scope: scope})
				require.NoError(t, err)
				require.Len(t, page.Leases, any, "%s of %q", state, scope)
			}
		}
	})
}

func TestExplain_NamesTheRefusingLimit(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	for i := range 30 {
		f.charge(fmt.Sprint("op", i), "org/l", 1)
	}
	execute(t, f.pool, `update metered.ledger set at = at - interval '2 h' where seq <= 20`)
	execute(t, f.pool, openLeaseSQL)
	require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
		_, err := f.client.Holds.Place(t.Context(), tx, holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{{Scope: "org/l", Amount: 3}}})
		return err
	}))
	hourly, ever := budget.PerWindow(25, time.Hour).Named("hourly"), budget.Lifetime(1000)
	charge := budget.Charge{Scope: "org/l", Amount: 4, Limits: []budget.Limit{hourly, ever}}
	f.read(func(ctx context.Context, r *inspect.Reader) {
		e, err := r.Explain(ctx, charge)
		require.NoError(t, err)
		require.Equal(t, []any{false, "budget_exceeded"}, []any{e.Fits, e.Code})
		require.Greater(t, e.FitsAfter, time.Duration(0))
		require.Equal(t, e.Now.Add(e.FitsAfter), e.FitsAt)
		by := e.Limits[0]
		require.Equal(t, []int64{10, 3, 10, 2}, []int64{by.Used, by.Held, by.Leased, by.Available})
		require.NotNil(t, by.Refusal)
		require.EqualValues(t, 21, by.Oldest[0].Seq, "the first in the window")
		require.Len(t, by.Oldest, 12, "charges, the lease and the hold")
		require.Nil(t, e.Limits[1].Refusal)
		require.Empty(t, e.Limits[1].Oldest)
		require.Equal(t, "h", e.Holds[0].ID)
		require.EqualValues(t, 10, e.Leases[0].Granted)
		charge.Amount = 2
		e, err = r.Explain(ctx, charge)
		require.NoError(t, err)
		require.True(t, e.Fits)
		require.Zero(t, e.FitsAfter)
		charge.Amount = 26
		e, err = r.Explain(ctx, charge)
		require.NoError(t, err)
		require.Equal(t, budget.Never, e.FitsAfter)
		charge.Limits = []budget.Limit{ever.MaxFrom("select 1")}
		_, err = r.Explain(ctx, charge)
		require.ErrorIs(t, err, inspect.ErrArgument)
	})
	_, err := f.client.Budget.Purge(t.Context(), f.pool, budget.PurgeOptions{Scope: "org/l", OlderThan: time.Hour})
	require.NoError(t, err)
	execute(t, f.pool, `update metered.ledger set at = at - interval '3 h' where scope = 'org/l' and seq = 1`)
	charge.Limits = []budget.Limit{budget.PerWindow(25, 3*time.Hour), ever}
	f.read(func(ctx context.Context, r *inspect.Reader) {
		e, err := r.Explain(ctx, charge)
		require.NoError(t, err, "in a transaction, after an error of Postgres")
		require.Equal(t, []any{false, "budget_window_purged", true}, []any{e.Fits, e.Code, e.Limits[0].Purged})
		require.EqualValues(t, 30, e.Limits[1].Used)
	})
}
