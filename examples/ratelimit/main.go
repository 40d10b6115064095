// Command ratelimit is a public HTTP command, limited per client and for all clients together over several windows.
//
//	go run ./examples/ratelimit                           # shows it, and ends
//	go run ./examples/ratelimit -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i 127.0.0.1:8080/redeem -d '{"code": "WELCOME"}'
//	curl -i 127.0.0.1:8080/offers
//
// Read service.go, the command and its HTTP side, and offers.go, a limit from memory. main.go runs it on a throwaway
// Postgres, or on that of DATABASE_URL in a database of its own that it drops at the end.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

// usual limits. A sliding window has no beginning: no second hour's attempts can be put right after those of a first.
var usual = limits{
	Client: []budget.Limit{
		budget.PerWindow(10, time.Hour).Named("hourly"),
		budget.PerWindow(30, 24*time.Hour).Named("daily"),
	},
	All: []budget.Limit{
		budget.PerWindow(25, time.Hour).Named("all-hourly"),
		budget.PerWindow(400, 24*time.Hour).Named("all-daily"),
	},
}

func main() {
	listen := flag.String("listen", "", "serve at this address instead of the demonstration")
	flag.Parse()
	exampledb.With("ratelimit", exampledb.Options{SQL: vouchersSQL}, func(ctx context.Context, db *exampledb.Database) (err error) {
		if _, err := db.Pool.Exec(ctx, `insert into vouchers values ('WELCOME', 500), ('SUMMER', 1000)`); err != nil {
			return err
		}
		s, err := newService(db.Pool, usual)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.close()) }()
		return examplehttp.Run(ctx, *listen, s.handler(), func(base string) {
			fmt.Printf("redeem WELCOME or SUMMER:\ncurl -i %s/redeem -d '{\"code\": \"WELCOME\"}'\n", base)
		}, func(ctx context.Context, base string) error { return show(ctx, os.Stdout, base, s, db.Pool) })
	})
}

// show is the demonstration: it asks the service over HTTP, as the proxy in front of it would, for several clients.
func show(ctx context.Context, out io.Writer, base string, s *service, pool *pgxpool.Pool) error {
	fmt.Fprintln(out, "Each client may try 10 vouchers an hour and 30 a day, all together 25 an hour.")
	for _, try := range []struct{ what, code, key string }{
		{"a voucher", "WELCOME", "key-1"},
		{"the same request again: answered again, not charged again", "WELCOME", "key-1"},
		{"a guess: refused, and charged", "GUESS", ""},
	} {
		fmt.Fprintln(out, "\n"+try.what)
		printAnswer(out, ask(ctx, base, "192.0.2.1", try.code, try.key))
	}

	fmt.Fprintln(out, "\n30 more guesses of that client, at once")
	flood(ctx, out, base, 30, func(int) string { return "192.0.2.1" })
	fmt.Fprintln(out, "\n40 guesses of 20 other clients, at once")
	flood(ctx, out, base, 40, func(i int) string { return fmt.Sprintf("192.0.2.%d", 101+i%20) })

	verified, err := s.metered.Budget.Verify(ctx, pool, budget.VerifyOptions{})
	fmt.Fprintf(out, "\nverified: %d entries of %d scopes, %d differences\n", verified.Entries, verified.Scopes, len(verified.Differences))
	return err
}

// printAnswer shows an answer as curl -i does, as far as it is about limits.
func printAnswer(out io.Writer, a examplehttp.Answer) {
	fmt.Fprintf(out, "  %d %s\n", a.Status, http.StatusText(a.Status))
	for _, field := range []string{"RateLimit-Policy", "RateLimit", "Retry-After"} {
		if value := a.Header.Get(field); value != "" {
			fmt.Fprintf(out, "  %s: %s\n", field, value)
		}
	}
	fmt.Fprintf(out, "  %s\n", a.Body)
}

func ask(ctx context.Context, base, client, code, key string) examplehttp.Answer {
	c := examplehttp.Client{Base: base, HTTP: http.DefaultClient}
	return c.Do(ctx, http.MethodPost, "/redeem", map[string]string{"code": code},
		"X-Forwarded-For", client, "Idempotency-Key", key)
}

// flood sends n guesses at once, and prints how many of each status there were, and one refusal.
func flood(ctx context.Context, out io.Writer, base string, n int, client func(int) string) {
	statuses := map[int]int{}
	var refused examplehttp.Answer
	for _, a := range exampledb.AtOnce(n, func(i int) examplehttp.Answer { return ask(ctx, base, client(i), "GUESS", "") }) {
		if statuses[a.Status]++; a.Status == http.StatusTooManyRequests {
			refused = a
		}
	}
	fmt.Fprintf(out, "  admitted: %d, refused: %d\n", statuses[http.StatusNotFound], statuses[http.StatusTooManyRequests])
	if refused.Status != 0 {
		printAnswer(out, refused)
	}
}
