// Command bench measures the cost of metering, mostly as ratios between things done in turns in one run, and reports
// which goals are met.
//
//	go -C bench run . [-short] [-figure name,name] [-list] [-out dir]
//
// It starts a throwaway Postgres with durable settings, or uses DATABASE_URL (the databases it makes there are
// dropped again). It ends with a table, and writes results.json to -out.
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
	short := flag.Bool("short", false, "a quick look, under a minute: fewer rounds, smaller tables")
	names := flag.String("figure", "", "measure only these, by name, separated by commas; defaults to all")
	list := flag.Bool("list", false, "list the figures")
	out := flag.String("out", "out", "the directory for results.json")
	flag.Parse()

	picked, err := pick(figures, *names)
	if err != nil {
		return err
	}
	if *list {
		for _, f := range picked {
			fmt.Printf("%s\t%s\t%s\n", f.name, f.goal, f.meaning)
		}
		return nil
	}
	server, err := pgserver.Start(ctx, pgserver.Options{Durable: true, Log: os.Stderr})
	if err != nil {
		return err
	}
	defer server.Stop()
	b := newBench(*short, server.ConnString())
	b.owned, b.thorough = server.Owned(), !*short || *names != ""
	defer b.close()
	if err := b.checkServer(ctx); err != nil {
		return err
	}
	results, failed := b.measure(ctx, picked)
	if ctx.Err() != nil {
		failed = errors.Join(failed, errors.New("interrupted: figures are missing"))
		ctx = context.WithoutCancel(ctx)
	}
	about, err := b.about(ctx, time.Since(b.began))
	if err != nil {
		return err
	}
	if err := save(*out, results); err != nil {
		return err
	}
	printTable(os.Stdout, results)
	printMisses(os.Stdout, results)
	fmt.Printf("\n%s\n%s is in %s\n", about, resultsFile, *out)
	return failed
}

// measure measures the figures in their order. One that fails is reported as not run,
// and its error is returned in the end.
func (b *bench) measure(ctx context.Context, picked []figure) ([]result, error) {
	var results []result
	var failed []error
	for i, f := range picked {
		b.logf("%d/%d %s: %s", i+1, len(picked), f.name, f.meaning)
		began := time.Now()
		s, err := f.measure(ctx, b)
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", f.name, err))
			s = samples{notRun: "failed: " + err.Error()}
		}
		r := f.result(s)
		results = append(results, r)
		b.logf("  %s %s, goal %s, in %.1f s", r.value(), r.Unit, r.Goal, time.Since(began).Seconds())
	}
	return results, errors.Join(failed...)
}

// about describes the run: server, machine and time.
func (b *bench) about(ctx context.Context, took time.Duration) (string, error) {
	server, err := b.server(ctx)
	if err != nil {
		return "", err
	}
	length := "full run"
	if b.short {
		length = "short run: fewer rounds, smaller tables, so only a rough look"
	}
	return fmt.Sprintf("%s; %s; took %.0f s", server, length, took.Seconds()), nil
}

const resultsFile = "results.json"

func save(out string, results []result) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, resultsFile), append(text, '\n'), 0o644)
}
