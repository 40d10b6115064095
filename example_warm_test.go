package metered_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

// A pool for calls with short deadlines: its connections are warm before they are used, two are made before anybody asks, and a
// call that is cancelled keeps its connection.
func ExampleWarm() {
	ctx := context.Background()
	database, done := exampleDatabase()
	defer done()
	config, err := pgxpool.ParseConfig(database.Config().ConnString())
	if err != nil {
		log.Fatal(err)
	}
	config.MinIdleConns = 2
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return metered.Warm(ctx, conn, "") }
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: 5 * time.Second}
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	out, err := metered.Do(ctx, client, metered.Command{ID: "warm"}, func(context.Context, *metered.Tx) (string, error) { return "done", nil })
	fmt.Println(out.Result, err)
	// Output: done <nil>
}
