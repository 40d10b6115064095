package migrate_test

import (
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
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
	"github.com/pgmetered/metered/wallet"
)

// oldCalls are calls of version 1 from SQL, that leave rows of many kinds.
const oldCalls = `
select metered.charge(array[row('charged', null, 5, 0, array[row(100, '1 hour', null, null, null, false)]::metered.charge_limit[], null, false, null, null)]::metered.new_charge[],
	'1 min', 1000, null);
select metered.place(row('', 'held', true, null, 'ann', null, decode(repeat('01', 33), 'hex'), null, '1 hour', '0', '1 day', null, null),
	array[row('held', null, 3, 3, '{}', null, false, null, null)]::metered.new_charge[], '1 min', 1000, null, null, true);
select metered.grant_lot('wallet', null, row(amount, null, lasts, '', 0, reference, decode(repeat('01', 33), 'hex'), null, null, null)::metered.new_lot, false, 1000, null)
	from (values (10, '1 hour'::interval, 'hour'), (20, null, 'ever')) g(amount, lasts, reference);
select metered.draw(row('wallet', null, 12, 0, '{}', null, false, null, null), false, '1 min', 1000, null);
select metered.place(row('', 'kept', true, null, 'ann', null, decode(repeat('01', 33), 'hex'), null, '1 hour', '0', '1 day', null, null),
	array[row('wallet', null, 5, 5, '{}', null, false, null, null)]::metered.new_charge[], '1 min', 1000, null, null, true);
insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject) values (sha256('t'), metered.clock(), metered.clock() + interval '1 h', 1, 'p', 's');
insert into metered.job_keys (job_id, created_at, queue, key, kind, tenant, digest) values (1, metered.clock(), 'default', 'k', 'k', '', '');
insert into metered.operations (at, tenant, id, fingerprint, result) values (metered.clock(), '', 'op', '', '1')`

// releases are databases of each version before, as it was released, with rows in it.
var releases = func() []pgtest.Template {
	all := make([]pgtest.Template, schema.Version)
	for version := 1; version < len(all); version++ {
		all[version].Fill = func(ctx context.Context, pool *pgxpool.Pool) error {
			file, err := os.Open(fmt.Sprintf("../schema/testdata/%04d.sql.gz", version))
			if err != nil {
				return err
			}
			defer file.Close()
			unzipped, err := gzip.NewReader(file)
			if err != nil {
				return err
			}
			sql, err := io.ReadAll(unzipped)
			if err != nil {
				return err
			}
			for _, text := range []string{schema.Script(string(sql)), oldCalls} {
				if _, err := pool.Exec(ctx, text, pgx.QueryExecModeSimpleProtocol); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return all
}()

// interfaces are the functions of the schema, with their arguments' names and their results.
func interfaces(t *testing.T, pool *pgxpool.Pool) []string {
	rows, _ := pool.Query(t.Context(), `select format('%s(%s) %s', p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid))
		from pg_proc p where p.pronamespace = 'metered'::regnamespace`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

// The schema of each release, as it was released and with rows in it, becomes that of this build, and keeps its rows.
func TestUpgrade_OfEachReleasedVersion(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for version := 1; version < schema.Version; version++ {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			t.Parallel()
			pool := copyOf(t, &releases[version])
			before, called := rows(t, pool), interfaces(t, pool)

			report := mustUpgrade(t, pool, schema.Current(), migrate.Options{})
			require.Equal(t, [2]int{version, schema.Version}, [2]int{report.From, report.To})
			require.ElementsMatch(t, schema.Current().Previous(), report.Previous)
			requireWhole(t, pool, schema.Current())
			require.Subset(t, interfaces(t, pool), called, "a build of the version looks for all of them")

			for sql, want := range before {
				require.Equal(t, want, value[string](t, pool, sql), sql)
			}
			mustUpgrade(t, pool, schema.Current(), migrate.Options{DropPrevious: true})
			requireSame(t, pgtest.Open(t), pool)

			c := pgtest.NewClient(t, pool, metered.Config{})
			used, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "charged"})
			require.NoError(t, err)
			require.EqualValues(t, 5, used[0].Used)
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "charged", Amount: 1, Limits: []budget.Limit{budget.Lifetime(6)}})
				if err != nil {
					return err
				}
				// Of several charges each appends to an entry of before.
				_, err = c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "held", Amount: 1}, budget.Charge{Scope: "new", Amount: 1})
				return err
			}))
			book, err := wallet.New(c.Budget, wallet.Config{})
			require.NoError(t, err)
			held, err := holds.New(c.Budget, holds.Config{})
			require.NoError(t, err)
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				d, err := c.Budget.Charge(t.Context(), tx, book.Charge("wallet", 4))
				if err != nil {
					return err
				}
				require.EqualValues(t, 30-12-5-4, d.Entries[0].Standings[0].Available)
				if _, err = c.Budget.Refund(t.Context(), tx, budget.Refund{Scope: "wallet", Seq: 3, Amount: 11}); err != nil {
					return err
				}
				_, err = held.Release(t.Context(), tx, holds.Release{IDs: []string{"kept"}})
				return err
			}))
			b, err := book.Balance(t.Context(), pool, "wallet")
			require.NoError(t, err)
			require.EqualValues(t, 30-12-4+11, b.Units)
			require.Len(t, b.Lots, 2)
			// Charges are counted from the upgrade on, whatever was there before.
			counts, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "charged"}, budget.Query{Scope: "charged", Window: time.Hour},
				budget.Query{Scope: "wallet"}, budget.Query{Scope: "wallet", Window: time.Hour}, budget.Query{Scope: "held"})
			require.NoError(t, err)
			for i, want := range []int64{1, 1, 1, 1, 1} {
				require.Equal(t, want, counts[i].Charges, counts[i].Scope)
			}
			// A call of before that waited for the upgrade goes on after it, and knows nothing of the count, which begins again.
			_, err = pool.Exec(t.Context(), `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
				select l.seq + 1, 1, l.at, l.spent + 1, l.refunded, l.credited, l.held, l.epoch, 'c', l.scope
				from metered.ledger l where l.scope = 'charged' order by l.seq desc limit 1`)
			require.NoError(t, err)
			pgtest.RequireVerified(t, pool, c.Budget)
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "charged", Amount: 1})
				return err
			}))
			counts, err = c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "charged"})
			require.NoError(t, err)
			require.EqualValues(t, 1, counts[0].Charges)
			requireChanged(t, pool, c, "1", change(t, pool, c, "1", false))
			pgtest.RequireVerified(t, pool, c.Budget)
		})
	}
}

// boundToLots are objects that Postgres binds to the table of lots, whatever its name is. They would go on with numbers that
// nobody changes, or be passed by.
var boundToLots = []struct{ create, name, drop string }{
	{"create view public.of_lots as select no, rest from metered.lots", "view public.of_lots", "view public.of_lots"},
	{"create materialized view public.kept_lots as select no, rest from metered.lots", "materialized view public.kept_lots", "materialized view public.kept_lots"},
	{"create function public.rests() returns numeric language sql begin atomic select sum(rest) from metered.lots; end", "function public.rests()", "function public.rests"},
	{"create function public.rest_of(l metered.lots) returns bigint language sql as 'select l.rest'", "function public.rest_of(metered.lots)", "function public.rest_of"},
	{"create function public.last_of(l metered.lots[]) returns int language sql as 'select 1'", "function public.last_of(metered.lots[])", "function public.last_of"},
	{"create table public.was (l metered.lots)", "table public.was", "table public.was"},
	{"create table public.child () inherits (metered.lots)", "table public.child", "table public.child"},
	{"create rule seen as on update to public.asked do also insert into public.asked select no from metered.lots", "rule seen on table public.asked", "rule seen on public.asked"},
	{"create policy theirs on public.asked using (no in (select no from metered.lots))", "policy theirs on table public.asked", "policy theirs on public.asked"},
	{"create policy few on metered.lots using (scope = current_user)", "policy few on table metered.lots", "policy few on metered.lots"},
	{"create trigger drawn before update on metered.lots for each row execute function suppress_redundant_updates_trigger()", "trigger drawn on table metered.lots", "trigger drawn on metered.lots"},
	{"create publication warehouse for table metered.lots", "publication of table metered.lots in publication warehouse", "publication warehouse"},
}

// An upgrade names all that is bound to the table that becomes a view, and goes on once it is dropped. A body that is a text, and
// rights on columns, are of the view.
func TestUpgrade_NamesWhatIsBoundToTheTableOfLots(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := copyOf(t, &releases[1])
	execute(t, pool, "create table public.asked (no bigint)")
	execute(t, pool, "create function public.told() returns numeric language plpgsql as 'begin return (select sum(rest) from metered.lots); end'")
	role := pgtest.AsRole(t, pool, nil, "grant usage on schema metered to $role; grant select (no, rest) on metered.lots to $role")
	for _, o := range boundToLots {
		execute(t, pool, o.create)
	}
	before := value[string](t, pool, "select sum(rest)::text from metered.lots")
	_, err := upgrade(t.Context(), pool, schema.Current(), migrate.Options{})
	require.ErrorContains(t, err, "drop these before the upgrade and create them again after it, since the table metered.lots becomes a view: ")
	named := strings.Replace(err.Error(), " (SQLSTATE", ", (SQLSTATE", 1)
	for _, o := range boundToLots {
		require.Contains(t, named, " "+o.name+",")
		execute(t, pool, "drop "+o.drop)
	}
	mustUpgrade(t, pool, schema.Current(), migrate.Options{})
	requireWhole(t, pool, schema.Current())
	require.Equal(t, before, value[string](t, pool, "select public.told()::text"))
	require.Equal(t, before, value[string](t, role, "select sum(rest)::text from metered.lots where no > 0"))
}

// A balance that version 1 reads while the upgrade waits for a table, or works, is answered when it is done.
func TestUpgrade_AnswersABalanceThatItStops(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, table := range []string{"ledger", "lots"} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool := copyOf(t, &releases[1])
			reader, err := pool.Acquire(ctx)
			require.NoError(t, err)
			defer reader.Release()
			read := func() error {
				_, err := reader.Exec(ctx, "select from metered.wallet_balance('wallet')")
				return err
			}
			require.NoError(t, read()) // its functions are compiled
			holder, err := pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = holder.Rollback(context.Background()) }()
			_, err = holder.Exec(ctx, "select from metered."+table)
			require.NoError(t, err)
			upgraded := pgtest.Going(func() error {
				_, err := upgrade(ctx, pool, schema.Current(), migrate.Options{})
				return err
			})
			pgtest.WaitQueued(t, pool, 1)
			answered := pgtest.Going(read)
			pgtest.WaitFor(t, "the balance to wait, or to be answered between two attempts", func() bool { return pgtest.Queued(t, pool) == 2 || len(answered) == 1 })
			require.NoError(t, holder.Rollback(ctx))
			require.NoError(t, <-upgraded)
			require.NoError(t, <-answered)
		})
	}
}
