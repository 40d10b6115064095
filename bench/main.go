// Command bench measures what metering costs, as ratios between things done in
// turns in one run, and says which goals are met.
//
//	go -C bench run . [-short] [-only name] [-out dir]
//
// It starts a throwaway Postgres with durable settings, or uses DATABASE_URL (the
// databases it makes there are dropped again). It ends with a table and writes
// results.json to -out.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/pgmetered/metered/internal/pgserver"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var b bench
	flag.BoolVar(&b.short, "short", false, "a quick look: fewer rounds, smaller tables")
	only := flag.String("only", "", "measure only the figures whose name contains this")
	out := flag.String("out", "out", "the directory for results.json")
	flag.Parse()

	server, err := pgserver.Start(ctx, pgserver.Options{Durable: true, Log: os.Stderr})
	if err != nil {
		return err
	}
	defer server.Stop()
	b.connString = server.ConnString()

	var results []result
	for _, f := range figures {
		if !strings.Contains(f.name, *only) {
			continue
		}
		fmt.Fprintf(os.Stderr, "%s: %s\n", f.name, f.meaning)
		began := time.Now()
		r, err := f.measure(ctx, &b)
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		results = append(results, f.result(r))
		fmt.Fprintf(os.Stderr, "%s: %.3f in %.0fs\n", f.name, results[len(results)-1].Value, time.Since(began).Seconds())
	}
	if len(results) == 0 {
		return errors.New("no figure has such a name")
	}
	printTable(os.Stdout, results)
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(*out, "results.json"), append(text, '\n'), 0o644)
}
