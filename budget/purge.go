package budget

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/observe"
)

// PurgeOptions says which entries Purge deletes. OlderThan is required.
type PurgeOptions struct {
	// OlderThan is the age from which on entries are deleted, from 1µs to 36,525 days. It must be
	// at least every Limit.Reach. Required.
	OlderThan time.Duration

	// Scope purges this scope alone. Defaults to all scopes.
	Scope string

	// After goes on behind an earlier purge: its PurgeReport.Last.
	After string

	// Batch is the most entries that one transaction deletes, from 16 to 100,000. Defaults to
	// 5,000.
	Batch int

	// Forget reports whether an idle scope may be deleted whole, and begin at Seq 1 again. The
	// limits of such a scope must have no lifetimes, and a Limit.Reach of at most OlderThan.
	// Scopes with credit, debt, holds or claims stay, and so does a carved child that was closed,
	// until its lease is purged. Defaults to none.
	Forget func(scope string) bool

	// Progress is called after each transaction, with the report so far. It may be nil.
	Progress func(PurgeReport)

	// DryRun counts and deletes nothing, and takes no locks. It does not go with Forget.
	DryRun bool
}

// PurgeReport counts scopes and entries.
type PurgeReport struct {
	// Scopes are the scopes that the purge looked at.
	Scopes int `json:"scopes"`

	// Entries are the entries that it deleted.
	Entries int64 `json:"entries"`

	// Forgotten are the scopes that it deleted whole.
	Forgotten int `json:"forgotten"`

	// Busy are the scopes that others had locked. They are left for the next purge.
	Busy int `json:"busy"`

	// Last is the last scope that is done.
	Last string `json:"last,omitempty"`

	// KeptSince is the time from which on windows and periods are exact.
	KeptSince time.Time `json:"kept_since,omitzero"`
}

const purgeSQL = `
select deleted, upto, done, forgotten, c.cutoff
from (select metered.clock() - $3::interval as cutoff) c,
     metered.purge_scope($1::text, $2::bigint, c.cutoff, $4::bigint, $5::int, $6::int, $7::bool)`

// purgeableSQL is how many entries purge_scope would delete: those from the first after entry 1 to
// the block that has the last entry at or before the cutoff, as metered._base finds it, or the first
// one that the feed needs.
const purgeableSQL = `
select greatest(0, ((least(b.seq, k.seq) - 1) & ~15::bigint) + 1 - f.seq)
from (select l.epoch from metered.ledger l where l.scope = $1 order by l.seq desc limit 1) tip,
     lateral (select l.seq from metered.ledger l where l.scope = $1 and l.seq > 1 order by l.seq limit 1) f,
     lateral (select s.seq from pg_catalog.generate_series(0, tip.epoch) e,
          lateral (select l.seq from metered.ledger l
           where l.scope = $1 and l.epoch = e and l.at <= metered.clock() - $2::interval and (l.seq & 15::bigint = 1 or l.kind = 'k')
           order by l.at desc, l.seq desc limit 1) s
      order by e desc limit 1) b,
     metered.feed_keeps($1::text, metered.clock() - $2::interval) k (seq)`

// scopesSQL lists the scopes after $1, by skipping from scope to scope in the
// primary key.
const scopesSQL = `
with recursive s as (
    (select l.scope from metered.ledger l where l.scope > $1 order by l.scope limit 1)
    union all
    select (select l.scope from metered.ledger l where l.scope > s.scope order by l.scope limit 1)
    from s where s.scope is not null
)
select scope from s where scope is not null limit $2`

// Purge deletes entries older than OlderThan, but for up to 17 of each scope: limits that reach
// back to OlderThan stay exact, and others are ErrWindowPurged. A refund of a deleted charge is
// ErrEntryPurged. Each transaction locks one scope. It needs metered.GrantMaintenanceSQL.
func (l *Ledger) Purge(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (PurgeReport, error) {
	if err := cmp.Or(l.made(), notNil("pool", pool)); err != nil {
		return PurgeReport{}, err
	}
	var report PurgeReport
	if opts.OlderThan == 0 {
		return report, invalid("PurgeOptions.OlderThan", "is required")
	}
	if err := checkWindow("PurgeOptions.OlderThan", opts.OlderThan); err != nil {
		return report, err
	}
	if opts.Batch == 0 {
		opts.Batch = 5000
	}
	if opts.Batch < 16 || opts.Batch > 100_000 {
		return report, invalid("PurgeOptions.Batch", "%d is not from 16 to 100,000", opts.Batch)
	}
	if opts.Scope != "" {
		if err := checkScope("PurgeOptions.Scope", opts.Scope); err != nil {
			return report, err
		}
	}
	if opts.After != "" {
		if err := checkScope("PurgeOptions.After", opts.After); err != nil {
			return report, err
		}
	}
	if opts.DryRun && opts.Forget != nil {
		return report, invalid("PurgeOptions.DryRun", "is not for Forget")
	}
	purge, span := func(scope string) error {
		return l.countScope(ctx, pool, scope, opts,
			&report)
	}, observed.Span{}
	if !opts.DryRun {
		ctx, span = l.observer.Start(ctx, observe.Op{Work: observe.Purge, Name: "entries"})
		purge = func(scope string) error { return l.purgeScope(ctx, pool, scope, opts, &report) }
	}
	var err error
	if opts.Scope != "" {
		err = purge(opts.Scope)
	} else {
		err = l.eachScope(ctx, pool, opts.After, purge)
	}
	span.With(observe.End{Err: err, Rows: report.Entries})
	return report, err
}

func (l *Ledger) purgeScope(ctx context.Context, pool *pgxpool.Pool, scope string,
	opts PurgeOptions, report *PurgeReport) error {
	var upto int64
	forget := opts.Forget != nil && opts.Forget(scope)
	for done := false; !done; {
		var deleted int64
		var forgotten bool
		var cutoff time.Time
		err := answer.QueryRow(ctx, pool, l.sql.purge, scope, l.LockKey(scope),
			interval(opts.OlderThan), upto, opts.Batch, l.waitMS(), forget).
			Scan(&deleted, &upto, &done, &forgotten, &cutoff)
		if code := sqlstate.Of(err); code == sqlstate.SerializationFailure || code == sqlstate.DeadlockDetected {
			continue // another purge was faster, and the default isolation is above READ COMMITTED
		}
		if err = failed("purge", err); errors.Is(err, ErrBusy) {
			report.Busy++
			break
		}
		if err != nil {
			return err
		}
		report.Entries += deleted
		l.observer.Purged(ctx, "entries", deleted)
		report.KeptSince = cutoff.UTC()
		if forgotten {
			report.Forgotten++
		}
		if opts.Progress != nil && !done {
			opts.Progress(*report)
		}
	}
	report.Scopes++
	report.Last = scope
	if opts.Progress != nil {
		opts.Progress(*report)
	}
	return nil
}

// countScope adds to the report the entries that purgeScope would delete.
func (l *Ledger) countScope(ctx context.Context, pool *pgxpool.Pool, scope string,
	opts PurgeOptions, report *PurgeReport) error {
	var entries int64
	err := readOnly(ctx, pool, func(tx pgx.Tx) error {
		return answer.QueryRow(ctx, tx, l.sql.purgeable, scope, interval(opts.OlderThan)).Scan(&entries)
	})
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return failed("purge", err)
	}
	report.Entries += entries
	report.Scopes++
	report.Last = scope
	if opts.Progress != nil {
		opts.Progress(*report)
	}
	return nil
}

// scopesPage is how many scopes are listed at once.
const scopesPage = 1000

// eachScope calls f for every scope after one, in order, with no statement left open.
func (l *Ledger) eachScope(ctx context.Context, pool *pgxpool.Pool, after string,
	f func(scope string) error) error {
	for n := scopesPage; n == scopesPage; {
		var scopes []string
		err := readOnly(ctx, pool, func(tx pgx.Tx) (err error) {
			scopes, err = l.listScopes(ctx, tx, after)
			return err
		})
		if err != nil {
			return err
		}
		for _, scope := range scopes {
			if err := f(scope); err != nil {
				return err
			}
			after = scope
		}
		n = len(scopes)
	}
	return nil
}

// listScopes returns the next scopes after one.
func (l *Ledger) listScopes(ctx context.Context, db Querier, after string) ([]string, error) {
	rows, err := answer.Query(ctx, db, l.sql.scopes, after, scopesPage)
	if err != nil {
		return nil, failed("list scopes", err)
	}
	scopes, err := pgx.CollectRows(rows, pgx.RowTo[string])
	return scopes, failed("list scopes", err)
}

func readOnly(ctx context.Context, pool *pgxpool.Pool, f func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, f)
}
