package integration_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// migrateEnv names the database that a process of TestMigrate_… is to migrate.
const migrateEnv = "METERED_INTEGRATION_MIGRATE"

func TestMain(m *testing.M) {
	if connString := os.Getenv(migrateEnv); connString != "" {
		if err := migrate(context.Background(), connString, 2); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if connString := os.Getenv(gatedEnv); connString != "" {
		if err := workGated(context.Background(), connString); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1) // it works until it is killed
	}
	if connString := os.Getenv(moverEnv); connString != "" {
		fmt.Fprintln(os.Stderr, keepMoving(context.Background(), connString))
		os.Exit(1) // it moves until it is killed
	}
	os.Exit(m.Run())
}

// migrate migrates with n goroutines at once, each on connections of its own.
func migrate(ctx context.Context, connString string, n int) error {
	errs := make(chan error, n)
	for range n {
		go func() {
			pool, err := pgxpool.New(ctx, connString)
			if err == nil {
				_, err = metered.Migrate(ctx, pool, metered.MigrateOptions{River: true})
				pool.Close()
			}
			errs <- err
		}()
	}
	var first error
	for range n {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}

func TestMigrate_IsSafeFromManyProcessesAtOnce(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	server, err := pgserver.Start(t.Context(), pgserver.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	ctx := t.Context()
	admin, err := pgx.Connect(ctx, server.ConnString())
	require.NoError(t, err)
	defer admin.Close(context.Background())
	name := fmt.Sprintf("metered_migrate_%d", time.Now().UnixNano())
	_, err = admin.Exec(ctx, "create database "+name)
	require.NoError(t, err)
	defer func() { _, _ = admin.Exec(context.Background(), "drop database "+name+" with (force)") }()

	config, err := pgx.ParseConfig(server.ConnString())
	require.NoError(t, err)
	connString := fmt.Sprintf("host='%s' port=%d user='%s' password='%s' dbname=%s sslmode=prefer",
		config.Host, config.Port, config.User, config.Password, name)
	var wg sync.WaitGroup
	for range pgtest.Size(3, 6) {
		wg.Go(func() {
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), migrateEnv+"="+connString)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	wg.Go(func() {
		if err := migrate(ctx, connString, pgtest.Size(8, 16)); err != nil {
			t.Error(err)
		}
	})
	wg.Wait()
	conn, err := pgx.Connect(ctx, connString)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var versions int
	require.NoError(t, conn.QueryRow(ctx, "select count(*) from metered.schema_version").Scan(&versions))
	require.Equal(t, 1, versions)
	require.NoError(t, migrate(ctx, connString, 1))
}
