package pgtest

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgserver"
)

// Start starts a server of t's own, and returns a pool on its database, which has the schema.
func Start(t testing.TB, opts pgserver.Options) (*pgserver.Server, *pgxpool.Pool) {
	t.Helper()
	opts.Private = true
	server, err := pgserver.Start(t.Context(), opts)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	pool := serve(t, server)
	if err := prepare(t.Context(), pool); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return server, pool
}

// Replicate starts a primary with the schema, and a replica that streams from it.
func Replicate(t testing.TB, opts pgserver.Options) (primary, replica *pgxpool.Pool) {
	t.Helper()
	server, primary := Start(t, opts)
	return primary, Standby(t, server, opts)
}

// Standby starts a replica of a server.
func Standby(t testing.TB, primary *pgserver.Server, opts pgserver.Options) *pgxpool.Pool {
	t.Helper()
	opts.Private = true
	standby, err := pgserver.StartStandby(t.Context(), primary, opts)
	if errors.Is(err, pgserver.ErrNoBasebackup) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return serve(t, standby)
}

// serve returns a pool on a server, which is stopped when the test ends.
func serve(t testing.TB, server *pgserver.Server) *pgxpool.Pool {
	t.Helper()
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	pool, err := pgxpool.New(context.Background(), server.ConnString())
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(pool.Close)
	return pool
}
