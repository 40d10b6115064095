package migrate_test

import (
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"testing"

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

// The schema of each release, as it was released and with rows in it, becomes that of this build, and keeps its rows.
func TestUpgrade_OfEachReleasedVersion(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for version := 1; version < schema.Version; version++ {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			t.Parallel()
			pool := copyOf(t, &releases[version])
			before := rows(t, pool)

			execute(t, pool, "create view public.of_lots as select no, rest from metered.lots")
			_, err := upgrade(t.Context(), pool, schema.Current(), migrate.Options{})
			require.ErrorContains(t, err, "becomes a view: public.of_lots", "it would go on reading the table")
			execute(t, pool, "drop view public.of_lots")
			report := mustUpgrade(t, pool, schema.Current(), migrate.Options{})
			require.Equal(t, [2]int{version, schema.Version}, [2]int{report.From, report.To})
			require.ElementsMatch(t, schema.Current().Previous(), report.Previous)
			requireWhole(t, pool, schema.Current())

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
				return err
			}))
			book, err := wallet.New(c.Budget, wallet.Config{})
			require.NoError(t, err)
			held, err := holds.New(c.Budget, holds.Config{})
			require.NoError(t, err)
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				d, err := book.Draw(t.Context(), tx, wallet.Draw{Wallet: "wallet", Amount: 4})
				if err != nil {
					return err
				}
				require.EqualValues(t, 30-12-5-4, d.Left)
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
			pgtest.RequireVerified(t, pool, c.Budget)
		})
	}
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
