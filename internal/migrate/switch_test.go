package migrate_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/migrate"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/wallet"
)

// subscribed is a new server with the schema, to which logical replication has brought the rows of another.
func subscribed(t *testing.T, from *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	ctx := t.Context()
	_, to := pgtest.Start(t, pgserver.Options{Settings: map[string]string{"wal_level": "logical"}})
	var all string
	require.NoError(t, to.QueryRow(ctx, `select string_agg(format('%I.%I', schemaname, tablename), ', ') from pg_tables where schemaname = 'metered'`).Scan(&all))
	_, err := to.Exec(ctx, "truncate "+all) // as pg_dump -s leaves it
	require.NoError(t, err)
	_, err = from.Exec(ctx, "create publication all_of_it for table "+all)
	require.NoError(t, err)
	_, err = to.Exec(ctx, fmt.Sprintf(`create subscription all_of_it connection '%s' publication all_of_it`, quoted(connString(from))))
	require.NoError(t, err)
	pgtest.WaitFor(t, "the rows", func() bool {
		return pgtest.Value[bool](t, to, `select count(*) > 0 and bool_and(srsubstate = 'r') from pg_subscription_rel`)
	})
	return to
}

func quoted(text string) (s string) {
	for _, r := range text {
		if s += string(r); r == '\'' {
			s += "'"
		}
	}
	return s
}

const openOneLease = `select no from metered.open_lease(row('leased', null, 10, 0, '{}', null, null, null, null)::metered.new_charge,
	row('rows', 'me', 1, 1, '1 h', null)::metered.lease_terms, '1 min', 1000)`

// numbered makes lots, holds and leases, of which a third roll over.
type numbered struct {
	t      *testing.T
	ledger *budget.Ledger
	holds  *holds.Book
	book   *wallet.Book
}

func numbering(t *testing.T) numbered {
	t.Helper()
	n := numbered{t: t}
	var err error
	n.ledger, err = budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	n.holds, err = holds.New(n.ledger, holds.Config{})
	require.NoError(t, err)
	n.book, err = wallet.New(n.ledger, wallet.Config{})
	require.NoError(t, err)
	return n
}

// make makes each once, at the first try.
func (n numbered) make(pool *pgxpool.Pool, name string, ends time.Time) (lot int64) {
	n.t.Helper()
	err := pgx.BeginFunc(n.t.Context(), pool, func(tx pgx.Tx) error {
		ctx := n.t.Context()
		g, err := n.book.Grant(ctx, tx, wallet.Grant{Wallet: name, Amount: 10, Ends: wallet.At(ends), Roll: &wallet.Roll{Cap: 5}})
		lot = g.Lot
		if err != nil {
			return err
		}
		if _, err := n.holds.Place(ctx, tx, holds.Placement{Lines: []holds.Line{pgtest.Room("room", 1, 1000)}, TTL: time.Hour}); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, openOneLease)
		return err
	})
	require.NoError(n.t, err)
	return lot
}

func (n numbered) draw(pool *pgxpool.Pool, name string, amount int64) {
	n.t.Helper()
	err := pgx.BeginFunc(n.t.Context(), pool, func(tx pgx.Tx) error {
		_, err := n.ledger.Charge(n.t.Context(), tx, n.book.Charge(name, amount))
		return err
	})
	require.NoError(n.t, err)
}

func (n numbered) verify(pool *pgxpool.Pool) {
	n.t.Helper()
	r, err := n.ledger.Verify(n.t.Context(), pool, budget.VerifyOptions{})
	require.NoError(n.t, err)
	require.Empty(n.t, r.Differences)
}

// Logical replication carries no sequence. On the server that was switched to each call goes on at its first try, no number that is set
// aside is given to another lot, and each wallet goes on through its rollovers.
func TestSwitch_ByLogicalReplicationGoesOn(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	ctx := t.Context()
	n := numbering(t)
	_, before := pgtest.Start(t, pgserver.Options{Settings: map[string]string{"wal_level": "logical"}})
	ends := time.Now().Add(24 * time.Hour).Truncate(time.Second)
	for i := range 12 {
		n.make(before, fmt.Sprintf("old %d", i), ends)
	}
	pool := subscribed(t, before)
	require.EqualValues(t, 12, pgtest.Value[int64](t, pool, `select count(*) from metered.lot_rows`))

	report, err := metered.Validate(ctx, pool, "")
	require.NoError(t, err)
	require.ErrorIs(t, report.Err(), migrate.ErrDiffers)
	require.Equal(t, []metered.SchemaDifference{
		{Object: "sequence holds.no", Problem: "is behind its table", Want: "12 or more", Have: "0"},
		{Object: "sequence leases.no", Problem: "is behind its table", Want: "12 or more", Have: "0"},
		{Object: "sequence lot_rows.no", Problem: "is behind its table", Want: "24 or more", Have: "0"},
	}, report.Differences)

	// The next number is set aside for a rollover, and no row has it.
	require.EqualValues(t, 1, pgtest.Value[int64](t, pool, `select nextval(pg_get_serial_sequence('metered.lot_rows', 'no'))`))
	for i := range 30 {
		n.make(pool, fmt.Sprintf("new %d", i), ends)
	}
	require.EqualValues(t, 84, pgtest.Value[int64](t, pool, `select count(distinct x) from metered.lot_rows, unnest(array[no, roll_no]) x`),
		"no number stands twice")
	pgtest.SetClock(t, pool, ends.Add(time.Minute))
	for i := range 12 {
		n.draw(pool, fmt.Sprintf("old %d", i), 5)
	}
	for i := range 30 {
		n.draw(pool, fmt.Sprintf("new %d", i), 5)
	}
	n.verify(pool)
}

// Migrate moves the sequences on at once, and gives new numbers where one that was set aside had gone to another lot.
func TestMigrate_MovesSequencesOn(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	n := numbering(t)
	pool := pgtest.Open(t)
	ends := time.Now().Add(24 * time.Hour).Truncate(time.Second)
	first := n.make(pool, "ann", ends)
	second := n.make(pool, "bob", ends)
	for _, table := range []string{"holds", "leases", "lot_rows"} {
		_, err := pool.Exec(ctx, `select setval(pg_get_serial_sequence('metered.' || $1, 'no'), 1)`, table)
		require.NoError(t, err)
	}
	// As before numbers were looked at: ann's rollover has the number of bob's lot.
	_, err := pool.Exec(ctx, `update metered.lot_rows set roll_no = $1 where no = $2`, second, first)
	require.NoError(t, err)

	report, err := metered.Migrate(ctx, pool, metered.MigrateOptions{})
	require.NoError(t, err)
	require.Len(t, report.Repaired, 3)
	require.Equal(t, metered.SchemaDifference{Object: "sequence holds.no", Problem: "is behind its table", Want: "2 or more", Have: "1"}, report.Repaired[0])
	after, err := metered.Validate(ctx, pool, "")
	require.NoError(t, err)
	require.NoError(t, after.Err())
	require.Greater(t, n.make(pool, "cid", ends), int64(1000), "numbers that others may have drawn meanwhile are left out")

	pgtest.SetClock(t, pool, ends.Add(time.Minute))
	for _, name := range []string{"ann", "bob", "cid"} {
		n.draw(pool, name, 5)
	}
	n.verify(pool)
}

// A cell has the numbers from its own base on, whatever rows have moved to it.
func TestMigrate_KeepsTheNumbersOfACell(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	n := numbering(t)
	pool := pgtest.Open(t)
	ends := time.Now().Add(24 * time.Hour).Truncate(time.Second)
	_, err := pool.Exec(ctx, `insert into metered.cell (no, cells) values (1, 3)`)
	require.NoError(t, err)
	lot := n.make(pool, "ann", ends)
	_, err = pool.Exec(ctx, `update metered.lot_rows set roll_no = 3 * 1099511627776 where no = $1`, lot) // of cell 2
	require.NoError(t, err)
	n.release(ctx, pool)
	require.Equal(t, 1099511627776+1001, int(n.make(pool, "bob", ends)))
}

// release upgrades the schema to what it is.
func (n numbered) release(ctx context.Context, pool *pgxpool.Pool) {
	n.t.Helper()
	_, err := upgrade(ctx, pool, schema.Current(), migrate.Options{})
	require.NoError(n.t, err)
}

// What the look at sequences reads may be missing itself. That is a difference like others, and no error.
func TestValidate_NamesWhatTheLookAtSequencesLacks(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	for change, want := range map[string]string{
		"alter table metered.holds rename to gone":                   "table holds",
		"alter table metered.leases rename to gone":                  "table leases",
		"alter table metered.lot_rows rename to gone":                "table lot_rows",
		"alter table metered.lot_rows rename column roll_no to gone": "column lot_rows.roll_no",
		"alter table metered.cell rename to gone":                    "table cell",
		"alter table metered.cell rename column one to gone":         "column cell.one",
		"alter table metered.cell rename column no to gone":          "column cell.no",
		"drop function metered._numbers(text)":                       "function _numbers(text)",
		"drop function metered._largest_number(text)":                "function _largest_number(text)",
		"drop function metered.numbers_behind()":                     "function numbers_behind()",
	} {
		tx, err := pool.Begin(ctx)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, change)
		require.NoError(t, err, change)
		report, err := metered.Validate(ctx, tx, "")
		require.NoError(t, tx.Rollback(ctx))
		if assert.NoError(t, err, change) {
			assert.Contains(t, report.Differences, metered.SchemaDifference{Object: want, Problem: "is missing"}, change)
		}
	}
	pgtest.Execute(t, pool, "drop function metered._numbers(text)")
	_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{})
	require.NoError(t, err, "a function is made again")
	require.NoError(t, pgtest.Validate(t, pool).Err())
}
