package main

import (
	"context"
	"fmt"
	"io"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

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
