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
	ttl := flag.Duration("ttl", 15*time.Minute, "with -listen: how long a visitor has to finish")
	flag.Parse()
	if *listen == "" {
		*ttl = 2 * time.Second // nobody wants to wait for long
	}
	exampledb.With("signup", exampledb.Options{SQL: usersSQL}, func(ctx context.Context, db *exampledb.Database) error {
		s, err := newSignup(db.Pool, *ttl)
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
		}, func(ctx context.Context, base string) error { return show(ctx, os.Stdout, base, *ttl) })
	})
}

func newSignup(pool *pgxpool.Pool, ttl time.Duration) (*signup, error) {
	client, err := metered.New(pool, metered.Config{})
	return &signup{pool, client, ttl}, err
}
