package integration_test

import (
	"context"
	"database/sql"
	"os"
	"regexp"
	"strings"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jmoiron/sqlx"
	"github.com/stretchr/testify/require"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/integration_test/sqlc/documents"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/sqlmetered"
)

// Call is an application's row, which an ORM writes.
type Call struct {
	bun.BaseModel `gorm:"-" db:"-"`

	ID     string `gorm:"primaryKey" bun:",pk"`
	Tokens int64
}

// gateway is an application on one pool, with an ORM on top.
type gateway struct {
	pool   *pgxpool.Pool
	client *metered.Client
	db     *sql.DB
}

func newGateway(t *testing.T, mode pgx.QueryExecMode) *gateway {
	t.Helper()
	pool, client := pgtest.SetUp(t, metered.Config{}, pgtest.Options{MaxConns: 4, Config: func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = mode
	}})
	_, err := pool.Exec(t.Context(), "create table calls (id text primary key, tokens bigint not null)")
	require.NoError(t, err)
	db := sqlmetered.OpenDB(pool)
	db.SetMaxIdleConns(100) // as ORMs' tutorials do
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return &gateway{pool: pool, client: client, db: db}
}

// settle settles a call in the transaction in which write writes its row.
type settle func(ctx context.Context, session *metered.Session[any], row Call, used metered.Cost, fn metered.Func[any]) error

// check settles a call three times: its function fails, it is committed, and it is repeated.
func (g *gateway) check(t *testing.T, settle settle) {
	t.Helper()
	ctx := t.Context()
	session, err := metered.Open[any](ctx, g.client, metered.Reservation{
		ID: "call-1", Tenant: "ann", Name: "chat", Input: "a prompt",
		Lines: []holds.Line{{Scope: "tokens/ann", Amount: 100, Limits: []budget.Limit{budget.Lifetime(1000)}}},
	})
	require.NoError(t, err)
	defer session.Close()
	row, used := Call{ID: "call-1", Tokens: 42}, metered.Cost{Lines: []holds.Line{{Scope: "tokens/ann", Amount: 42}}}
	requireState := func(captured, open, rows int64) {
		t.Helper()
		all, err := g.client.Budget.Usage(ctx, g.pool, budget.Query{Scope: "tokens/ann"})
		require.NoError(t, err)
		require.Equal(t, [2]int64{captured, open}, [2]int64{all[0].Used, all[0].Held})
		require.EqualValues(t, rows, pgtest.Count(t, g.pool, "calls"))
	}
	fails := func(context.Context, *metered.Tx) (any, error) { return nil, pgtest.ErrOwn }
	require.ErrorIs(t, settle(ctx, session, row, used, fails), pgtest.ErrOwn)
	requireState(0, 100, 0)
	require.NoError(t, settle(ctx, session, row, used, nil))
	requireState(42, 0, 1)
	again, err := metered.Open[any](ctx, g.client, metered.Reservation{
		ID: "call-1", Tenant: "ann", Name: "chat", Input: "a prompt", Lines: []holds.Line{{Scope: "tokens/ann", Amount: 100}},
	})
	require.NoError(t, err)
	require.True(t, again.Finished())
	requireState(42, 0, 1)
}

func TestORM_Gorm(t *testing.T) {
	t.Parallel()
	for name, prepares := range map[string]bool{"plain": false, "PrepareStmt": true} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
			t.Run(name+" "+mode.String(), func(t *testing.T) {
				t.Parallel()
				g := newGateway(t, mode)
				orm, err := gorm.Open(postgres.New(postgres.Config{Conn: g.db}), &gorm.Config{PrepareStmt: prepares, Logger: logger.Discard})
				require.NoError(t, err)
				g.check(t, func(ctx context.Context, session *metered.Session[any], row Call, used metered.Cost, fn metered.Func[any]) error {
					return orm.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
						if err := tx.Create(&row).Error; err != nil {
							return err
						}
						_, err := sqlmetered.SettleTx(ctx, session, sqlTx(tx), used, fn)
						return err
					})
				})
			})
		}
	}
}

// sqlTx is the transaction of gorm's, with PrepareStmt and without.
func sqlTx(tx *gorm.DB) *sql.Tx {
	switch conn := tx.Statement.ConnPool.(type) {
	case *sql.Tx:
		return conn
	case *gorm.PreparedStmtTX:
		return conn.Tx.(*sql.Tx)
	}
	return nil // no transaction: a *budget.ArgumentError
}

func TestORM_Bun(t *testing.T) {
	t.Parallel()
	g := newGateway(t, pgx.QueryExecModeCacheStatement)
	orm := bun.NewDB(g.db, pgdialect.New())
	g.check(t, func(ctx context.Context, session *metered.Session[any], row Call, used metered.Cost, fn metered.Func[any]) error {
		return orm.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
			if _, err := tx.NewInsert().Model(&row).Exec(ctx); err != nil {
				return err
			}
			_, err := sqlmetered.SettleTx(ctx, session, tx.Tx, used, fn)
			return err
		})
	})
}

func TestORM_Sqlx(t *testing.T) {
	t.Parallel()
	g := newGateway(t, pgx.QueryExecModeCacheStatement)
	orm := sqlx.NewDb(g.db, "pgx")
	g.check(t, func(ctx context.Context, session *metered.Session[any], row Call, used metered.Cost, fn metered.Func[any]) error {
		tx, err := orm.BeginTxx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.NamedExecContext(ctx, "insert into calls values (:id, :tokens)", row); err != nil {
			return err
		}
		if _, err = sqlmetered.SettleTx(ctx, session, tx.Tx, used, fn); err != nil {
			return err
		}
		return sqlmetered.Commit(tx.Tx)
	})
}

func TestORM_Ent(t *testing.T) {
	t.Parallel()
	g := newGateway(t, pgx.QueryExecModeCacheStatement)
	g.check(t, func(ctx context.Context, session *metered.Session[any], row Call, used metered.Cost, fn metered.Func[any]) error {
		tx, err := g.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		driver := entsql.NewDriver(dialect.Postgres, entsql.Conn{ExecQuerier: tx})
		// client := ent.NewClient(ent.Driver(driver)) has the generated code. This is what it sends:
		insert, args := entsql.Dialect(dialect.Postgres).Insert("calls").Columns("id", "tokens").Values(row.ID, row.Tokens).Query()
		if err := driver.Exec(ctx, insert, args, nil); err != nil {
			return err
		}
		if _, err = sqlmetered.SettleTx(ctx, session, tx, used, fn); err != nil {
			return err
		}
		return sqlmetered.Commit(tx)
	})
}

// Code of sqlc for pgx takes a pgx.Tx.
func TestORM_Sqlc(t *testing.T) {
	t.Parallel()
	g := newGateway(t, pgx.QueryExecModeCacheStatement)
	schema, err := os.ReadFile("sqlc/schema.sql")
	require.NoError(t, err)
	_, err = g.pool.Exec(t.Context(), string(schema))
	require.NoError(t, err)
	g.check(t, func(ctx context.Context, session *metered.Session[any], row Call, used metered.Cost, fn metered.Func[any]) error {
		return pgx.BeginFunc(ctx, g.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "insert into calls values ($1, $2)", row.ID, row.Tokens); err != nil {
				return err
			}
			queries := documents.New(g.pool).WithTx(tx)
			if _, err := queries.CreateDocument(ctx, documents.CreateDocumentParams{Owner: "ann", Title: row.ID}); err != nil {
				return err
			}
			_, err := session.SettleTx(ctx, tx, used, fn)
			return err
		})
	})
}

// The page's code is that of these tests.
func TestORM_ThePageShowsTheTestedCode(t *testing.T) {
	t.Parallel()
	words := func(code string) string { return strings.Join(strings.Fields(code), " ") }
	page, err := os.ReadFile("../docs/orm.md")
	require.NoError(t, err)
	tests, err := os.ReadFile("orm_test.go")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	require.Greater(t, len(blocks), 4)
	for _, block := range blocks {
		require.Contains(t, words(string(tests)), words(block[1]))
	}
}
