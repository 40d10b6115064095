package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// feedFigures are what the feed costs charges. No call of them touches its tables: what a consumer
// takes away is the time of the cores that it reads with.
var feedFigures = []figure{
	{"feed_vs_none", "times the rate", atLeast(0.98), "charges over 1,000 scopes, one client, where a consumer has read all entries before, against where nobody ever read the feed",
		feedCost(false)},
	{"feed_followed_vs_none", "times the rate", goal{}, "the same by 8 clients, while a consumer follows the feed by RunFeed, with a look each second, on the same cores",
		feedCost(true)},
}

// feedCost compares charges of a database whose feed has a consumer with those of another one. The
// consumer reads all that is new before each turn, and goes on in those of its database if follow.
func feedCost(follow bool) func(context.Context, *bench) (samples, error) {
	return func(ctx context.Context, b *bench) (s samples, err error) {
		c := b.sequential()
		if follow {
			c = b.concurrent(8)
		}
		cons, drop, err := b.contenders(ctx, options{conns: c.clients + 2}, oneOf(1000), entry{"feed", chargeMetered}, entry{"none", chargeMetered})
		if err != nil {
			return s, err
		}
		defer drop()
		reader := feedReader{site: cons[0].site}
		catchUp := func(ctx context.Context, _ int) error { return errors.Join(reader.pause(), reader.read(ctx, 0)) }
		cons[0].stock, cons[1].stock = catchUp, catchUp
		if follow {
			cons[0].stock = func(ctx context.Context, n int) error {
				err := catchUp(ctx, n)
				reader.follow(ctx)
				return err
			}
		}
		c.contenders = cons
		out, err := c.run(ctx, b)
		if err = errors.Join(err, reader.pause(), reader.read(ctx, 0)); err != nil {
			return s, err
		}
		var charged int64
		err = cons[0].site.QueryRow(ctx, "select count(*) from metered.ledger").Scan(&charged)
		if err == nil && reader.last != charged {
			err = fmt.Errorf("the consumer has read %d of %d entries", reader.last, charged)
		}
		return out.ratio("feed", "none"), err
	}
}

// feedReader is the consumer of a site's feed.
type feedReader struct {
	*site
	last int64 // number that it has read

	cancel func()     // while it follows
	ended  chan error // of following
}

// read reads what is new, or, with poll, until ctx ends.
func (r *feedReader) read(ctx context.Context, poll time.Duration) error {
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		return err
	}
	return ledger.RunFeed(ctx, r.Pool, "bench", budget.FeedOptions{Max: 1000, Poll: poll},
		func(_ context.Context, _ pgx.Tx, entries []budget.FeedEntry) error {
			r.last = entries[len(entries)-1].Number
			return nil
		})
}

func (r *feedReader) follow(ctx context.Context) {
	ctx, r.cancel = context.WithCancel(ctx)
	r.ended = make(chan error, 1)
	go func() { r.ended <- r.read(ctx, time.Second) }()
}

// pause ends following, if it does.
func (r *feedReader) pause() error {
	if r.cancel == nil {
		return nil
	}
	r.cancel()
	r.cancel = nil
	if err := <-r.ended; !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
