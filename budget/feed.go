package budget

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// FeedCursor is a place in the feed: behind an entry, as text that a program may store anywhere. ""
// is the beginning. It says where the entry had its number, so that a place on a server whose last
// entries were lost is found to be one.
type FeedCursor string

// FeedEntry is an entry of the feed.
type FeedEntry struct {
	// Number is 1 for the first entry of the feed, and one more for each entry after it. Every
	// reader sees the same number.
	Number int64 `json:"number"`

	// Cursor is the place behind the entry.
	Cursor FeedCursor `json:"cursor"`

	Entry
}

// FeedOptions says how the feed is read. The zero value has the documented defaults.
type FeedOptions struct {
	// Max is the most entries: of the iterator of Feed, where 0 is all, and of a call of
	// ConsumeFeed, from 1 to 1,000, where it defaults to 500.
	Max int

	// Patience is how much longer than others a purge keeps entries that the consumer has not
	// consumed, up to 366 days. After that they are purged, and ConsumeFeed is ErrFeedGap. Each
	// call sets it anew. Defaults to 7 days.
	Patience time.Duration

	// FromNow has a new consumer begin behind the last entry that has a number. By default it
	// begins with the first one that is there.
	FromNow bool

	// Poll has RunFeed look again after this time where there was nothing new, from 1ms to 1h.
	// Without it, RunFeed returns then.
	Poll time.Duration
}

// FeedConsumer says how far a consumer is.
type FeedConsumer struct {
	// Name is the name that the consumer goes by in ConsumeFeed.
	Name string `json:"name"`

	// Consumed is the number of the last entry that it has consumed.
	Consumed int64 `json:"consumed"`

	// Unread are the entries that have a number, and that it has not consumed.
	Unread int64 `json:"unread"`

	// UnreadSince is the time of the first of them. It is zero if there is none.
	UnreadSince time.Time `json:"unread_since,omitzero"`

	// MovedAt is when the consumer looked last, within 10 seconds.
	MovedAt time.Time `json:"moved_at"`

	// NumberedTo is a time before which all entries that were committed have a number.
	NumberedTo time.Time `json:"numbered_to,omitzero"`

	// Patience is its FeedOptions.Patience.
	Patience time.Duration `json:"patience"`
}

// FeedGapError says that entries behind a cursor are not there any more. A reader takes note of
// what it has missed, and goes on at Start.
type FeedGapError struct {
	// First is the number of the first entry that the reader can read on with. With Lost it is the
	// first number that may be another entry's now than the one that the reader has read.
	First int64

	// Start is the cursor before First.
	Start FeedCursor

	// Lost reports whether the entry of the cursor itself was lost with a server: after a failover
	// or a restore others have its number and those behind it, and perhaps its seq. What was done
	// with numbers from First on is void. Else entries were purged.
	Lost bool
}

func (e *FeedGapError) Error() string {
	why := "they were purged, or left with their tenant"
	if e.Lost {
		why = "the cursor is one of a server that was lost"
	}
	return fmt.Sprintf("%v: %s: the first one is number %d", errFeedGap, why, e.First)
}

func (e *FeedGapError) Unwrap() error { return errFeedGap }

const (
	feedPage        = 500
	feedScopes      = 10_000 // that a pass looks at
	defaultPatience = 7 * 24 * time.Hour
	maxPatience     = 366 * 24 * time.Hour
	feedWait        = 50 * time.Millisecond // of RunFeed for a process that gives numbers
	feedWaits       = 100
)

const (
	numberFeedSQL = `select coalesce(numbered, 0), done from metered.number_feed($1::int)`

	feedColumns = `no, history, ` + entryColumns + ` from (select f.no, f.history, (f.entry).* from `

	feedSQL = `select ` + feedColumns + `metered.read_feed($1::bigint, $2::bigint, $3::int) f) x order by no`

	consumeFeedSQL = `select ` + feedColumns +
		`metered.consume_feed($1::text, $2::int, $3::interval, $4::bool) f) x order by no`

	feedConsumersSQL = `
select consumer, consumed, unread, (extract(epoch from unread_since) * 1e6)::bigint, (extract(epoch from moved_at) * 1e6)::bigint,
    (extract(epoch from whole_at) * 1e6)::bigint, (extract(epoch from patience) * 1e6)::bigint
from metered.feed_lag order by consumer`

	dropConsumerSQL = `select metered.drop_feed_consumer($1::text)`
)

// NumberFeed gives the next numbers of the feed to all entries that are committed, and returns how
// many it gave: the feed begins with the first call. It looks once at each scope, in transactions
// of 10,000 scopes each. Feed and RunFeed call it for one such part, and maintain.Run calls it once
// somebody consumes the feed. Where another process gives numbers, it leaves them to that process.
func (l *Ledger) NumberFeed(ctx context.Context, pool *pgxpool.Pool) (numbered int64, err error) {
	if err := cmp.Or(l.made(), notNil("pool", pool)); err != nil {
		return 0, err
	}
	for {
		n, more, _, err := l.numberFeed(ctx, pool)
		numbered += n
		if err != nil || !more {
			return numbered, err
		}
	}
}

// numberFeed looks at some scopes. more reports whether there are others, and left that it looked at
// none, since another process does.
func (l *Ledger) numberFeed(ctx context.Context, db Querier) (numbered int64, more, left bool, err error) {
	var done *bool
	err = answer.QueryRow(ctx, db, l.sql.number, feedScopes).Scan(&numbered, &done)
	if sqlstate.Collided(err) { // it was faster, and the default isolation is above READ COMMITTED
		return 0, false, true, nil
	}
	return numbered, done != nil && !*done, done == nil, failed("number feed", err)
}

// Feed yields the entries of all scopes behind a cursor, each once, in an order that is the same for
// every reader. Within a scope that is the order of Seq. Between scopes it is the order in which the
// entries were found to be committed, which need not be the order of their times.
//
// It ends where nothing more has a number, and numbers what is new first, unless db is a
// transaction, is read-only, or may not do so. Charges do not wait for it, nor does it wait for open
// transactions. Entries that were purged behind the cursor are a *FeedGapError.
//
// What each entry is used for must happen once for good: see ConsumeFeed.
func (l *Ledger) Feed(ctx context.Context, db Querier, after FeedCursor,
	opts FeedOptions) iter.Seq2[FeedEntry, error] {
	return func(yield func(FeedEntry, error) bool) {
		history, number, err := after.parts()
		if err = cmp.Or(l.made(), notNil("db", db), err, opts.check(0)); err == nil {
			if _, inTx := db.(pgx.Tx); !inTx {
				_, _, _, err = l.numberFeed(ctx, db)
			}
			if errors.Is(err, ErrNotGranted) {
				err = nil
			}
		}
		left := opts.Max
		for err == nil {
			most := feedPage
			if opts.Max > 0 {
				most = min(most, left)
			}
			var page []FeedEntry
			if page, err = l.feedPage(ctx, db, l.sql.feed, history, number, most); err != nil {
				break
			}
			for _, e := range page {
				if !yield(e, nil) {
					return
				}
			}
			if left -= len(page); len(page) < most || opts.Max > 0 && left == 0 {
				return
			}
			last := page[len(page)-1]
			history, number, err = last.Cursor.parts()
		}
		yield(FeedEntry{}, err)
	}
}

// ConsumeFeed returns the next entries of the feed for a consumer, and takes them as consumed if tx
// commits: so what the transaction does with them happens once for each entry. After a rollback
// the next call returns them again. No entry means that there is nothing new for now.
//
// The first call with a name makes the consumer. Its row is locked until the end of tx: a second
// process that consumes by that name waits. It gives no numbers: see NumberFeed, and RunFeed,
// which most programs want. A *FeedGapError ends tx. DropFeedConsumer and a new beginning get over it.
func (l *Ledger) ConsumeFeed(ctx context.Context, tx pgx.Tx, consumer string,
	opts FeedOptions) ([]FeedEntry, error) {
	if err := cmp.Or(l.made(), notNil("tx", tx), checkText("consumer", consumer, maxIDBytes),
		opts.check(feedPage)); err != nil {
		return nil, err
	}
	if consumer == "" {
		return nil, invalid("consumer", "is empty")
	}
	return l.feedPage(ctx, tx, l.sql.consume, consumer, cmp.Or(opts.Max, feedPage),
		interval(cmp.Or(opts.Patience, defaultPatience)), opts.FromNow)
}

// RunFeed numbers the feed and consumes it, until nothing is new: by cron, or as a River job, for
// which package feedjobs is. While another process gives numbers, RunFeed waits for it, for 5
// seconds at most. With Poll it goes on until ctx ends, whose error it then returns. It calls do
// with each page of entries, in a transaction of its own, in which they are consumed. do may write
// in tx, and must not end it. Its error ends RunFeed, and leaves the page unconsumed.
//
// Collisions (ErrSerialization) are tried again, up to 10 times a page. Any number of processes may
// run one consumer: one of them works at a time.
func (l *Ledger) RunFeed(ctx context.Context, pool *pgxpool.Pool, consumer string, opts FeedOptions,
	do func(ctx context.Context, tx pgx.Tx, entries []FeedEntry) error) error {
	if err := cmp.Or(l.made(), notNil("pool", pool), opts.check(feedPage)); err != nil {
		return err
	}
	if do == nil {
		return invalid("do", "is nil")
	}
	waits := 0 // for another process that gives numbers
	for {
		_, behind, left, err := l.numberFeed(ctx, pool)
		if err != nil {
			return err
		}
		for more := true; more; {
			var page []FeedEntry
			err := pause.Collided(ctx, l.observer, "budget", maxAttempts, func() error {
				return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
					if page, err = l.ConsumeFeed(ctx, tx, consumer, opts); err != nil || len(page) == 0 {
						return err
					}
					return do(ctx, tx, page)
				})
			})
			if err != nil {
				return err
			}
			more = len(page) > 0
		}
		wait := opts.Poll
		switch {
		case opts.Poll > 0:
		case behind: // other scopes were not looked at yet
			continue
		case left && waits < feedWaits:
			waits, wait = waits+1, feedWait
		default:
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// FeedConsumers returns all consumers of the feed, by name.
func (l *Ledger) FeedConsumers(ctx context.Context, db Querier) ([]FeedConsumer, error) {
	if err := cmp.Or(l.made(), notNil("db", db)); err != nil {
		return nil, err
	}
	rows, err := answer.Query(ctx, db, l.sql.consumers)
	if err != nil {
		return nil, failed("feed consumers", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c FeedConsumer, err error) {
		var since, whole *int64
		var moved, patience int64
		err = row.Scan(&c.Name, &c.Consumed, &c.Unread, &since, &moved, &whole, &patience)
		c.MovedAt, c.Patience = time.UnixMicro(moved).UTC(), time.Duration(patience)*time.Microsecond
		if since != nil {
			c.UnreadSince = time.UnixMicro(*since).UTC()
		}
		if whole != nil {
			c.NumberedTo = time.UnixMicro(*whole).UTC()
		}
		return c, err
	})
	return all, failed("feed consumers", err)
}

// DropFeedConsumer forgets a consumer, and reports whether there was one. Purges wait for it no
// longer, and the name begins anew with its next ConsumeFeed.
func (l *Ledger) DropFeedConsumer(ctx context.Context, tx pgx.Tx, consumer string) (dropped bool, err error) {
	if err := cmp.Or(l.made(), notNil("tx", tx), checkText("consumer", consumer, maxIDBytes)); err != nil {
		return false, err
	}
	err = answer.QueryRow(ctx, tx, l.sql.dropConsumer, consumer).Scan(&dropped)
	return dropped, failed("drop feed consumer", err)
}

// feedPage reads entries by one of the statements with feedColumns.
func (l *Ledger) feedPage(ctx context.Context, db Querier, sql string, args ...any) ([]FeedEntry, error) {
	rows, err := answer.Query(ctx, db, sql, args...)
	if err != nil {
		return nil, failed("feed", err)
	}
	page, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f FeedEntry, err error) {
		var history int64
		f.Entry, err = scanEntry(after{row, []any{&f.Number, &history}})
		f.Cursor = feedCursor(history, f.Number)
		return f, err
	})
	return page, failed("feed", err)
}

// after is a row that begins with other columns than an entry's.
type after struct {
	pgx.CollectableRow
	first []any
}

func (a after) Scan(dest ...any) error { return a.CollectableRow.Scan(append(a.first, dest...)...) }

func feedCursor(history, number int64) FeedCursor {
	return FeedCursor(fmt.Sprintf("%d.%d", history, number))
}

// parts are the history and the number of the entry before the place.
func (c FeedCursor) parts() (history, number int64, err error) {
	if c == "" {
		return 0, 0, nil
	}
	of, text, found := strings.Cut(string(c), ".")
	before, err := strconv.ParseUint(of, 10, 63)
	if err == nil {
		number, err = strconv.ParseInt(text, 10, 64)
	}
	if !found || err != nil || number < 0 {
		return 0, 0, invalid("after", "%q is not the cursor of an entry", string(c))
	}
	return int64(before), number, nil
}

// check refuses options out of bounds, with Max up to most times two, unless most is 0.
func (o FeedOptions) check(most int) error {
	switch {
	case o.Max < 0 || most > 0 && o.Max > 2*most:
		return invalid("FeedOptions.Max", "%d is not from 0 to %d", o.Max, 2*most)
	case o.Patience < 0 || o.Patience > maxPatience:
		return invalid("FeedOptions.Patience", "%v is not from 0s to %v", o.Patience, maxPatience)
	case o.Poll != 0 && (o.Poll < time.Millisecond || o.Poll > time.Hour):
		return invalid("FeedOptions.Poll", "%v is not from 1ms to 1h", o.Poll)
	}
	return nil
}

func feedGap(err error) error {
	var pgErr *pgconn.PgError
	var detail struct {
		First   int64
		History int64
		Lost    bool
	}
	if errors.As(err, &pgErr) {
		_ = json.Unmarshal([]byte(pgErr.Detail), &detail) // the schema wrote it
	}
	return &FeedGapError{First: detail.First, Lost: detail.Lost,
		Start: feedCursor(detail.History, detail.First-1)}
}
