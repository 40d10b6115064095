package integration_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/integration_test/sqlc/documents"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/sqlmetered"
)

// Code that sqlc generates for pgx/v5 takes a command's transaction.
var _ documents.DBTX = (*metered.Tx)(nil)

func TestSqlc_QueriesRunInACommand(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	ctx := t.Context()
	schema, err := os.ReadFile("sqlc/schema.sql")
	require.NoError(t, err)
	_, err = pool.Exec(ctx, string(schema))
	require.NoError(t, err)
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()

	// save uses each kind of query that sqlc generates.
	save := func(ctx context.Context, q *documents.Queries, owner string) error {
		if err := q.DeleteDocuments(ctx, owner); err != nil {
			return err
		}
		doc, err := q.CreateDocument(ctx, documents.CreateDocumentParams{Owner: owner, Title: "draft"})
		if err != nil {
			return err
		}
		n, err := q.RenameDocument(ctx, documents.RenameDocumentParams{Owner: owner, Title: "draft", Title_2: "b"})
		require.Equal(t, int64(1), n)
		if err != nil {
			return err
		}
		if _, err := q.ImportDocuments(ctx, []documents.ImportDocumentsParams{{Owner: owner, Title: "a"}, {Owner: owner, Title: "c"}}); err != nil {
			return err
		}
		q.TouchDocuments(ctx, []documents.TouchDocumentsParams{{ID: doc.ID, Title: "d"}}).Exec(func(_ int, one error) { err = one })
		return err
	}
	titles := func(owner string) (titles []string) {
		docs, err := documents.New(pool).Documents(ctx, owner)
		require.NoError(t, err)
		for _, doc := range docs {
			titles = append(titles, doc.Title)
		}
		return titles
	}
	command := func(owner string, max int64) metered.Command {
		return metered.Command{ID: owner, Charges: []budget.Charge{{Scope: owner, Amount: 3, Limits: []budget.Limit{{Max: max, Window: time.Hour}}}}}
	}
	for owner, max := range map[string]int64{"let in": 3, "refused": 2} {
		_, err := metered.Do(ctx, c, command(owner, max), func(ctx context.Context, tx *metered.Tx) (any, error) {
			return nil, save(ctx, documents.New(tx), owner)
		})
		nested := owner + ", savepoint"
		_, err2 := metered.Do(ctx, c, command(nested, max), func(ctx context.Context, tx *metered.Tx) (any, error) {
			return nil, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return save(ctx, documents.New(nil).WithTx(tx), nested) })
		})
		inSQL := owner + ", database/sql"
		tx, err3 := db.BeginTx(ctx, nil)
		require.NoError(t, err3)
		_, err3 = sqlmetered.DoTx(ctx, c, tx, command(inSQL, max), func(ctx context.Context, tx *metered.Tx) (any, error) {
			return nil, save(ctx, documents.New(tx), inSQL)
		})
		require.NoError(t, sqlmetered.Commit(tx))
		for name, err := range map[string]error{owner: err, nested: err2, inSQL: err3} {
			if max < 3 {
				require.ErrorIs(t, err, budget.ErrExceeded, name)
				require.Empty(t, titles(name), name)
				continue
			}
			require.NoError(t, err, name)
			require.Equal(t, []string{"a", "c", "d"}, titles(name), name)
		}
	}
}
