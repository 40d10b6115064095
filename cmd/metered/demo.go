package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/pgserver"
)

func (a *app) demoCmd() *cobra.Command {
	f := pageFlags{zone: "UTC", cfg: console.Config{Limits: demoLimits}}
	rate := 50
	c := &cobra.Command{
		Use:   "demo",
		Short: "Start a throwaway Postgres, a load on it, and the page",
		Long: `Demo starts a Postgres of its own, migrates it, runs a made-up load of commands, holds, leases, wallets, sessions,
jobs and refusals, and serves the page. Its connection string is printed, for the other commands. Ctrl-C ends all of it, and
removes the Postgres. It needs Postgres on this machine, or the network once, to fetch it.`,
		Example: `  metered demo
  metered demo --listen 127.0.0.1:0 --rate 100`,
	}
	c.Flags().StringVar(&f.listen, "listen", defaultListen,
		"the address to serve the page at; port 0 is any that is free")
	c.Flags().IntVar(&rate, "rate", rate,
		"how many acts of the load are begun in a second, 1 to 10000")
	return a.does(c, needNothing, func(ctx context.Context, _ []string) error {
		if rate < 1 || rate > 10_000 {
			return usagef("--rate: %d is not from 1 to 10000", rate)
		}
		err := a.demo(ctx, f, rate)
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			return found(exitDone) // before it was ready
		}
		return err
	})
}

func (a *app) demo(ctx context.Context, f pageFlags, rate int) (err error) {
	server, err := pgserver.Start(ctx, pgserver.Options{TCP: true, Private: true, Log: a.err})
	if err != nil {
		return err
	}
	defer func() {
		if stopped := server.Stop(); stopped != nil {
			err = stopped
		}
	}()
	config, err := pgxpool.ParseConfig(server.ConnString())
	if err != nil {
		return err
	}
	config.MaxConns = 20
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := metered.Migrate(ctx, pool,
		metered.MigrateOptions{Schema: a.schema, River: true}); err != nil {
		return err
	}
	// The load ends after the page, in its own time.
	load, err := startLoad(context.WithoutCancel(ctx), pool, a.schema, rate, a.err)
	if err != nil {
		return err
	}
	defer func() {
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		if stopped := load.stop(within); stopped != nil && err == nil {
			err = stopped
		}
	}()
	return a.serve(ctx, pool, f, func(address string) error {
		if a.json {
			return a.print(map[string]string{"page": address, "database_url": server.ConnString()})
		}
		_, err := fmt.Fprintf(a.out, "The page is at %s\n\nIn another terminal:\n\n  export DATABASE_URL=%s\n  metered top\n\nCtrl-C ends it.\n",
			address, shellWord(server.ConnString()))
		return err
	})
}
