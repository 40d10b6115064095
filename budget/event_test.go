package budget_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	purging "github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// ingest counts events in a transaction of its own.
func ingest(ctx context.Context, pool *pgxpool.Pool, l *budget.Ledger, events ...budget.UsageEvent) ([]budget.Result, error) {
	return pgtest.InTx(ctx, pool, func(tx pgx.Tx) ([]budget.Result, error) { return l.Ingest(ctx, tx, events...) })
}

func event(id, scope string, amount int64, limits ...budget.Limit) budget.UsageEvent {
	return budget.UsageEvent{ID: id, Charge: take(scope, amount, limits...)}
}

func TestIngest_CountsAnEventOnce(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	first, err := ingest(t.Context(), pool, l, event("e1", "a", 5, budget.Lifetime(8)), event("e2", "a", 4, budget.Lifetime(8)), event("e3", "b", 1))
	require.NoError(t, err)
	require.NoError(t, first[0].Err)
	require.ErrorIs(t, first[1].Err, budget.ErrExceeded)
	require.NoError(t, first[2].Err)
	require.Len(t, first[0].Posted.Standings, 1)

	clock.Advance(time.Minute)
	again, err := ingest(t.Context(), pool, l, event("e3", "b", 1), event("e1", "a", 5), event("e4", "b", 1))
	require.NoError(t, err)
	for i, before := range []budget.Posted{first[2].Posted, first[0].Posted} {
		before.Standings, before.Replayed = nil, true
		require.NoError(t, again[i].Err)
		require.Equal(t, before, again[i].Posted, "the answer of before")
	}
	require.Equal(t, int64(2), again[2].Posted.Seq)
	require.False(t, again[2].Posted.Replayed)

	// A refusal is not remembered: there may be room by now.
	mustCredit(t, pool, l, "a", 1)
	late, err := ingest(t.Context(), pool, l, event("e2", "a", 4, budget.Lifetime(8)))
	require.NoError(t, err)
	require.NoError(t, late[0].Err)
	require.EqualValues(t, 9, usage(t, pool, l, "a", time.Hour).Used)
	requireVerified(t, pool, l)
}

func TestIngest_AnIDStandsForOneContent(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	occurred := event("e", "a", 5)
	occurred.OccurredAt = start.Add(-time.Hour)
	_, err := ingest(t.Context(), pool, l, event("e", "a", 5), event("n", "a", 1))
	require.NoError(t, err)
	other := event("e", "a", 5)
	other.Tenant = "acme"
	results, err := ingest(t.Context(), pool, l, event("e", "b", 5), event("n", "a", 2), other)
	require.NoError(t, err)
	require.ErrorIs(t, results[0].Err, budget.ErrConflict)
	require.ErrorIs(t, results[0].Err, budget.ErrConflict)
	require.ErrorIs(t, results[1].Err, budget.ErrConflict)
	require.NoError(t, results[2].Err, "another tenant's id")
	results, err = ingest(t.Context(), pool, l, occurred)
	require.NoError(t, err)
	require.ErrorIs(t, results[0].Err, budget.ErrConflict)
	require.Zero(t, usage(t, pool, l, "b", 0).Used)
}

// The same event twice in a call is judged once.
func TestIngest_TwiceInOneCall(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	results, err := ingest(t.Context(), pool, l, event("e", "a", 5, budget.Lifetime(8)), event("f", "a", 5, budget.Lifetime(8)),
		event("e", "a", 5, budget.Lifetime(8)), event("f", "a", 5, budget.Lifetime(100)), event("e", "b", 5), event("g", "b", 1))
	require.NoError(t, err)
	require.NoError(t, results[0].Err)
	require.ErrorIs(t, results[1].Err, budget.ErrExceeded)
	require.Equal(t, budget.Posted{Scope: "a", Amount: 5, Seq: 1, At: start, Replayed: true}, inUTC(results[2].Posted))
	require.ErrorIs(t, results[3].Err, budget.ErrExceeded)
	require.ErrorIs(t, results[4].Err, budget.ErrConflict)
	require.NoError(t, results[5].Err)
	require.Equal(t, 2, count(t, pool, "metered.ledger"))
}

func TestIngest_LateEventsAreRecordedAsSuch(t *testing.T) {
	t.Parallel()
	pool, _, clock := open(t)
	l := newLedger(t, budget.Config{MaxLateness: time.Hour, MaxFuture: time.Minute})
	at := func(id string, ago time.Duration) budget.UsageEvent {
		e := event(id, "a", 1, budget.PerWindow(100, time.Minute))
		e.OccurredAt, e.Note = start.Add(-ago), budget.Note{Actor: "meter", Reason: "of " + id}
		return e
	}
	results, err := ingest(t.Context(), pool, l, at("fine", time.Hour), at("late", time.Hour+time.Microsecond), at("ahead", -time.Minute),
		at("future", -time.Minute-time.Microsecond), event("plain", "a", 1))
	require.NoError(t, err)
	require.ErrorIs(t, results[1].Err, budget.ErrLate)
	require.ErrorIs(t, results[3].Err, budget.ErrFuture)
	require.EqualValues(t, 2, results[2].Posted.Standings[0].Used, "windows count it when it was recorded")
	var occurred []time.Time
	for entry, err := range l.Entries(t.Context(), pool, "a", budget.EntriesOptions{}) {
		require.NoError(t, err)
		require.Equal(t, start, entry.At.UTC())
		require.Equal(t, []string{"fine", "ahead", "plain"}[len(occurred)], entry.Operation)
		if !entry.OccurredAt.IsZero() {
			require.Equal(t, budget.Note{Actor: "meter", Reason: "of " + entry.Operation}, entry.Note)
		}
		occurred = append(occurred, entry.OccurredAt)
	}
	require.Equal(t, []time.Time{start.Add(-time.Hour), start.Add(time.Minute), {}}, occurred)

	// A repetition is an answer however late it comes.
	clock.Advance(24 * time.Hour)
	results, err = ingest(t.Context(), pool, l, at("fine", time.Hour))
	require.NoError(t, err)
	require.NoError(t, results[0].Err)
	require.True(t, results[0].Posted.Replayed)
}

// A purged event may have been counted: an event from before the purge, by its time, is refused.
func TestIngest_AfterRetention(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	timed := event("timed", "a", 1)
	timed.OccurredAt = start.Add(-time.Minute)
	uuid := event(fmt.Sprintf("%08x-%04x-7000-8000-000000000000", start.UnixMilli()>>16, start.UnixMilli()&0xffff), "a", 1)
	events := []budget.UsageEvent{timed, event("plain", "a", 1), uuid}
	_, err := ingest(t.Context(), pool, l, events...)
	require.NoError(t, err)
	clock.Advance(10 * 24 * time.Hour)
	deleted, err := purging.Operations.Delete(t.Context(), pool, purging.Options{OlderThan: 9 * 24 * time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 3, deleted)
	events[0].ID, events[2].Amount = "never seen", 7
	events = append(events, events[0])
	events[3].ID, events[3].OccurredAt = "newer", start.Add(time.Minute)
	results, err := ingest(t.Context(), pool, l, events...)
	require.NoError(t, err)
	require.ErrorIs(t, results[0].Err, budget.ErrRetired)
	require.NoError(t, results[1].Err, "an id without a time looks new again")
	require.ErrorIs(t, results[2].Err, budget.ErrRetired)
	require.NoError(t, results[3].Err)
}

// Events and commands share their ids, and Lookup knows both.
func TestIngest_AndCommands(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	client, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	command := metered.Command{ID: "c", Charges: []budget.Charge{take("a", 1)}}
	_, err = metered.Do[any](t.Context(), client, command, nil)
	require.NoError(t, err)
	results, err := ingest(t.Context(), pool, l, event("c", "a", 1), event("e", "a", 2))
	require.NoError(t, err)
	require.ErrorIs(t, results[0].Err, budget.ErrConflict)
	command.ID = "e"
	_, err = metered.Do[any](t.Context(), client, command, nil)
	require.ErrorIs(t, err, budget.ErrConflict)
	op, err := client.Lookup(t.Context(), pool, "", "e")
	require.NoError(t, err)
	require.Equal(t, "null", string(op.Result))
	require.Equal(t, budget.Posted{Scope: "a", Amount: 2, Seq: 2, At: start}, inUTC(op.Receipt.Entries[0]))
}

func TestIngest_RefusesArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	old := event("e", "a", 1)
	old.OccurredAt = time.Date(12000, 1, 1, 0, 0, 0, 0, time.UTC)
	tenant := event("e", "a", 1)
	tenant.Tenant = strings.Repeat("x", 256)
	for field, events := range map[string][]budget.UsageEvent{
		"events":               nil,
		"events[1].ID":         {event("e", "a", 1), event("", "a", 1)},
		"events[0].Tenant":     {tenant},
		"events[0].OccurredAt": {old},
		"events[0].Amount":     {event("e", "a", 0)},
	} {
		_, err := ingest(t.Context(), pool, l, events...)
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument, field)
		require.Equal(t, field, argument.Field)
	}
	for _, cfg := range []budget.Config{{MaxLateness: -1}, {MaxLateness: 1}, {MaxFuture: -1}, {MaxFuture: 25 * time.Hour}} {
		_, err := budget.New(cfg)
		require.ErrorIs(t, err, budget.ErrArgument)
	}
}

// At an old snapshot a record, or its purge, may not be seen: then the call is to run again.
func TestIngest_AnOldSnapshotIsRetried(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for name, meanwhile := range map[string]func(t *testing.T, id string){
			"the same event": func(t *testing.T, id string) {
				_, err := ingest(t.Context(), pool, l, event(id, id+"a", 1))
				require.NoError(t, err)
			},
			"its id, elsewhere": func(t *testing.T, id string) {
				_, err := ingest(t.Context(), pool, l, event(id, id+"b", 1))
				require.NoError(t, err)
			},
			"a purge": func(t *testing.T, id string) {
				e := event(id, id+"b", 1)
				e.OccurredAt = clock.Now()
				_, err := ingest(t.Context(), pool, l, e)
				require.NoError(t, err)
				clock.Advance(time.Hour)
				_, err = purging.Operations.Delete(t.Context(), pool, purging.Options{OlderThan: time.Minute})
				require.NoError(t, err)
			},
		} {
			for _, refused := range []bool{false, true} {
				t.Run(fmt.Sprint(iso, " ", name, " refused ", refused), func(t *testing.T) {
					id := t.Name()
					tx := begin(t, pool, iso)
					_, err := tx.Exec(t.Context(), "select count(*) from metered.operations") // the snapshot
					require.NoError(t, err)
					meanwhile(t, id)
					limit := budget.Lifetime(10)
					if refused {
						limit = budget.Lifetime(0)
					}
					_, err = l.Ingest(t.Context(), tx, event(id, id+"a", 1, limit), event(id+"f", id+"c", 1))
					require.Equal(t, sqlstate.SerializationFailure, code(err), "%v", err)
				})
			}
		}
	}
}

// Deliveries in any order, to many at once, in batches and alone: each event is counted once, and nothing beyond the
// limits.
func TestIngest_ConcurrentDeliveriesCountOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, l, _ := open(t)
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			const scopes = 4
			workers := pgtest.Size(4, 6)
			events, most := pgtest.Size(200, 400), pgtest.Size(35, 70) // of 50 or 100 for each scope
			var made, replayed, refused atomic.Int64
			var g errgroup.Group
			for range workers {
				g.Go(func() error {
					left := pgtest.Random(t).Perm(events)
					for len(left) > 0 {
						n := min(len(left), 1+pgtest.Random(t).IntN(40))
						batch := make([]budget.UsageEvent, n)
						for i, e := range left[:n] {
							batch[i] = event(fmt.Sprint(iso, "/", e), fmt.Sprint(iso, e%scopes), 1, budget.PerWindow(int64(most), time.Hour))
						}
						tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: iso})
						if err != nil {
							return err
						}
						results, err := l.Ingest(t.Context(), tx, batch...)
						if err == nil {
							err = tx.Commit(t.Context())
						}
						_ = tx.Rollback(context.WithoutCancel(t.Context()))
						if errors.Is(err, budget.ErrSerialization) || code(err) == sqlstate.SerializationFailure {
							continue
						} else if err != nil {
							return err
						}
						for _, r := range results {
							switch {
							case r.Err == nil && r.Posted.Replayed:
								replayed.Add(1)
							case r.Err == nil:
								made.Add(1)
							case errors.Is(r.Err, budget.ErrExceeded):
								refused.Add(1)
							default:
								return r.Err
							}
						}
						left = left[n:]
					}
					return nil
				})
			}
			require.NoError(t, g.Wait())
			require.EqualValues(t, scopes*most, made.Load())
			require.EqualValues(t, workers*events, made.Load()+replayed.Load()+refused.Load())
			require.Equal(t, scopes*most, count(t, pool, "metered.operations where id like '"+string(iso)+"/%'"))
			require.Equal(t, scopes*most, count(t, pool, "(select distinct operation from metered.ledger where operation like '"+string(iso)+"/%') o"))
			for i := range scopes {
				require.EqualValues(t, most, usage(t, pool, l, fmt.Sprint(iso, i), 0).Used)
			}
		})
	}
	requireVerified(t, pool, l)
}

// The lock of an id only makes writers queue. The unique key of its record keeps an id from two events.
func TestIngest_TheRecordIsTheGuard(t *testing.T) {
	t.Parallel()
	for _, more := range [][]budget.UsageEvent{nil, {event("other", "b", 1)}} { // alone, and in a batch
		t.Run(fmt.Sprint(len(more)), func(t *testing.T) {
			t.Parallel()
			pool, l, _ := open(t)
			withoutLocks(t, pool)
			first, second := begin(t, pool, ""), begin(t, pool, "")
			_, err := l.Ingest(t.Context(), first, event("e", "a", 1))
			require.NoError(t, err)
			done := pgtest.Going(func() error {
				_, err := l.Ingest(t.Context(), second, append(more, event("e", "b", 1))...)
				return err
			})
			pgtest.WaitQueued(t, pool, 1)
			require.NoError(t, first.Commit(t.Context()))
			require.Equal(t, sqlstate.SerializationFailure, code(<-done))
			require.NoError(t, second.Rollback(t.Context()))
			require.Equal(t, 1, count(t, pool, "metered.ledger"))
		})
	}
}
