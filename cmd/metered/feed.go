package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
)

// feedFlags are the flags of metered feed.
type feedFlags struct {
	budget.FeedOptions
	after, consumer   string
	follow, consumers bool
}

func (a *app) feedCmd() *cobra.Command {
	f := feedFlags{FeedOptions: budget.FeedOptions{Max: 50}}
	c := &cobra.Command{
		Use:   "feed",
		Short: "Read the entries of all scopes in their one order, or see who reads them",
		Long: `Feed lists the entries of all scopes, each once, in the one order that every reader sees. --after goes on behind an entry,
by its cursor. Behind the last entry it ends, or waits for the next ones (--follow). A purge tells those who come too late.

--consumer reads for a consumer, from the place where it was: what was printed is consumed. After a kill some entries are
printed again, and none is missed. A purge waits for the consumer, until somebody drops it:
select metered.drop_feed_consumer('NAME'). --consumers lists all, and how far each one is.

The first call begins the feed. With the application's grants it gives new entries their numbers. With those of reporting
it reads what has one.`,
		Example: `  metered feed
  metered feed --limit 0 --json
  metered feed --after 427187.2 --limit 3
  metered feed --json --consumer warehouse
  metered feed --consumers`,
		Args: cobra.NoArgs,
	}
	flags := c.Flags()
	flags.StringVar(&f.after, "after", "", "begin behind the entry with this cursor")
	flags.IntVarP(&f.Max, "limit", "n", f.Max, "list so many at most; 0 is all")
	flags.BoolVar(&f.follow, "follow", false,
		"go on with new entries until it is interrupted; lists all")
	flags.DurationVar(&f.Poll, "every", time.Second, "look for new ones so often, with --follow")
	flags.StringVar(&f.consumer, "consumer", "", "go on where this consumer is, and list all")
	flags.BoolVar(&f.FromNow, "from-now", false, "a new --consumer begins behind the last entry")
	flags.BoolVar(&f.consumers, "consumers", false, "list the consumers")
	for _, other := range []string{"after", "limit", "consumers"} {
		c.MarkFlagsMutuallyExclusive("consumer", other)
	}
	return a.does(c, needReporting, func(ctx context.Context, _ []string) error {
		if f.Poll < time.Millisecond || f.Poll > time.Hour {
			return usagef("--every: %v is not from 1ms to 1h", f.Poll)
		}
		if f.FromNow && f.consumer == "" {
			return usagef("--from-now is of a --consumer")
		}
		ledger, err := budget.New(budget.Config{Schema: a.schema})
		if err != nil {
			return err
		}
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			switch {
			case f.consumers:
				return a.feedConsumers(ctx, pool, ledger)
			case f.consumer != "":
				a.needs = needApplication
				return a.consume(ctx, pool, ledger, f)
			}
			return a.feed(ctx, pool, ledger, f)
		})
	})
}

// feedTable prints entries, and what it has after each page.
type feedTable struct {
	*app
	*table
}

func (a *app) feedTable() feedTable {
	return feedTable{a, a.table("CURSOR", "SCOPE", "ENTRY", "AT", "KIND", "AMOUNT", "ABOUT", "NOTE")}
}

func (t feedTable) entry(e budget.FeedEntry) error {
	if t.json {
		return t.print(e)
	}
	t.row(string(e.Cursor), e.Scope, e.Seq, e.At, e.Kind, e.Amount, about(e.Entry), noteText(e.Note))
	return nil
}

// consume prints what a consumer has not consumed. Output that fails is not consumed.
func (a *app) consume(ctx context.Context, pool *pgxpool.Pool, ledger *budget.Ledger,
	f feedFlags) error {
	t := a.feedTable()
	if f.Max = 0; !f.follow {
		f.Poll = 0
	}
	return ledger.RunFeed(ctx, pool, f.consumer, f.FeedOptions,
		func(_ context.Context, _ pgx.Tx, entries []budget.FeedEntry) error {
			for _, e := range entries {
				if err := t.entry(e); err != nil {
					return err
				}
			}
			return t.flush()
		})
}

func (a *app) feed(ctx context.Context, pool *pgxpool.Pool, ledger *budget.Ledger,
	f feedFlags) error {
	if f.follow {
		f.Max = 0
		if a.may(ctx, pool, []string{"number_feed"}) != nil {
			fmt.Fprintln(a.err, "This role gives no numbers: an entry is listed once another one has given it its number.")
		}
	}
	cursor := budget.FeedCursor(f.after)
	t := a.feedTable()
	for {
		for e, err := range ledger.Feed(ctx, pool, cursor, f.FeedOptions) {
			if err == nil {
				err = t.entry(e)
			}
			if err != nil {
				return err
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
