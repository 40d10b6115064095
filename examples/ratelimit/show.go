package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// show is the demonstration: it asks the service over HTTP, as the proxy in front of it would, for several clients.
func show(ctx context.Context, out io.Writer, pool *pgxpool.Pool) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s, err := newService(pool, usual)
	if err != nil {
		return err
	}
	base, _, err := serve(ctx, "127.0.0.1:0", s)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "Each client may try 10 vouchers an hour and 30 a day, all together 25 an hour.")
	for _, try := range []struct{ what, code, key string }{
		{"a voucher", "WELCOME", "key-1"},
		{"the same request again: answered again, not charged again", "WELCOME", "key-1"},
		{"a guess: refused, and charged", "GUESS", ""},
	} {
		a, err := ask(ctx, base, "192.0.2.1", try.code, try.key)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "\n%s\n%s", try.what, a)
	}

	fmt.Fprintln(out, "\n30 more guesses of that client, at once")
	if err := flood(ctx, out, base, 30, func(int) string { return "192.0.2.1" }); err != nil {
		return err
	}
	fmt.Fprintln(out, "\n40 guesses of 20 other clients, at once")
	if err := flood(ctx, out, base, 40, func(i int) string { return fmt.Sprintf("192.0.2.%d", 101+i%20) }); err != nil {
		return err
	}

	verified, err := s.metered.Budget.Verify(ctx, pool, budget.VerifyOptions{})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\nverified: %d entries of %d scopes, %d differences\n", verified.Entries, verified.Scopes, len(verified.Differences))
	return nil
}

type answer struct {
	status int
	header http.Header
	body   string
}

// String is the answer as curl -i shows it, as far as it is about limits.
func (a answer) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %d %s\n", a.status, http.StatusText(a.status))
	for _, field := range []string{"RateLimit-Policy", "RateLimit", "Retry-After"} {
		if value := a.header.Get(field); value != "" {
			fmt.Fprintf(&b, "  %s: %s\n", field, value)
		}
	}
	fmt.Fprintf(&b, "  %s\n", a.body)
	return b.String()
}

func ask(ctx context.Context, base, client, code, key string) (answer, error) {
	body, err := json.Marshal(map[string]string{"code": code})
	if err != nil {
		return answer{}, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/redeem", bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	r.Header.Set("X-Forwarded-For", client)
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, strings.TrimSpace(string(text))}, err
}

// flood sends n guesses at once, and prints how many of each status there were, and one refusal.
func flood(ctx context.Context, out io.Writer, base string, n int, client func(int) string) error {
	answers, errs := make([]answer, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { answers[i], errs[i] = ask(ctx, base, client(i), "GUESS", "") })
	}
	wg.Wait()
	statuses := map[int]int{}
	var refused answer
	for i, a := range answers {
		if errs[i] != nil {
			return errs[i]
		}
		if statuses[a.status]++; a.status == http.StatusTooManyRequests {
			refused = a
		}
	}
	fmt.Fprintf(out, "  admitted: %d, refused: %d\n", statuses[http.StatusNotFound], statuses[http.StatusTooManyRequests])
	if refused.status != 0 {
		fmt.Fprint(out, refused)
	}
	return nil
}
