package httpmetered_test

import (
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
)

// limited lets each client address make so many requests, and tells it where it stands.
func limited(pool *pgxpool.Pool, ledger *budget.Ledger, next http.Handler, limits ...budget.Limit) (http.Handler, error) {
	policies, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: limits})
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
		if err != nil {
			if status := policies.Write(w, err); status >= http.StatusInternalServerError {
				log.Print(err) // it names scopes and amounts: not for the client
			}
			return
		}
		policies.Show(w.Header(), receipt)
		next.ServeHTTP(w, r)
	}), nil
}

// A handler in front of another: counted exactly, over any number of processes.
func Example() {
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	handler, err := limited(pool, ledger, http.NotFoundHandler(), budget.PerWindow(2, time.Hour).Named("hourly"))
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
