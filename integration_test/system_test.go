package integration_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// system is a database with everything in it, and a client.
type system struct {
	t    *testing.T
	pool *pgxpool.Pool
	c    *metered.Client
}

type process struct {
	ID string `json:"id"`
}

func (process) Kind() string { return "process" }

// open makes a database of its own on the server and migrates it.
func open(t *testing.T, connString string, cfg metered.Config) *system {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	admin, err := pgx.Connect(ctx, connString)
	require.NoError(t, err)
	defer admin.Close(ctx)
	name := fmt.Sprintf("metered_integration_%d", time.Now().UnixNano())
	_, err = admin.Exec(ctx, "create database "+name)
	require.NoError(t, err)
	t.Cleanup(func() {
		admin, err := pgx.Connect(context.Background(), connString)
		if err == nil {
			_, _ = admin.Exec(context.Background(), "drop database "+name+" with (force)")
			_ = admin.Close(context.Background())
		}
	})
	config, err := pgxpool.ParseConfig(connString)
	require.NoError(t, err)
	config.ConnConfig.Database = name
	config.MaxConns = 12
	pool, err := pgxpool.NewWithConfig(ctx, config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = metered.Migrate(ctx, pool, metered.MigrateOptions{River: true})
	require.NoError(t, err)
	_, err = pool.Exec(ctx, `create table uploads (id text primary key, scope text not null, amount bigint not null)`)
	require.NoError(t, err)
	cfg.River, err = river.NewClient(riverpgxv5.New(pool), &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	require.NoError(t, err)
	c, err := metered.New(pool, cfg)
	require.NoError(t, err)
	return &system{t, pool, c}
}

// mint returns n new tokens.
func (s *system) mint(n int) []string {
	s.t.Helper()
	mints := make([]tokens.Mint, n)
	for i := range mints {
		mints[i] = tokens.Mint{Purpose: "upload", Subject: "ann", TTL: time.Hour}
	}
	texts := make([]string, n)
	require.NoError(s.t, pgx.BeginFunc(s.t.Context(), s.pool, func(tx pgx.Tx) error {
		minted, err := s.c.Tokens.MintMany(s.t.Context(), tx, mints)
		for i, m := range minted {
			texts[i] = m.Token.Reveal()
		}
		return err
	}))
	return texts
}

// upload is a whole command: a token, a row, a job once per command, and a charge
// on the command's scope and on one for all.
func upload(id, scope, token string, amount int64) (metered.Command, metered.Func[int64]) {
	limit := []budget.Limit{{Max: 1 << 40, Window: time.Hour}}
	return metered.Command{
			ID: id, Name: "upload", Input: amount,
			Token:   &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: token},
			Charges: []budget.Charge{{Scope: scope, Amount: amount, Limits: limit}, {Scope: "all", Amount: amount, Limits: limit}},
		}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
			if _, err := tx.Exec(ctx, `insert into uploads values ($1, $2, $3)`, id, scope, amount); err != nil {
				return 0, err
			}
			_, err := tx.Enqueue(ctx, process{id}, &jobs.Options{Key: id})
			return amount, err
		}
}

// verify checks that all that there is agrees with the rows of uploads.
func (s *system) verify() (rows int) {
	s.t.Helper()
	ctx := s.t.Context()
	report, err := s.c.Budget.Verify(ctx, s.pool, budget.VerifyOptions{})
	require.NoError(s.t, err)
	require.Empty(s.t, report.Differences)
	for what, sql := range map[string]string{
		"operations without rows": `select count(*) from metered.operations o left join uploads u using (id) where u.id is null`,
		"rows without operations": `select count(*) from uploads u left join metered.operations o using (id) where o.id is null`,
		"entries without rows":    `select count(*) from metered.ledger l left join uploads u on u.id = l.operation where u.id is null`,
		"rows without two entries": `select count(*) from uploads u where 2 <> (select count(*) from metered.ledger l
			where l.operation = u.id and l.amount = u.amount and l.scope in (u.scope, 'all'))`,
		"rows without a job": `select count(*) from uploads u where 1 <> (select count(*) from river_job j where j.args->>'id' = u.id)`,
		"jobs without rows":  `select count(*) from river_job j left join uploads u on u.id = j.args->>'id' where u.id is null`,
		"keys and rows":      `select (select count(*) from metered.job_keys) - count(*) from uploads`,
		"tokens and rows":    `select (select sum(used) from metered.tokens) - count(*) from uploads`,
		"sum of all":         `select (select coalesce(sum(amount), 0) from metered.ledger where scope = 'all') - coalesce(sum(amount), 0) from uploads`,
		"spent of all": `select (select spent from metered.ledger where scope = 'all' order by seq desc limit 1) -
			coalesce(sum(amount), 0) from uploads`,
	} {
		var n *int64
		require.NoError(s.t, s.pool.QueryRow(ctx, sql).Scan(&n), what)
		require.True(s.t, n == nil || *n == 0, "%s: %d", what, n)
	}
	require.NoError(s.t, s.pool.QueryRow(ctx, `select count(*) from uploads`).Scan(&rows))
	return rows
}

// exercise makes the calls of a program, on any server.
func exercise(t *testing.T, connString string) {
	s := open(t, connString, metered.Config{MaxAttempts: 100})
	ctx := t.Context()
	const n = 60
	texts := s.mint(n + 1)
	var wg sync.WaitGroup
	var admitted atomic.Int64
	for i := range n {
		for range 2 { // each command twice at once
			wg.Go(func() {
				cmd, fn := upload(fmt.Sprint(i), fmt.Sprint("org/", i%7), texts[i], int64(i+1))
				cmd.Isolation = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead}[i%3]
				cmd.IssuedAt = time.Date(2030, 1, 1, 0, 0, i, 0, time.UTC).AddDate(-10, 0, 0)
				out, err := metered.Do(ctx, s.c, cmd, fn)
				if err != nil {
					t.Error(err)
				} else if !out.Replayed {
					admitted.Add(1)
				}
			})
		}
	}
	wg.Wait()
	require.EqualValues(t, n, admitted.Load())
	require.Equal(t, n, s.verify())

	cmd, fn := upload("refused", "org/0", texts[n], 1)
	cmd.Charges[0].Limits = []budget.Limit{budget.Lifetime(1)}
	_, err := metered.Do(ctx, s.c, cmd, fn)
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = s.c.Tokens.Inspect(ctx, s.pool, "upload", "ann", texts[n])
	require.NoError(t, err, "its token is unspent")
	_, err = metered.Do(ctx, s.c, metered.Command{ID: "commits"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Conn().Exec(ctx, "commit")
		return nil, err
	})
	require.Error(t, err)
	require.Equal(t, n, s.verify())
	_, err = purge.Operations.Delete(ctx, s.pool, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
}
