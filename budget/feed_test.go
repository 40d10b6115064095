package budget_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// read reads the feed behind a cursor, and returns "scope/seq" of each entry and the last cursor.
func read(t testing.TB, db budget.Querier, l *budget.Ledger, after budget.FeedCursor) (entries []string, last budget.FeedCursor) {
	t.Helper()
	last = after
	for e, err := range l.Feed(t.Context(), db, after, budget.FeedOptions{}) {
		require.NoError(t, err)
		entries, last = append(entries, fmt.Sprintf("%s/%d", e.Scope, e.Seq)), e.Cursor
	}
	return entries, last
}

// feedError is the error with which reading the feed behind a cursor ends.
func feedError(t testing.TB, db budget.Querier, l *budget.Ledger, after budget.FeedCursor) error {
	t.Helper()
	for _, err := range l.Feed(t.Context(), db, after, budget.FeedOptions{}) {
		if err != nil {
			return err
		}
	}
	return nil
}

// consume consumes one page in a transaction of its own.
func consume(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, consumer string, opts budget.FeedOptions) (entries []string, err error) {
	t.Helper()
	err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		page, err := l.ConsumeFeed(t.Context(), tx, consumer, opts)
		for _, e := range page {
			entries = append(entries, fmt.Sprintf("%s/%d", e.Scope, e.Seq))
		}
		return err
	})
	return entries, err
}

func mustConsume(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, consumer string, opts budget.FeedOptions) []string {
	t.Helper()
	entries, err := consume(t, pool, l, consumer, opts)
	require.NoError(t, err)
	return entries
}

func number(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger) int64 {
	t.Helper()
	n, err := l.NumberFeed(t.Context(), pool)
	require.NoError(t, err)
	return n
}

// A reader that polls by time would have read b's entry, which is younger, and never a's.
func TestFeed_AnEntryThatCommitsLateIsReadLateAndKeepsNoOtherScopeWaiting(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	long := begin(t, pool, pgx.ReadCommitted)
	_, err := l.Charge(t.Context(), long, budget.Charge{Scope: "a", Amount: 1})
	require.NoError(t, err)
	mustCharge(t, pool, l, "b", 1)
	entries, cursor := read(t, pool, l, "")
	require.Equal(t, []string{"b/1"}, entries)
	mustCharge(t, pool, l, "b", 1)
	mustCharge(t, pool, l, "c", 1)
	require.NoError(t, long.Commit(t.Context()))
	entries, cursor = read(t, pool, l, cursor)
	require.ElementsMatch(t, []string{"b/2", "c/1", "a/1"}, entries)
	entries, last := read(t, pool, l, cursor)
	require.Empty(t, entries)
	require.Equal(t, cursor, last)

	all, _ := read(t, pool, l, "")
	require.Equal(t, "b/1", all[0])
	require.Len(t, all, 4)
	require.Equal(t, "b/1", func() string { // and page by page
		for e, err := range l.Feed(t.Context(), pool, "", budget.FeedOptions{Max: 1}) {
			require.NoError(t, err)
			return fmt.Sprintf("%s/%d", e.Scope, e.Seq)
		}
		return ""
	}())
}

func TestFeed_GoesOnInTheMiddleOfARun(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	chargeMany(t, pool, l, "a", 1100)
	require.Equal(t, int64(1100), number(t, pool, l))
	require.Equal(t, 1, pgtest.Count(t, pool, "metered.feed"), "entries that follow one another are one row")
	var cursor budget.FeedCursor
	want := int64(1)
	for _, most := range []int{1, 7, 600, 0} {
		for e, err := range l.Feed(t.Context(), pool, cursor, budget.FeedOptions{Max: most}) {
			require.NoError(t, err)
			require.Equal(t, want, e.Seq)
			require.Equal(t, want, e.Number)
			want, cursor = want+1, e.Cursor
		}
	}
	require.Equal(t, int64(1101), want)
}

func TestFeed_RefusesCursorsOfNoEntry(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	for _, wrong := range []budget.FeedCursor{"1", "x.1", "1.x", "1.-1", "-1.1", "1.2.3", "99999999999999999999.1"} {
		require.ErrorIs(t, feedError(t, pool, l, wrong), budget.ErrArgument, wrong)
	}
}

func TestConsumeFeed_IsPartOfTheTransaction(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	for _, scope := range []string{"a", "b", "c", "d", "e"} {
		mustCharge(t, pool, l, scope, 1)
	}
	number(t, pool, l)
	tx := begin(t, pool, pgx.ReadCommitted)
	page, err := l.ConsumeFeed(ctx, tx, "mail", budget.FeedOptions{Max: 2})
	require.NoError(t, err)
	require.Len(t, page, 2)
	require.NoError(t, tx.Rollback(ctx))
	first := mustConsume(t, pool, l, "mail", budget.FeedOptions{Max: 2})
	require.Equal(t, []string{"a/1", "b/1"}, first)
	require.Equal(t, []string{"c/1", "d/1", "e/1"}, mustConsume(t, pool, l, "mail", budget.FeedOptions{}))
	require.Empty(t, mustConsume(t, pool, l, "mail", budget.FeedOptions{}))
	require.Equal(t, []string{"a/1", "b/1", "c/1", "d/1", "e/1"}, mustConsume(t, pool, l, "other", budget.FeedOptions{}))
	require.Empty(t, mustConsume(t, pool, l, "late", budget.FeedOptions{FromNow: true}))
	mustCharge(t, pool, l, "a", 1)
	number(t, pool, l)
	require.Equal(t, []string{"a/2"}, mustConsume(t, pool, l, "late", budget.FeedOptions{FromNow: true}))

	consumers, err := l.FeedConsumers(ctx, pool)
	require.NoError(t, err)
	require.Equal(t, "late mail other", fmt.Sprint(consumers[0].Name, " ", consumers[1].Name, " ", consumers[2].Name))
	require.Equal(t, int64(6), consumers[0].Consumed)
	require.Zero(t, consumers[0].UnreadSince)
	require.Equal(t, int64(1), consumers[1].Unread)
	require.Equal(t, start, consumers[1].UnreadSince)
	require.Equal(t, start, consumers[1].NumberedTo)
	require.Equal(t, 7*24*time.Hour, consumers[1].Patience)
	for _, want := range []bool{true, false} {
		dropped, err := pgtest.InTx(ctx, pool, func(tx pgx.Tx) (bool, error) { return l.DropFeedConsumer(ctx, tx, "mail") })
		require.NoError(t, err)
		require.Equal(t, want, dropped)
	}
	require.Len(t, mustConsume(t, pool, l, "mail", budget.FeedOptions{}), 6, "the name begins anew")
}

// The second waits for the first. At READ COMMITTED it goes on behind it, above that it collides.
func TestConsumeFeed_OfTwoAtOnceTakesEachEntryOnce(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	chargeMany(t, pool, l, "a", 9)
	number(t, pool, l)
	for i, iso := range isolations {
		for _, known := range []bool{false, true} {
			name := fmt.Sprint(iso)
			if known {
				mustConsume(t, pool, l, name, budget.FeedOptions{Max: 1})
			} else {
				mustConsume(t, pool, l, "other", budget.FeedOptions{Max: 1})
				name = "new at " + name
			}
			first, second := begin(t, pool, iso), begin(t, pool, iso)
			_, err := second.Exec(ctx, "select 1 from metered.feed_consumers limit 1") // its snapshot
			require.NoError(t, err)
			page, err := l.ConsumeFeed(ctx, first, name, budget.FeedOptions{Max: 4})
			require.NoError(t, err)
			require.Len(t, page, 4)
			after := page[3].Number
			done := make(chan error, 1)
			go func() {
				page, err := l.ConsumeFeed(ctx, second, name, budget.FeedOptions{Max: 4})
				if err == nil && (len(page) == 0 || page[0].Number != after+1) {
					err = fmt.Errorf("the second one had %v after %d", page, after)
				}
				done <- err
			}()
			pgtest.WaitQueued(t, pool, 1)
			require.NoError(t, first.Commit(ctx))
			if err := <-done; i == 0 {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, budget.ErrSerialization)
			}
			require.NoError(t, second.Rollback(ctx))
		}
	}
}

func TestNumberFeed_WaitsForNobodyAndIsDoneByOneAtATime(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustCharge(t, pool, l, "a", 1)
	numbering := begin(t, pool, pgx.ReadCommitted)
	execute := func(tx pgx.Tx) (n *int64) {
		_, err := tx.Exec(ctx, "set local lock_timeout = '10s'")
		require.NoError(t, err)
		require.NoError(t, tx.QueryRow(ctx, "select numbered from metered.number_feed(10)").Scan(&n))
		return n
	}
	require.Equal(t, int64(1), *execute(numbering))
	require.Nil(t, execute(begin(t, pool, pgx.ReadCommitted)))
	require.Zero(t, number(t, pool, l))
	entries, _ := read(t, pool, l, "")
	require.Empty(t, entries, "a number that is not committed is nobody's")
	require.NoError(t, numbering.Rollback(ctx))
	entries, _ = read(t, pool, l, "")
	require.Equal(t, []string{"a/1"}, entries)

	for _, iso := range isolations[1:] { // an old snapshot does not give a number twice
		old := begin(t, pool, iso)
		_, err := old.Exec(ctx, "select 1 from metered.feed_state")
		require.NoError(t, err)
		mustCharge(t, pool, l, string(iso), 1)
		require.Equal(t, int64(1), number(t, pool, l))
		_, err = old.Exec(ctx, "select metered.number_feed(10)")
		require.Equal(t, sqlstate.SerializationFailure, code(err), iso)
		require.NoError(t, old.Rollback(ctx))
	}
}

// A crash can take back an entry of a command that released its locks early, unless what comes after it is durable.
func TestNumberFeed_IsDurableWhateverTheSession(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustCharge(t, pool, l, "a", 1)
	for setting, want := range map[string]string{"off": "on", "local": "local"} {
		tx := begin(t, pool, pgx.ReadCommitted)
		_, err := tx.Exec(ctx, "set local synchronous_commit = "+setting)
		require.NoError(t, err)
		var now string
		require.NoError(t, tx.QueryRow(ctx, "select current_setting('synchronous_commit') from metered.number_feed(10)").Scan(&now))
		require.Equal(t, want, now)
		require.NoError(t, tx.Rollback(ctx))
	}
}

// A pass looks at three of 20 scopes, and at those that had entries last.
func TestNumberFeed_ComesToEachScopeInTurnAndToBusyOnesAlways(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	pass := func() (n int64, done bool) {
		require.NoError(t, pool.QueryRow(t.Context(), "select numbered, done from metered.number_feed(3)").Scan(&n, &done))
		return n, done
	}
	for i := range 20 {
		mustCharge(t, pool, l, fmt.Sprintf("s%02d", i), 1)
	}
	for i := range 7 {
		clock.Advance(time.Second)
		n, done := pass()
		require.Equal(t, int64([]int{3, 3, 3, 3, 3, 3, 2}[i]), n)
		require.Equal(t, i == 6, done)
	}
	mustCharge(t, pool, l, "s00", 1) // the last one of the walk
	mustCharge(t, pool, l, "new", 1)
	n, _ := pass()
	require.Equal(t, int64(1), n, "it is among the busy ones")
	for done := false; !done; _, done = pass() {
	}
	entries, _ := read(t, pool, l, "")
	require.Len(t, entries, 22)
}

func TestNumberFeed_FoldsTalliesFirst(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	makeBusy(t, pool, l, "channel")
	require.Negative(t, mustCharge(t, pool, l, "channel", 5).Seq)
	entries, _ := read(t, pool, l, "")
	require.Equal(t, []string{"channel/1", "channel/2", "channel/3"}, entries)
}

func TestPurge_WaitsForConsumersUpToTheirPatience(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 100)
	number(t, pool, l)
	day := 24 * time.Hour
	_, last := read(t, pool, l, "")
	history := strings.TrimSuffix(string(last), "100")
	mustConsume(t, pool, l, "slow", budget.FeedOptions{Max: 40, Patience: 3 * day})
	clock.Advance(2 * day)
	chargeMany(t, pool, l, "a", 1)
	mustConsume(t, pool, l, "quick", budget.FeedOptions{})
	require.Equal(t, int64(31), purge(t, pool, l, day).Entries, "2 to 32, whole blocks of 16 that it has consumed")
	require.Len(t, mustConsume(t, pool, l, "slow", budget.FeedOptions{Max: 1, Patience: 3 * day}), 1)

	var gap *budget.FeedGapError
	require.ErrorAs(t, feedError(t, pool, l, ""), &gap)
	require.Equal(t, int64(33), gap.First)
	require.False(t, gap.Lost)
	require.ErrorIs(t, gap, budget.ErrFeedGap)
	entries, _ := read(t, pool, l, gap.Start)
	require.Equal(t, "a/33", entries[0])
	require.Len(t, entries, 69)
	require.ErrorAs(t, feedError(t, pool, l, budget.FeedCursor(history+"31")), &gap)

	clock.Advance(2*day + 1) // beyond its patience
	require.Equal(t, int64(64), purge(t, pool, l, day).Entries)
	_, err := consume(t, pool, l, "slow", budget.FeedOptions{})
	require.ErrorAs(t, err, &gap)
	require.Equal(t, int64(97), gap.First)
	_, err = pgtest.InTx(t.Context(), pool, func(tx pgx.Tx) (bool, error) { return l.DropFeedConsumer(t.Context(), tx, "slow") })
	require.NoError(t, err)
	require.Equal(t, "a/97", mustConsume(t, pool, l, "slow", budget.FeedOptions{})[0])
	requireVerified(t, pool, l)
}

// A dry run counts what the purge deletes: as a role that purges, and as one that only reports.
func TestPurge_CountsWhatConsumersKeep(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	keeper := pgtest.AsRole(t, pool, metered.GrantMaintenanceSQL, "")
	reader := pgtest.AsRole(t, pool, metered.GrantReportingSQL, "")
	const day = 24 * time.Hour
	requireDeleted := func(want int64, why string) {
		t.Helper()
		for _, role := range []*pgxpool.Pool{keeper, reader} {
			dry, err := l.Purge(t.Context(), role, budget.PurgeOptions{OlderThan: day, DryRun: true})
			require.NoError(t, err)
			require.Equal(t, want, dry.Entries, why)
		}
		require.Equal(t, want, purge(t, pool, l, day).Entries, why)
	}
	chargeMany(t, pool, l, "a", 100)
	chargeMany(t, pool, l, "b", 40)
	number(t, pool, l)
	mustConsume(t, pool, l, "slow", budget.FeedOptions{Max: 40, Patience: 3 * day})
	clock.Advance(2 * day)
	chargeMany(t, pool, l, "a", 1)
	requireDeleted(31, "2 to 32 of a: none of b is consumed")
	mustConsume(t, pool, l, "slow", budget.FeedOptions{Max: 80, Patience: 3 * day})
	requireDeleted(64+15, "33 to 96 of a, and 2 to 16 of b")
	clock.Advance(2*day + 1) // beyond its patience
	requireDeleted(16, "17 to 32 of b")
	clock.Advance(8 * day)
	requireDeleted(0, "the last block stays")
}

func TestPurge_OfEntriesWithoutANumber(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "before", 40)
	clock.Advance(48 * time.Hour)
	require.Equal(t, int64(31), purge(t, pool, l, time.Hour).Entries, "nobody reads the feed yet")
	require.Equal(t, int64(8), number(t, pool, l), "33 to 40, and not the first entry, which is older than what is missing")
	chargeMany(t, pool, l, "a", 40)
	chargeMany(t, pool, l, "before", 40)
	clock.Advance(48 * time.Hour)
	require.Zero(t, purge(t, pool, l, time.Hour).Entries, "what has no number waits")
	mustCharge(t, pool, l, "b", 1)
	require.Equal(t, int64(81), number(t, pool, l))
	chargeMany(t, pool, l, "a", 40)
	number(t, pool, l)
	_, cursor := read(t, pool, l, "")
	chargeMany(t, pool, l, "a", 40)
	clock.Advance(8 * 24 * time.Hour)
	require.Positive(t, purge(t, pool, l, time.Hour).Entries, "but no longer than a week")
	mustCharge(t, pool, l, "a", 1)
	mustCharge(t, pool, l, "b", 1)

	var gap *budget.FeedGapError
	require.ErrorAs(t, feedError(t, pool, l, cursor), &gap, "a number was passed over")
	entries, _ := read(t, pool, l, gap.Start)
	require.Subset(t, entries, []string{"a/121", "b/2"})
	requireVerified(t, pool, l)
}

// Nobody gives numbers to entries while a purge deletes them without one.
func TestPurge_OfEntriesWithoutANumberStopsNumbers(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 40)
	number(t, pool, l)
	chargeMany(t, pool, l, "a", 40)
	impatient := pgtest.Reopen(t, pool, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["lock_timeout"] = "100ms"
	})
	numbering := func(tx pgx.Tx) (bool, error) {
		_, err := tx.Exec(t.Context(), "select from metered.feed_state for update")
		require.NoError(t, err)
		report := purge(t, impatient, l, time.Hour)
		return report.Busy > 0, nil
	}
	clock.Advance(48 * time.Hour)
	busy, err := pgtest.InTx(t.Context(), pool, numbering)
	require.NoError(t, err)
	require.False(t, busy, "what has no number stays, so the purge does not wait")
	clock.Advance(6 * 24 * time.Hour)
	busy, err = pgtest.InTx(t.Context(), pool, numbering)
	require.NoError(t, err)
	require.True(t, busy)
	require.Positive(t, purge(t, impatient, l, time.Hour).Entries)
}

func TestPurge_AForgottenScopeBeginsAnewInTheFeed(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	forget := func() int {
		r, err := l.Purge(t.Context(), pool, budget.PurgeOptions{OlderThan: time.Hour, Forget: func(string) bool { return true }})
		require.NoError(t, err)
		return r.Forgotten
	}
	mustCharge(t, pool, l, "a", 1)
	mustCharge(t, pool, l, "a", 1)
	_, cursor := read(t, pool, l, "")
	mustConsume(t, pool, l, "mail", budget.FeedOptions{Max: 1})
	clock.Advance(2 * time.Hour)
	require.Zero(t, forget(), "mail has not consumed its last entry")
	require.Equal(t, []string{"a/2"}, mustConsume(t, pool, l, "mail", budget.FeedOptions{}))
	require.Equal(t, 1, forget())
	require.Zero(t, pgtest.Count(t, pool, "metered.feed"))
	require.Zero(t, pgtest.Count(t, pool, "metered.feed_scopes"))
	mustCharge(t, pool, l, "a", 1)
	entries, _ := read(t, pool, l, cursor)
	require.Equal(t, []string{"a/1"}, entries)
	require.Equal(t, []string{"a/1"}, mustConsume(t, pool, l, "mail", budget.FeedOptions{}))
	require.ErrorIs(t, feedError(t, pool, l, ""), budget.ErrFeedGap)
}

// A server that took over without the last three numbers gives them to others, and a second one that
// took over from the first gives them to others again.
func TestFeed_FindsACursorOfAServerThatWasLost(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	for _, scope := range []string{"a", "b", "c", "d", "e"} {
		mustCharge(t, pool, l, scope, 1)
	}
	_, ahead := read(t, pool, l, "")
	first, _, _ := strings.Cut(string(ahead), ".")
	at := func(history string, number int) budget.FeedCursor {
		return budget.FeedCursor(fmt.Sprint(history, ".", number))
	}
	require.Equal(t, at(first, 5), ahead)
	requireLost := func(cursor budget.FeedCursor, from int64) {
		t.Helper()
		var gap *budget.FeedGapError
		require.ErrorAs(t, feedError(t, pool, l, cursor), &gap, cursor)
		require.True(t, gap.Lost, cursor)
		require.Equal(t, from, gap.First, cursor)
		require.NoError(t, feedError(t, pool, l, gap.Start))
	}
	promote := func(server string) {
		execute(t, pool, `
delete from metered.feed where no > 2;
delete from metered.feed_scopes where scope > 'b';
delete from metered.ledger where scope > 'b';
delete from metered.feed_histories where first_no > 2;
update metered.feed_state set last = 2;
create or replace function metered._feed_server() returns text language sql as 'select ''`+server+`'''`,
			pgx.QueryExecModeSimpleProtocol)
	}
	fill := func() (history string) {
		for _, scope := range []string{"x", "y", "z", "zz"} {
			mustCharge(t, pool, l, scope, 1)
		}
		_, now := read(t, pool, l, at(first, 2))
		history, _, _ = strings.Cut(string(now), ".")
		require.Equal(t, at(history, 6), now)
		return history
	}
	promote("second")
	requireLost(ahead, 3) // nothing has its number yet
	second := fill()
	for number := range 3 {
		requireLost(at(first, 3+number), 3)
	}
	require.NoError(t, feedError(t, pool, l, at(second, 5)))
	requireLost(at(second, 99), 7)

	promote("third")
	third := fill()
	require.NotEqual(t, second, third)
	requireLost(at(second, 5), 1) // nobody here knows since when it was another server's
	requireLost(at(first, 5), 3)
	require.NoError(t, feedError(t, pool, l, at(third, 5)))
}

// feedLoad writes entries by histories that commit out of order and roll back, at every isolation
// level, and counts those that it saw committed.
type feedLoad struct {
	t       *testing.T
	pool    *pgxpool.Pool
	l       *budget.Ledger
	written atomic.Int64
}

func (f *feedLoad) transaction(ctx context.Context) error {
	r := pgtest.Random(f.t)
	iso := isolations[r.IntN(3)]
	made := 0
	err := pgx.BeginTxFunc(ctx, f.pool, pgx.TxOptions{IsoLevel: iso}, func(tx pgx.Tx) error {
		for range 1 + r.IntN(2) {
			var charges []budget.Charge
			for range 1 + r.IntN(24) {
				charges = append(charges, budget.Charge{Scope: fmt.Sprint("s", r.IntN(pgtest.Size(40, 1000))), Amount: 1, Limits: []budget.Limit{budget.Lifetime(1 << 40)}})
			}
			posted, err := f.l.Charge(ctx, tx, charges...)
			if err != nil {
				return err
			}
			made += len(posted.Entries)
			if r.IntN(4) == 0 { // others commit meanwhile
				if _, err := tx.Exec(ctx, "select pg_sleep(0.002)"); err != nil {
					return err
				}
			}
		}
		if r.IntN(5) == 0 {
			return errAbandoned
		}
		return nil
	})
	if err == nil {
		f.written.Add(int64(made))
	}
	return err
}

var errAbandoned = errors.New("abandoned")

// Whatever commits in which order, whatever is rolled back, and whoever is killed, writers and
// readers in any statement or COMMIT: a reader has each entry once, each reader has the same order,
// and so has one that begins anew.
func TestFeed_EachEntryOnceInOneOrder(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	l := newLedger(t, budget.Config{})
	killer := pgtest.Reopen(t, pool, func(cfg *pgxpool.Config) { cfg.MaxConns = 1 })
	kill := func() { // any of them, in a statement, in COMMIT or between these
		execute(t, killer, `select pg_terminate_backend(a.pid) from pg_stat_activity a
			where a.datname = current_database() and a.pid <> pg_backend_pid() order by random() limit 1`)
	}
	execute(t, pool, "create table seen (reader text, number bigint, scope text, seq bigint, primary key (reader, scope, seq), unique (reader, number))")
	load := &feedLoad{t: t, pool: pool, l: l}
	entries := pgtest.Sizes(300, 2000, 1_000_000)
	var writers, readers sync.WaitGroup
	var written atomic.Bool
	began := time.Now()
	for range 4 {
		writers.Go(func() {
			for n := 1; load.written.Load() < int64(entries); n++ {
				if n%16 == 0 {
					kill()
				}
				if err := load.transaction(ctx); err != nil && !errors.Is(err, errAbandoned) && !sqlstate.Collided(err) &&
					!errors.Is(err, budget.ErrCommitUnknown) && !lostConnection(err) {
					t.Error(err)
					return
				}
			}
		})
	}
	store := func(ctx context.Context, tx pgx.Tx, reader string, page []budget.FeedEntry) error {
		var numbers, seqs []int64
		var scopes []string
		for _, e := range page {
			numbers, scopes, seqs = append(numbers, e.Number), append(scopes, e.Scope), append(seqs, e.Seq)
		}
		_, err := tx.Exec(ctx, "insert into seen select $1, * from unnest($2::bigint[], $3::text[], $4::bigint[])", reader, numbers, scopes, seqs)
		return err
	}
	for i := range 3 { // two processes of one consumer, and another one at another level
		readers.Go(func() {
			name := []string{"one", "one", "two"}[i]
			r := pgtest.Random(t)
			for {
				last := written.Load()
				n := 0
				if _, err := l.NumberFeed(ctx, pool); err != nil && !lostConnection(err) {
					t.Error(err)
				}
				err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: isolations[r.IntN(3)]}, func(tx pgx.Tx) error {
					page, err := l.ConsumeFeed(ctx, tx, name, budget.FeedOptions{Max: 1 + r.IntN(300)})
					if n = len(page); err != nil || n == 0 {
						return err
					}
					if err = store(ctx, tx, name, page); err == nil && r.IntN(6) == 0 {
						if r.IntN(2) == 0 {
							return errAbandoned
						}
						_, err = tx.Exec(ctx, "select pg_terminate_backend(pg_backend_pid())")
					}
					return err
				})
				if err == nil && n == 0 && last {
					return
				}
				if err != nil && !errors.Is(err, errAbandoned) && !sqlstate.Collided(err) && !lostConnection(err) {
					t.Error(err)
					return
				}
			}
		})
	}
	writers.Wait()
	wrote := time.Since(began)
	written.Store(true)
	readers.Wait()
	if t.Failed() {
		return
	}
	behind := time.Since(began) - wrote
	number(t, pool, l) // the last look may have been another reader's, under way
	for _, name := range []string{"one", "two"} {
		require.NoError(t, l.RunFeed(ctx, pool, name, budget.FeedOptions{}, func(ctx context.Context, tx pgx.Tx, page []budget.FeedEntry) error {
			return store(ctx, tx, name, page)
		}))
	}
	var page []budget.FeedEntry
	began = time.Now()
	for e, err := range l.Feed(ctx, pool, "", budget.FeedOptions{}) {
		require.NoError(t, err)
		page = append(page, e)
	}
	t.Logf("%d entries, written in %v, consumed twice %v later, and read anew in %v each", len(page), wrote, behind,
		time.Since(began)/time.Duration(len(page)))
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return store(ctx, tx, "anew", page) }))
	for _, reader := range []string{"one", "two", "anew"} {
		var differ int
		require.NoError(t, pool.QueryRow(ctx, `
select count(*) from (select scope, seq, number from seen where reader = $1) s
full join metered.ledger l using (scope, seq) full join (select scope, seq, number from seen where reader = 'anew') a using (scope, seq)
where l.seq is null or s.number is distinct from a.number`, reader).Scan(&differ))
		require.Zero(t, differ, reader)
	}
	var out int // of the order of seq
	require.NoError(t, pool.QueryRow(ctx, `select count(*) from (select number < lag(number) over (partition by scope order by seq) as x from seen where reader = 'anew') s where x`).Scan(&out))
	require.Zero(t, out)
	require.GreaterOrEqual(t, pgtest.Count(t, pool, "metered.ledger"), entries)
}

// lostConnection reports whether a backend was killed.
func lostConnection(err error) bool {
	state := sqlstate.Of(err)
	return state == "57P01" || state == "" && err != nil && !errors.Is(err, budget.ErrArgument)
}

func TestRunFeed_ConsumesUntilItIsStopped(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	mustCharge(t, pool, l, "a", 1)
	var got []string
	wrong := errors.New("wrong")
	failing := true
	do := func(ctx context.Context, tx pgx.Tx, page []budget.FeedEntry) error {
		if failing {
			return wrong
		}
		for _, e := range page {
			if got = append(got, e.Scope); e.Scope == "a" {
				mustCharge(t, pool, l, "b", 1)
			} else {
				stop()
			}
		}
		return nil
	}
	require.ErrorIs(t, l.RunFeed(ctx, pool, "mail", budget.FeedOptions{}, do), wrong)
	failing = false
	err := l.RunFeed(ctx, pool, "mail", budget.FeedOptions{Poll: time.Millisecond}, do)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []string{"a", "b"}, got)
}

// A collision, of another process of the consumer or of the function's own writes, ends nothing: what is left is consumed.
func TestRunFeed_TriesAgainAfterACollision(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	chargeMany(t, pool, l, "scope", 3)
	execute(t, pool, `create sequence collisions;
		create function collide() returns trigger language plpgsql as 'begin
			if nextval(''public.collisions'') = 2 then raise serialization_failure; end if;
			return null; end';
		create trigger collide after insert or update on metered.feed_consumers execute function collide()`)
	calls, consumed := 0, 0
	opts := budget.FeedOptions{Max: 1}
	require.NoError(t, l.RunFeed(t.Context(), pool, "mail", opts, func(_ context.Context, _ pgx.Tx, page []budget.FeedEntry) error {
		if calls++; calls == 1 {
			return &pgconn.PgError{Code: "40001"} // of its own writes
		}
		consumed += len(page)
		return nil
	}))
	require.Equal(t, 3, consumed)
	require.Greater(t, pgtest.Value[int64](t, pool, "select last_value from collisions"), int64(2))
}

// releases ends the other process's turn when numbers are asked for the second time.
type releases struct {
	asked int
	other pgx.Tx
}

func (r *releases) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "number_feed") {
		if r.asked++; r.asked == 2 {
			_ = r.other.Rollback(ctx)
		}
	}
	return ctx
}

func (r *releases) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// While another process gives numbers, which then dies, RunFeed waits: it leaves nothing to a next run.
func TestRunFeed_WaitsForAProcessThatGivesNumbers(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	_, err := l.NumberFeed(t.Context(), pool)
	require.NoError(t, err)
	mustCharge(t, pool, l, "a", 1)
	other, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer other.Rollback(context.Background()) //nolint:errcheck // it is over
	_, err = other.Exec(t.Context(), "select from metered.feed_state for update")
	require.NoError(t, err)
	config := pool.Config().Copy()
	config.ConnConfig.Tracer = &releases{other: other}
	traced, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer traced.Close()
	consumed := 0
	require.NoError(t, l.RunFeed(t.Context(), traced, "mail", budget.FeedOptions{}, func(_ context.Context, _ pgx.Tx, page []budget.FeedEntry) error {
		consumed += len(page)
		return nil
	}))
	require.Equal(t, 1, consumed)
}
