package maintain_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/maintain"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

const day = 24 * time.Hour

var (
	errOwn   = errors.New("the subscriber's own")
	lifetime = []budget.Limit{budget.Lifetime(1_000_000)}
	// all purges everything of the world.
	all = maintain.Policy{Entries: 40 * day, Operations: 40 * day, JobKeys: 40 * day}
)

// world is a database with due work of all kinds: two of each, and a ledger of old entries.
type world struct {
	pool    *pgxpool.Pool
	client  *metered.Client
	wallets *wallet.Book
	parts   maintain.Parts
	clock   *pgtest.Clock
	heard   []string // by subscribers
	fail    bool     // the subscriber of holds fails
}

type job struct{}

func (job) Kind() string { return "job" }

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{}
	w.pool, w.client = pgtest.SetUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(_ context.Context, _ pgx.Tx, tr holds.Transition) error {
			switch {
			case tr.Kind != holds.EventExpired:
				return nil
			case w.fail:
				return errOwn
			}
			w.heard = append(w.heard, tr.Hold.ID)
			return nil
		},
	}}}, pgtest.Options{})
	w.clock = pgtest.SetClock(t, w.pool, pgtest.Tomorrow(8))
	var err error
	w.wallets, err = wallet.New(w.client.Budget, wallet.Config{Subscribers: []wallet.Subscriber{
		func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
			w.heard = append(w.heard, b.Wallet)
			return nil
		},
	}})
	require.NoError(t, err)
	carver, err := leases.NewCarver(w.client.Budget)
	require.NoError(t, err)
	w.parts = maintain.Parts{Ledger: w.client.Budget, Holds: w.client.Holds, Wallets: w.wallets}
	ctx := t.Context()
	carve := func(tx pgx.Tx, child string) error {
		_, err := carver.Carve(ctx, tx, leases.Carving{
			Child: child, From: budget.Charge{Scope: "user", Amount: 10, Limits: lifetime}, TTL: time.Minute,
		})
		return err
	}
	// A lease is purged by the age of its settlement, which a sweep makes.
	require.NoError(t, pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error { return carve(tx, "run/0") }))
	w.clock.Advance(time.Minute)
	settled, err := maintain.Run(ctx, w.pool, maintain.Parts{Ledger: w.client.Budget}, maintain.Policy{NoPurges: true})
	require.NoError(t, err)
	require.EqualValues(t, 1, named(t, settled, "sweep leases").Done)
	for _, n := range []string{"1", "2"} {
		_, err := metered.Do(ctx, w.client, metered.Command{ID: "op " + n, Input: n}, func(ctx context.Context, tx *metered.Tx) (string, error) {
			_, err := tx.Enqueue(ctx, job{}, &jobs.Options{Key: n})
			return n, err
		})
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
			_, minted := w.client.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: n, TTL: time.Minute})
			_, placed := w.client.Holds.Place(ctx, tx, holds.Placement{ID: "hold " + n, TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 3}}})
			_, granted := w.wallets.Grant(ctx, tx, wallet.Grant{Wallet: "wallet " + n, Amount: 100, Ends: wallet.After(time.Minute)})
			_, drawn := w.client.Budget.Charge(ctx, tx, w.wallets.Charge("wallet "+n, 30))
			carved := carve(tx, "run/"+n)
			_, spent := w.client.Budget.Charge(ctx, tx, budget.Charge{Scope: "run/" + n, Amount: 10, Limits: []budget.Limit{budget.Prepaid(0)}})
			return errors.Join(minted, placed, granted, drawn, carved, spent)
		}))
		for range 60 {
			w.charge(t, "org/"+n)
		}
	}
	w.clock.Advance(60 * day)
	w.charge(t, "org/1")
	return w
}

func (w *world) charge(t *testing.T, scope string) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		_, err := w.client.Budget.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: 1, Limits: lifetime})
		return err
	}))
}

// answers are those of all scopes and wallets. The numbers of entries are left out: a sweep writes some.
func (w *world) answers(t *testing.T) (all []any) {
	t.Helper()
	var queries []budget.Query
	for _, scope := range []string{"org/1", "org/2", "room", "user"} {
		queries = append(queries, budget.Query{Scope: scope}, budget.Query{Scope: scope, Window: 30 * day})
	}
	usage, err := w.client.Budget.Usage(t.Context(), w.pool, queries...)
	require.NoError(t, err)
	for _, u := range usage {
		all = append(all, u.Scope, u.Window, u.Available(1_000_000))
	}
	for _, name := range []string{"wallet 1", "wallet 2"} {
		b, err := w.wallets.Balance(t.Context(), w.pool, name)
		require.NoError(t, err)
		all = append(all, name, b.Units, b.Held, b.Lots)
	}
	return all
}

// waiting counts rows with due work, and old rows.
func (w *world) waiting(t *testing.T) map[string]int {
	t.Helper()
	waiting := map[string]int{}
	for table, where := range map[string]string{
		"holds": "true", "leases": "settled_at is null or child = 'run/0'", "tokens": "true", "operations": "true", "job_keys": "true", "lots": "open or untold > 0",
		"ledger": "at < metered.clock() - interval '41 days' and scope like 'org/%'",
	} {
		var n int
		require.NoError(t, w.pool.QueryRow(t.Context(), "select count(*) from metered."+table+" where "+where).Scan(&n))
		waiting[table] = n
	}
	return waiting
}

// ended asserts that no due work and no old row is left. Each scope keeps entry 1 and at most 16 old ones.
func (w *world) ended(t *testing.T) {
	t.Helper()
	waiting := w.waiting(t)
	require.LessOrEqual(t, waiting["ledger"], 2*17)
	delete(waiting, "ledger")
	require.Equal(t, map[string]int{"holds": 0, "leases": 0, "tokens": 0, "operations": 0, "job_keys": 0, "lots": 0}, waiting)
	require.ElementsMatch(t, []string{"hold 1", "hold 2", "wallet 1", "wallet 2"}, w.heard, "each is announced once")
}

// done is the work of each step.
func done(r maintain.Report) map[string]int64 {
	all := map[string]int64{}
	for _, s := range r.Steps {
		all[s.Name] = s.Done
	}
	return all
}

func named(t *testing.T, r maintain.Report, name string) maintain.Step {
	t.Helper()
	for _, s := range r.Steps {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("no step %q", name)
	return maintain.Step{}
}

func TestRun_EndsAndPurgesAllAndChangesNoAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before, waiting := w.answers(t), w.waiting(t)
	policy := all
	policy.DryRun, policy.Forget = true, nil
	told, err := maintain.Run(t.Context(), w.pool, w.parts, policy)
	require.NoError(t, err)
	require.Equal(t, waiting, w.waiting(t), "a dry run deletes nothing")
	require.Equal(t, "Policy.DryRun", named(t, told, "sweep holds").Off)
	for _, name := range []string{"purge tokens", "purge operations", "purge job keys"} { // of which no sweep makes more
		require.EqualValues(t, 2, named(t, told, name).Done, name)
	}
	require.GreaterOrEqual(t, named(t, told, "purge entries").Done, int64(80))
	calls := 0
	policy = all
	policy.Progress = func(maintain.Report) { calls++ }
	report, err := maintain.Run(t.Context(), w.pool, w.parts, policy)
	require.NoError(t, err)
	w.ended(t)
	require.Equal(t, before, w.answers(t))

	counts := done(report)
	require.GreaterOrEqual(t, counts["purge entries"], int64(80))
	require.EqualValues(t, 1, counts["purge leases"])
	delete(counts, "purge entries")
	delete(counts, "purge leases")
	require.Equal(t, map[string]int64{
		"sweep holds": 2, "sweep leases": 2, "sweep lots": 2, "purge holds": 2, "purge tokens": 2, "purge operations": 2, "purge job keys": 2,
	}, counts)
	require.Greater(t, calls, 8)
	for _, s := range report.Steps {
		require.Empty(t, s.Left, s.Name)
		require.Empty(t, s.Off, s.Name)
	}
	require.Empty(t, report.After)

	again, err := maintain.Run(t.Context(), w.pool, w.parts, all)
	require.NoError(t, err)
	for name, n := range done(again) {
		require.Zero(t, n, name)
	}
	w.clock.Advance(31 * day)
	again, err = maintain.Run(t.Context(), w.pool, w.parts, all)
	require.NoError(t, err)
	require.EqualValues(t, 2, named(t, again, "purge leases").Done)
}

// The zero Policy deletes nothing whose deletion a caller could notice: entries, operations and keys of jobs.
func TestRun_TheZeroPolicyKeepsWhatIsDangerousToDelete(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before := w.waiting(t)
	report, err := maintain.Run(t.Context(), w.pool, maintain.Parts{Ledger: w.client.Budget}, maintain.Policy{})
	require.NoError(t, err)
	after := w.waiting(t)
	for _, kept := range []string{"ledger", "operations", "job_keys", "lots", "holds"} {
		require.Equal(t, before[kept], after[kept], kept)
	}
	require.Zero(t, after["tokens"])
	require.Zero(t, after["leases"])
	require.Empty(t, w.heard)
	for name, why := range map[string]string{
		"sweep holds": "Parts.Holds is nil", "sweep lots": "Parts.Wallets is nil", "purge operations": "Policy.Operations is not set",
		"purge job keys": "Policy.JobKeys is not set", "purge entries": "Policy.Entries is not set",
	} {
		require.Equal(t, why, named(t, report, name).Off)
	}
	report, err = maintain.Run(t.Context(), w.pool, maintain.Parts{Ledger: w.client.Budget},
		maintain.Policy{NoSweeps: true, Entries: budget.Never, Operations: budget.Never, Holds: budget.Never,
			Leases: budget.Never, Tokens: budget.Never, JobKeys: budget.Never})
	require.NoError(t, err)
	require.Equal(t, after, w.waiting(t))
	for _, name := range []string{"Holds", "Leases", "Tokens", "Operations"} {
		require.Equal(t, "Policy."+name+" is budget.Never", named(t, report, "purge "+strings.ToLower(name)).Off)
	}
}

// A run that is canceled after any batch leaves whole batches, says where to go on, and the next run ends the rest.
func TestRun_ThatIsCanceledIsGoneOnWith(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before := w.answers(t)
	policy := all
	policy.Batch = 16
	runs := 0
	for canceled := true; canceled; runs++ {
		require.Less(t, runs, 60)
		ctx, cancel := context.WithCancel(t.Context())
		batches := 0
		policy.Progress = func(r maintain.Report) {
			for _, s := range r.Steps {
				if s.Done > 0 {
					batches++
				}
			}
			if batches > 0 {
				cancel()
			}
		}
		report, err := maintain.Run(ctx, w.pool, w.parts, policy)
		cancel()
		if canceled = errors.Is(err, context.Canceled); !canceled {
			require.NoError(t, err)
		} else if last := report.Steps[len(report.Steps)-1]; last.Err == nil {
			require.Equal(t, "the run ended before", last.Off)
		}
		policy.After = report.After
		require.Equal(t, before, w.answers(t))
	}
	require.Greater(t, runs, 8, "each step was canceled")
	w.ended(t)
}

// Two at once share the work. A row that one has locked is left by the other, which says so.
func TestRun_ManyAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before := w.answers(t)
	// Each has Books of its own, as another process has: the subscribers write to the database in place of memory.
	_, err := w.pool.Exec(t.Context(), "create table heard (id text primary key)")
	require.NoError(t, err)
	err = pgtest.InParallel(3, func(int) error {
		book, err := holds.New(w.client.Budget, holds.Config{Subscribers: []holds.Subscriber{
			func(ctx context.Context, tx pgx.Tx, tr holds.Transition) error {
				_, err := tx.Exec(ctx, "insert into heard values ($1)", tr.Hold.ID)
				return err
			},
		}})
		if err != nil {
			return err
		}
		wallets, err := wallet.New(w.client.Budget, wallet.Config{Subscribers: []wallet.Subscriber{
			func(ctx context.Context, tx pgx.Tx, b wallet.Breakage) error {
				_, err := tx.Exec(ctx, "insert into heard values ($1)", b.Wallet)
				return err
			},
		}})
		if err != nil {
			return err
		}
		_, err = maintain.Run(t.Context(), w.pool, maintain.Parts{Ledger: w.client.Budget, Holds: book, Wallets: wallets}, all)
		return err
	})
	require.NoError(t, err)
	_, err = maintain.Run(t.Context(), w.pool, w.parts, all) // the rows that each left to the others
	require.NoError(t, err)
	rows, _ := w.pool.Query(t.Context(), "select id from heard")
	told, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	w.heard = append(w.heard, told...)
	w.ended(t)
	require.Equal(t, before, w.answers(t))
}

func TestRun_AFailedStepKeepsNoOtherFromRunning(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before := w.answers(t)
	w.fail = true
	report, err := maintain.Run(t.Context(), w.pool, w.parts, all)
	require.ErrorIs(t, err, errOwn)
	require.ErrorContains(t, err, "maintain: sweep holds: ")
	require.ErrorIs(t, named(t, report, "sweep holds").Err, errOwn)
	require.Equal(t, map[string]int64{"subscriber": 2}, named(t, report, "sweep holds").Left)
	for _, s := range report.Steps {
		switch s.Name {
		case "sweep holds":
		case "purge holds":
			require.Zero(t, s.Done, "holds that are not announced are kept")
		default:
			require.NoError(t, s.Err)
			require.Positive(t, s.Done, s.Name)
		}
	}
	require.Equal(t, before, w.answers(t))
	w.fail = false
	_, err = maintain.Run(t.Context(), w.pool, w.parts, all)
	require.NoError(t, err)
	w.ended(t)
}

// A role without the privileges of one half does the other.
func TestRun_WithoutPrivilegesDoesTheRest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before := w.answers(t)
	app := pgtest.AsRole(t, w.pool, metered.GrantSQL, "")
	report, err := maintain.Run(t.Context(), app, w.parts, all)
	require.ErrorIs(t, err, budget.ErrNotGranted)
	for _, s := range report.Steps {
		if s.Name[:5] == "sweep" {
			require.NoError(t, s.Err)
			require.EqualValues(t, 2, s.Done)
			continue
		}
		require.ErrorIs(t, s.Err, budget.ErrNotGranted)
		require.ErrorContains(t, err, "maintain: "+s.Name+": ")
	}
	require.Equal(t, before, w.answers(t))

	maintenance := pgtest.AsRole(t, w.pool, metered.GrantMaintenanceSQL, "")
	policy := all
	policy.NoSweeps = true
	_, err = maintain.Run(t.Context(), maintenance, w.parts, policy)
	require.NoError(t, err)
	w.ended(t)
	require.Equal(t, before, w.answers(t))
}

// A scope that another transaction has locked is counted, and left.
func TestRun_SaysWhatItLeft(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := pgtest.NewClient(t, w.pool, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}})
	release := pgtest.LockScope(t, w.pool, c, "org/1")
	report, err := maintain.Run(t.Context(), w.pool, maintain.Parts{Ledger: c.Budget}, all)
	release()
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"locked": 1}, named(t, report, "purge entries").Left)
	report, err = maintain.Run(t.Context(), w.pool, maintain.Parts{Ledger: c.Budget}, all)
	require.NoError(t, err)
	require.Positive(t, named(t, report, "purge entries").Done)
}

func TestRun_RefusesArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	other, err := budget.New(budget.Config{Schema: "other"})
	require.NoError(t, err)
	book, err := holds.New(other, holds.Config{})
	require.NoError(t, err)
	wallets, err := wallet.New(other, wallet.Config{})
	require.NoError(t, err)
	parts := maintain.Parts{Ledger: ledger}
	for field, run := range map[string]func() (maintain.Report, error){
		"pool":         func() (maintain.Report, error) { return maintain.Run(t.Context(), nil, parts, all) },
		"Parts.Ledger": func() (maintain.Report, error) { return maintain.Run(t.Context(), pool, maintain.Parts{}, all) },
		"Parts.Holds": func() (maintain.Report, error) {
			return maintain.Run(t.Context(), pool, maintain.Parts{Ledger: ledger, Holds: book}, all)
		},
		"Parts.Wallets": func() (maintain.Report, error) {
			return maintain.Run(t.Context(), pool, maintain.Parts{Ledger: ledger, Wallets: wallets}, all)
		},
		"Policy.Batch": func() (maintain.Report, error) {
			return maintain.Run(t.Context(), pool, parts, maintain.Policy{Batch: 15})
		},
		"Policy.NoPurges": func() (maintain.Report, error) {
			return maintain.Run(t.Context(), pool, parts, maintain.Policy{NoPurges: true, NoSweeps: true})
		},
		"Policy.Entries": func() (maintain.Report, error) {
			return maintain.Run(t.Context(), pool, parts, maintain.Policy{Entries: -1})
		},
		"Policy.DryRun": func() (maintain.Report, error) {
			return maintain.Run(t.Context(), pool, parts, maintain.Policy{DryRun: true, Entries: day, Forget: func(string) bool { return true }})
		},
		"Policy.Forget": func() (maintain.Report, error) {
			return maintain.Run(t.Context(), pool, parts, maintain.Policy{Forget: func(string) bool { return true }})
		},
	} {
		_, err := run()
		var refused *budget.ArgumentError
		require.ErrorAs(t, err, &refused, field)
		require.Equal(t, field, refused.Field)
	}
	_, err = maintain.Run(t.Context(), pool, maintain.Parts{Ledger: new(budget.Ledger)}, all)
	require.ErrorIs(t, err, budget.ErrArgument)
}

// The purge gives numbers first, and keeps what the consumer has not consumed.
func TestRun_PurgesWhatConsumersOfTheFeedHaveConsumed(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	w := newWorld(t)
	var entries int
	consume := func(most int) {
		require.NoError(t, pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
			page, err := w.parts.Ledger.ConsumeFeed(ctx, tx, "invoices", budget.FeedOptions{Max: most, Patience: 366 * 24 * time.Hour})
			entries += len(page)
			return err
		}))
	}
	consume(1)
	report, err := maintain.Run(ctx, w.pool, w.parts, all)
	require.NoError(t, err)
	purge := named(t, report, "purge entries")
	require.Zero(t, purge.Done)
	require.EqualValues(t, pgtest.Count(t, w.pool, "metered.ledger"), purge.Left["unread"])
	for before := -1; before != entries; {
		before = entries
		consume(1000)
	}
	report, err = maintain.Run(ctx, w.pool, w.parts, all)
	require.NoError(t, err)
	require.GreaterOrEqual(t, named(t, report, "purge entries").Done, int64(80))
}
