package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
)

// feedFlags are the flags of metered feed.
type feedFlags struct {
	budget.FeedOptions
	after             string
	follow, consumers bool
}

func (a *app) feedCmd() *cobra.Command {
	f := feedFlags{FeedOptions: budget.FeedOptions{Max: 50}}
	c := &cobra.Command{
		Use:   "feed",
		Short: "Read the entries of all scopes in their one order, or see who reads them",
		Long: `Feed lists the entries of all scopes, each once, in the one order that every reader sees. --after goes on behind an entry,
by its cursor. Behind the last entry it ends, or waits for the next ones (--follow). A purge tells those who come too late.

The first call begins the feed. With the application's grants it gives new entries their numbers. With those of reporting
it reads what has one. --consumers lists who consumes the feed in a program, and how far each one is.`,
		Example: `  metered feed
  metered feed --limit 0 --json
  metered feed --after 427187.2 --limit 3
  metered feed --consumers`,
		Args: cobra.NoArgs,
	}
	flags := c.Flags()
	flags.StringVar(&f.after, "after", "", "begin behind the entry with this cursor")
	flags.IntVarP(&f.Max, "limit", "n", f.Max, "list so many at most; 0 is all")
	flags.BoolVar(&f.follow, "follow", false,
		"go on with new entries until it is interrupted; lists all")
	flags.DurationVar(&f.Poll, "every", time.Second, "look for new ones so often, with --follow")
	flags.BoolVar(&f.consumers, "consumers", false, "list the consumers")
	return a.does(c, needReporting, func(ctx context.Context, _ []string) error {
		if f.Poll < time.Millisecond || f.Poll > time.Hour {
			return usagef("--every: %v is not from 1ms to 1h", f.Poll)
		}
		ledger, err := budget.New(budget.Config{Schema: a.schema})
		if err != nil {
			return err
		}
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			if f.consumers {
				return a.feedConsumers(ctx, pool, ledger)
			}
			return a.feed(ctx, pool, ledger, f)
		})
	})
}

func (a *app) feed(ctx context.Context, pool *pgxpool.Pool, ledger *budget.Ledger,
	f feedFlags) error {
	if f.follow {
		f.Max = 0
	}
	cursor := budget.FeedCursor(f.after)
	t := a.table("CURSOR", "SCOPE", "ENTRY", "AT", "KIND", "AMOUNT", "ABOUT", "NOTE")
	for {
		for e, err := range ledger.Feed(ctx, pool, cursor, f.FeedOptions) {
			switch {
			case err != nil:
				return err
			case a.json:
				if err := a.print(e); err != nil {
					return err
				}
			default:
				t.row(string(e.Cursor), e.Scope, e.Seq, e.At, e.Kind, e.Amount, about(e.Entry),
					noteText(e.Note))
			}
			cursor = e.Cursor
		}
		if err := t.flush(); err != nil || !f.follow {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(f.Poll):
		}
	}
}

func (a *app) feedConsumers(ctx context.Context, pool *pgxpool.Pool, ledger *budget.Ledger) error {
	consumers, err := ledger.FeedConsumers(ctx, pool)
	if err != nil {
		return err
	}
	t := a.table("CONSUMER", "CONSUMED", "UNREAD", "SINCE", "LOOKED", "PATIENCE")
	for _, c := range consumers {
		if a.json {
			if err := a.print(c); err != nil {
				return err
			}
			continue
		}
		t.row(c.Name, c.Consumed, c.Unread, c.UnreadSince, c.MovedAt, lasting(c.Patience))
	}
	return t.flush()
}
