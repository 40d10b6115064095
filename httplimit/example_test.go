package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httplimit"
	"github.com/pgmetered/metered/internal/pgserver"
)

// limited lets each client address make so many requests, and tells it where it stands.
func limited(pool *pgxpool.Pool, ledger *budget.Ledger, next http.Handler, limits ...budget.Limit) (http.Handler, error) {
	policies, err := httplimit.New(httplimit.Config{Limits: limits})
	if err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		address, _, err := net.SplitHostPort(r.RemoteAddr)
		if err != nil {
			http.Error(w, "no address", http.StatusBadRequest)
			return
		}
		var receipt budget.Receipt
		err = pgx.BeginFunc(r.Context(), pool, func(tx pgx.Tx) (err error) {
			receipt, err = ledger.Charge(r.Context(), tx, budget.Charge{Scope: budget.ScopeKey("address", address, ""), Amount: 1, Limits: limits})
			return err
		})
		var exceeded *budget.ExceededError
		switch {
		case errors.As(err, &exceeded):
			policies.Refuse(w, exceeded)
		case err != nil:
			log.Print(err) // it names scopes and amounts: not for the client
			httplimit.Problem{Title: "Service Unavailable", Status: http.StatusServiceUnavailable}.Write(w)
		default:
			policies.Show(w.Header(), receipt)
			next.ServeHTTP(w, r)
		}
	}), nil
}

// A handler in front of another: counted exactly, over any number of processes.
func Example() {
	ctx := context.Background()
	pool, stop := exampleDatabase(ctx)
	defer stop()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	handler, err := limited(pool, ledger, http.NotFoundHandler(), budget.Limit{Name: "hourly", Max: 2, Window: time.Hour})
	if err != nil {
		log.Fatal(err)
	}
	for range 3 {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		left, _, _ := strings.Cut(w.Header().Get("RateLimit"), ";t=")
		fmt.Println(w.Code, left, "come back later:", w.Header().Get("Retry-After") != "")
	}
	// Output:
	// 404 "hourly";r=1 come back later: false
	// 404 "hourly";r=0 come back later: false
	// 429 "hourly";r=0 come back later: true
}

// exampleDatabase stands for a database of yours.
func exampleDatabase(ctx context.Context) (*pgxpool.Pool, func()) {
	server, err := pgserver.Start(ctx, pgserver.Options{Private: true})
	if err != nil {
		log.Fatal(err)
	}
	pool, err := pgxpool.New(ctx, server.ConnString())
	if err != nil {
		log.Fatal(err)
	}
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{}); err != nil {
		log.Fatal(err)
	}
	return pool, func() {
		pool.Close()
		_ = server.Stop()
	}
}
