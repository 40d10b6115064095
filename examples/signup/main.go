// Command signup gives each e-mail address to one person, who may still be filling in the form.
//
//	go run ./examples/signup                           # shows it, and ends
//	go run ./examples/signup -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i -c jar -b jar 127.0.0.1:8080/claims -d '{"email": "ann@example.com"}'
//
// Read claims.go, and http.go for its HTTP side. main.go runs it on a throwaway Postgres, or on that of DATABASE_URL
// in a database of its own that it drops at the end.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/holds"
)

func main() {
	listen := flag.String("listen", "", "serve at this address instead of the demonstration")
	flag.Parse()
	ttl := 15 * time.Minute
	if *listen == "" {
		ttl = 2 * time.Second // nobody wants to wait for long
	}
	exampledb.With("signup", exampledb.Options{SQL: usersSQL}, func(ctx context.Context, db *exampledb.Database) error {
		s, err := newSignup(db.Pool, ttl)
		if err != nil {
			return err
		}
		// Abandoned addresses are free when they are due: the sweep only writes it down.
		exampledb.Every(ctx, 10*time.Second, func(ctx context.Context) error {
			_, err := s.metered.Holds.Sweep(ctx, s.pool, holds.SweepOptions{})
			return err
		})
		return examplehttp.Run(ctx, *listen, s.handler(), func(base string) {
			fmt.Printf("curl -i -c jar -b jar %s/claims -d '{\"email\": \"ann@example.com\"}'\n", base)
		}, func(ctx context.Context, base string) error { return show(ctx, os.Stdout, base, ttl) })
	})
}

func newSignup(pool *pgxpool.Pool, ttl time.Duration) (*signup, error) {
	client, err := metered.New(pool, metered.Config{})
	return &signup{pool, client, ttl}, err
}

// show is the demonstration, of two visitors and a crowd.
func show(ctx context.Context, out io.Writer, base string, ttl time.Duration) error {
	ann, ben := examplehttp.NewClient(base), examplehttp.NewClient(base)
	ask := func(who string, c *examplehttp.Client, method, path string, body any) (id string) {
		a := c.Do(ctx, method, path, body)
		fmt.Fprintf(out, "%s: %s %s %v\n     %d %s\n", who, method, path, body, a.Status, a.Body)
		return a.Field("id")
	}
	fmt.Fprintln(out, "Ann claims an address, twice: it is the same claim, with the same deadline.")
	first := ask("Ann", ann, "POST", "/claims", map[string]string{"email": "ann@example.com"})
	ask("Ann", ann, "POST", "/claims", map[string]string{"email": "Ann@Example.com"})
	fmt.Fprintln(out, "\nBen cannot have it, nor do anything with Ann's claim.")
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "ANN@example.com"})
	ask("Ben", ben, "DELETE", "/claims/"+first, nil)
	fmt.Fprintln(out, "\nAnn confirms, twice: one user.")
	for range 2 {
		ask("Ann", ann, "POST", "/claims/"+first+"/confirm", map[string]string{"name": "Ann"})
	}
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "ann@example.com"})

	fmt.Fprintln(out, "\nBen claims another one, and cancels: Ann can have it.")
	second := ask("Ben", ben, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	ask("Ben", ben, "DELETE", "/claims/"+second, nil)
	third := ask("Ann", ann, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	fmt.Fprintln(out, "\nAnn goes away. When her time is over Ben can have it, and Ann comes too late.")
	select {
	case <-time.After(ttl):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	ask("Ann", ann, "POST", "/claims/"+third+"/confirm", map[string]string{"name": "Ann's shop"})

	const racers = 20
	fmt.Fprintf(out, "\n%d people want the same address at the same moment.\n", racers)
	counts := map[int]int{}
	for _, status := range exampledb.AtOnce(racers, func(int) int {
		return examplehttp.NewClient(base).Do(ctx, "POST", "/claims", map[string]string{"email": "info@example.com"}).Status
	}) {
		counts[status]++
	}
	fmt.Fprintln(out, "status and how many:", counts)
	return ctx.Err()
}
