// Command bench measures the cost of metering, mostly as ratios between things done in turns in one
// run, and reports which goals are met.
//
//	go -C bench run . [-short] [-figure name,name] [-list] [-write]
//
// It starts a throwaway Postgres with durable settings, or uses DATABASE_URL (the databases it
// makes there are dropped again). It ends with a table.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

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
	open := flag.Duration("open", 0, "how long each contender runs beside an open snapshot; defaults to 15s, and to 1s in a short run")
	plot := flag.String("plot", "", "draw the rates of charges and of a counter row beside an open snapshot into this file, as SVG, when their figures are measured")
	list := flag.Bool("list", false, "list the figures")
	into := flag.Bool("write", false, "write the values into the pages that quote them, with the directory bench as the current one")
	flag.Parse()

	picked, err := pick(figures, *names)
	if err != nil {
		return err
	}
	if *into && *short {
		return errors.New("-write is of a full run, and not of a -short one")
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
	b.openFor = cmp.Or(*open, time.Duration(b.pick(15, 1))*time.Second)
	b.plot = *plot
	defer b.close()
	about, err := b.server(ctx)
	if err != nil {
		return err
	}
	results, failed := b.measure(ctx, picked)
	if ctx.Err() != nil {
		failed = errors.Join(failed, errors.New("interrupted: figures are missing"))
	}
	printTable(os.Stdout, results)
	printMisses(os.Stdout, results)
	length := "full run"
	if b.short {
		length = "short run: fewer rounds, smaller tables, so only a rough look"
	}
	fmt.Printf("\n%s; %s; took %.0f s\n", about, length, time.Since(b.began).Seconds())
	if *into && failed == nil {
		if *names != "" {
			about = ""
		}
		failed = write(results, about)
	}
	return failed
}

// measure measures the figures in their order. One that fails is reported as not run, and its error
// is returned in the end.
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
			s = samples{}
		}
		if err != nil && !errors.As(err, &s.notRun) {
			failed = append(failed, fmt.Errorf("%s: %w", f.name, err))
			s.notRun = notRun("failed: " + err.Error())
		}
		r := result{f, s}
		results = append(results, r)
		b.logf("  %s %s, goal %s, in %.1f s", r.value(), r.unit, r.goal, time.Since(began).Seconds())
	}
	return results, errors.Join(failed...)
}

// neededConnections are those of the largest comparison: three contenders with 64 clients each, or
// five with 32, and the watchers.
const neededConnections = 220

const serverSQL = `
select format('Postgres %s, fsync %s, synchronous_commit %s, full_page_writes %s', current_setting('server_version'),
        current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes')),
    'off' in (current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes')),
    current_setting('max_connections')::int`

// server describes the server and the machine. It warns of settings that make commits cheaper than
// durable ones, and of too few connections, since some figures do with less.
func (b *bench) server(ctx context.Context) (string, error) {
	conn, err := pgx.Connect(ctx, b.connString)
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var about string
	var cheap bool
	var most int
	err = conn.QueryRow(ctx, serverSQL).Scan(&about, &cheap, &most)
	if cheap {
		b.logf("WARNING: %s: commits here are not durable, and no figure compares with those of a server where they are", about)
	}
	if err == nil && most < neededConnections {
		b.logf("max_connections is %d: figures with many clients need %d, and will fail", most, neededConnections)
	}
	return fmt.Sprintf("%s; %d cores, %s", about, runtime.NumCPU(), runtime.Version()), err
}
