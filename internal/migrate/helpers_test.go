package migrate_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/migrate"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

func upgrade(ctx context.Context, pool *pgxpool.Pool, next *schema.Release, opts migrate.Options) (migrate.Report, error) {
	opts.Release = next
	if opts.Schema == (schema.Name{}) {
		opts.Schema, _ = schema.Parse("")
	}
	return migrate.Run(ctx, pool, opts)
}

func mustUpgrade(t *testing.T, pool *pgxpool.Pool, next *schema.Release, opts migrate.Options) migrate.Report {
	t.Helper()
	report, err := upgrade(t.Context(), pool, next, opts)
	require.NoError(t, err)
	return report
}

func examine(t *testing.T, db schema.DB, r *schema.Release, name string) migrate.State {
	t.Helper()
	n, err := schema.Parse(name)
	require.NoError(t, err)
	s, err := migrate.Examine(t.Context(), r, db, n)
	require.NoError(t, err)
	return s
}

// requireWhole asserts that the schema has all objects of the release.
func requireWhole(t *testing.T, db schema.DB, r *schema.Release) {
	t.Helper()
	s := examine(t, db, r, "")
	require.NoError(t, migrate.Err(r.Version, s.Version, s.Differences))
}

func catalog(t *testing.T, db schema.DB) []string {
	t.Helper()
	n, err := schema.Parse("")
	require.NoError(t, err)
	c, err := schema.Current().Read(t.Context(), db, n)
	require.NoError(t, err)
	return strings.Split(c.Text(), "\n")
}

// requireSame asserts that two databases have the same schema, with nothing left over, and the columns in one order.
func requireSame(t *testing.T, a, b *pgxpool.Pool) {
	t.Helper()
	x, y := catalog(t, a), catalog(t, b)
	require.Empty(t, slices.DeleteFunc(slices.Clone(x), func(l string) bool { return slices.Contains(y, l) }))
	require.Empty(t, slices.DeleteFunc(slices.Clone(y), func(l string) bool { return slices.Contains(x, l) }))
	const columns = `select string_agg(c.relname || '.' || a.attname, ' ' order by c.relname, a.attnum)
		from pg_class c join pg_attribute a on a.attrelid = c.oid
		where c.relnamespace = 'metered'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped`
	require.Equal(t, value[string](t, a, columns), value[string](t, b, columns))
}

var made struct {
	sync.Mutex
	next *schema.Release
}

// nextRelease is pgtest.Next, which the tests share.
func nextRelease(t *testing.T) *schema.Release {
	t.Helper()
	made.Lock()
	defer made.Unlock()
	if made.next == nil {
		made.next = pgtest.Next(t)
	}
	return made.next
}

// freshNext has the schema of nextRelease, which a test has asked for before it opens a copy.
var freshNext = pgtest.Template{Fill: func(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := upgrade(ctx, pool, made.next, migrate.Options{})
	return err
}}

// copyOf is a database of the test's own with what the template has.
func copyOf(t *testing.T, template *pgtest.Template) *pgxpool.Pool {
	t.Helper()
	return pgtest.OpenWith(t, pgtest.Options{Template: template})
}

func value[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

func execute(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
}

type note struct {
	N string `json:"n"`
}

// work makes writes of many kinds under an id.
func work(t *testing.T, pool *pgxpool.Pool, c *metered.Client, id string) {
	t.Helper()
	ctx := t.Context()
	book, err := wallet.New(c.Budget, wallet.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		token, err := c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: id, TTL: time.Hour})
		if err != nil {
			return err
		}
		if _, err := c.Tokens.Consume(ctx, tx, "p", id, token.Token.Reveal()); err != nil {
			return err
		}
		if _, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "wallet", Amount: 10, Reference: id}); err != nil {
			return err
		}
		_, err = c.Budget.Charge(ctx, tx, book.Charge("wallet", 4))
		return err
	}))
	require.False(t, command(t, c, id).Replayed)
	require.True(t, command(t, c, id).Replayed)
}

// change asks for a change of the plan of a wallet of the id: down at the period's end, and with resume that it goes on after all.
func change(t *testing.T, pool *pgxpool.Pool, c *metered.Client, id string, resume bool) (made wallet.Changed) {
	t.Helper()
	ctx := t.Context()
	book, err := wallet.New(c.Budget, wallet.Config{})
	require.NoError(t, err)
	month := budget.Per(1, budget.Month, time.UTC, time.Time{}).Period
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "plan/" + id, Amount: 300, Reference: "large", Ends: wallet.EachPeriod(month)}); err != nil {
			return err
		}
		asked := wallet.Change{Wallet: "plan/" + id, Reference: "evt_1", Plan: "large", To: &wallet.Grant{Amount: 30, Reference: "small", Ends: wallet.EachPeriod(month)}, AtEnd: true}
		if resume {
			asked = wallet.Change{Wallet: "plan/" + id, Reference: "evt_2", Plan: "large", Resume: true}
		}
		made, err = book.Change(ctx, tx, asked)
		return err
	}))
	return made
}

// requireChanged asserts that a change, made before the upgrade or now, is answered as it was, and that it can be taken back.
func requireChanged(t *testing.T, pool *pgxpool.Pool, c *metered.Client, id string, made wallet.Changed) {
	t.Helper()
	require.Equal(t, "small", made.To)
	require.False(t, made.Replayed)
	again := change(t, pool, c, id, false)
	require.True(t, again.Replayed)
	again.Replayed = false
	require.Equal(t, made, again)
	back := change(t, pool, c, id, true)
	require.Equal(t, []any{true, "evt_1", false}, []any{back.Resumed, back.Replaced, back.Replayed})
	require.True(t, change(t, pool, c, id, true).Replayed)
	require.EqualValues(t, 1, pgtest.Value[int64](t, pool, "select count(*) from metered.lot_rows where scope = $1 and pending > 0 and (plan).renewal = 'large'", "plan/"+id))
}

func command(t *testing.T, c *metered.Client, id string) metered.Outcome[string] {
	t.Helper()
	cmd := metered.Command{ID: id, Input: id, Name: "n", Charges: []budget.Charge{{Scope: "charged", Amount: 2, Limits: []budget.Limit{budget.Lifetime(1000)}}}}
	out, err := metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (string, error) {
		if _, err := tx.Enqueue(ctx, note{id}, &jobs.Options{Key: id, Tenant: "acme"}); err != nil {
			return "", err
		}
		_, err := tx.Place(ctx, holds.Placement{ID: id, Lines: []holds.Line{{Scope: "held", Amount: 3}, {Scope: "wallet", Amount: 1}}, TTL: time.Hour}, nil)
		return id, err
	})
	require.NoError(t, err)
	return out
}

// requireWork asserts the sums of the ledger after n calls of work.
func requireWork(t *testing.T, pool *pgxpool.Pool, c *metered.Client, n int64) {
	t.Helper()
	for scope, want := range map[string][2]int64{"charged": {2, 0}, "held": {0, 3}, "wallet": {4 - 10, 1}} {
		u, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: scope})
		require.NoError(t, err)
		require.Equal(t, [2]int64{n * want[0], n * want[1]}, [2]int64{u[0].Used, u[0].Held}, scope)
	}
	report, err := c.Budget.Verify(t.Context(), pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

// rows are those of all tables, in the columns of the version before.
func rows(t *testing.T, pool *pgxpool.Pool) map[string]string {
	t.Helper()
	all := make(map[string]string)
	found, err := pool.Query(t.Context(), `select format('select coalesce(json_agg(r order by r::text), ''[]'')::text from (select %s from metered.%s) r',
			string_agg(quote_ident(a.attname), ', ' order by a.attnum), c.relname)
		from pg_class c join pg_attribute a on a.attrelid = c.oid
		where c.relnamespace = 'metered'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
		  and c.relname <> 'schema_version' and a.attname <> 'claimant' group by c.relname`)
	require.NoError(t, err)
	queries, err := pgx.CollectRows(found, pgx.RowTo[string])
	require.NoError(t, err)
	for _, sql := range queries {
		all[sql] = value[string](t, pool, sql)
	}
	return all
}
