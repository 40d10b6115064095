// Command signup gives each e-mail address to one person, who may still be filling in the form.
//
//	go run ./examples/signup                           # shows it, and ends
//	go run ./examples/signup -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i -c jar -b jar 127.0.0.1:8080/claims -d '{"email": "ann@example.com"}'
//
// A visitor claims an address and has some minutes to finish. Until then nobody else gets it. If the visitor cancels,
// or never comes back, somebody else can. Once it is confirmed it belongs to the new user for good.
//
// Read claims.go, and http.go for its HTTP side. main.go runs it on a throwaway Postgres, or on that of DATABASE_URL
// in a database of its own that it drops at the end.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
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
	exampledb.Main("signup", func(ctx context.Context) error { return run(ctx, *listen, *ttl) })
}

func run(ctx context.Context, listen string, ttl time.Duration) (err error) {
	db, err := exampledb.Open(ctx, "signup", exampledb.Options{SQL: usersSQL})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if listen == "" {
		return show(ctx, os.Stdout, db.Pool)
	}
	s, err := newSignup(db.Pool, ttl)
	if err != nil {
		return err
	}
	base, closed, err := serve(ctx, listen, s)
	if err != nil {
		return err
	}
	fmt.Printf("curl -i -c jar -b jar %s/claims -d '{\"email\": \"ann@example.com\"}'\n", base)
	return <-closed
}

func newSignup(pool *pgxpool.Pool, ttl time.Duration) (*signup, error) {
	client, err := metered.New(pool, metered.Config{})
	return &signup{pool, client, ttl}, err
}

// serve serves until ctx is done, and then finishes its requests. Abandoned addresses are free when they are due: the
// sweep only writes it down.
func serve(ctx context.Context, address string, s *signup) (base string, closed <-chan error, err error) {
	exampledb.Every(ctx, 10*time.Second, func(ctx context.Context) error {
		_, err := s.metered.Holds.Sweep(ctx, s.pool, holds.SweepOptions{})
		return err
	})
	return examplehttp.Serve(ctx, address, &http.Server{Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second})
}
