package budget_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// failover is a server whose standby takes over while entries are written and read.
type failover struct {
	t       *testing.T
	l       *budget.Ledger
	db      atomic.Pointer[pgxpool.Pool] // of the primary
	stop    atomic.Bool
	running sync.WaitGroup
	amounts atomic.Int64 // tell entries of the same scope and seq apart
	written atomic.Int64
}

// run repeats work until the load is stopped. A server that is lost is no error.
func (f *failover) run(work func(ctx context.Context, db *pgxpool.Pool) error) {
	f.running.Go(func() {
		for !f.stop.Load() {
			err := work(f.t.Context(), f.db.Load())
			if err != nil && !sqlstate.Collided(err) && !errors.Is(err, budget.ErrCommitUnknown) && !lostConnection(err) {
				f.t.Error(err)
				return
			}
		}
	})
}

func (f *failover) write(ctx context.Context, db *pgxpool.Pool) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		_, err := f.l.Charge(ctx, tx, budget.Charge{Scope: fmt.Sprint("s", pgtest.Random(f.t).IntN(8)), Amount: f.amounts.Add(1)})
		return err
	})
	if err == nil {
		f.written.Add(1)
	}
	return err
}

// consume writes what is new into a table beside the ledger, in the consumer's transaction.
func (f *failover) consume(ctx context.Context, db *pgxpool.Pool) error {
	return f.l.RunFeed(ctx, db, "ours", budget.FeedOptions{Max: 20}, func(ctx context.Context, tx pgx.Tx, page []budget.FeedEntry) error {
		for _, e := range page {
			if _, err := tx.Exec(ctx, "insert into seen values ($1, $2, $3, $4)", e.Number, e.Scope, e.Seq, e.Amount); err != nil {
				return err
			}
		}
		return nil
	})
}

// outside is a reader that keeps its cursor and what it has read elsewhere.
type outside struct {
	l      *budget.Ledger
	cursor budget.FeedCursor
	read   []budget.FeedEntry // in their order
	lost   []budget.FeedEntry // what it took back
	gaps   int
	count  atomic.Int64
}

// follow reads what is new. Where it hears that its server was lost, it takes back what it is told,
// and goes on where it is told.
func (o *outside) follow(ctx context.Context, db *pgxpool.Pool) error {
	for e, err := range o.l.Feed(ctx, db, o.cursor, budget.FeedOptions{}) {
		var gap *budget.FeedGapError
		if errors.As(err, &gap) && gap.Lost {
			o.gaps++
			kept := gap.First - o.read[0].Number
			o.lost, o.read, o.cursor = append(o.lost, o.read[kept:]...), o.read[:kept], gap.Start
			return nil
		} else if err != nil {
			return err
		}
		o.read, o.cursor = append(o.read, e), e.Cursor
		o.count.Add(1)
	}
	return nil
}

// The standby takes over from a primary that is killed while it no longer gets its log. Commits that
// wait for it have lost nothing. Else the last entries are lost, and others have their seq, and a
// reader outside is told.
func TestFeed_GoesOnAfterAPromotion(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	for _, synchronous := range []bool{true, false} {
		t.Run(fmt.Sprintf("synchronous=%v", synchronous), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			opts := pgserver.Options{Durable: true, Settings: map[string]string{"fsync": "off"}} // the machine does not crash
			server, primary := pgtest.Start(t, opts)
			execute(t, primary, "create table seen (number bigint primary key, scope text, seq bigint, amount bigint, unique (scope, seq))")
			standby := pgtest.Standby(t, server, opts)
			const replication = "select coalesce((select pid from pg_stat_replication where state = 'streaming' and (sync_state = 'sync') = $1), 0)"
			if synchronous {
				execute(t, primary, "alter system set synchronous_standby_names = '"+pgserver.StandbyName+"'")
				execute(t, primary, "select pg_reload_conf()")
			}
			var sender int
			pgtest.WaitFor(t, "the standby", func() bool {
				sender = pgtest.Value[int](t, primary, replication, synchronous)
				return sender > 0
			})

			f := &failover{t: t, l: newLedger(t, budget.Config{})}
			reader := &outside{l: f.l}
			f.db.Store(primary)
			watch := pgtest.Reopen(t, primary, func(*pgxpool.Config) {}) // the others may all be in use
			for range 3 {
				f.run(f.write)
			}
			f.run(f.consume)
			f.run(reader.follow)
			waitMore := func(what string, of *atomic.Int64) {
				goal := of.Load() + 60
				pgtest.WaitFor(t, what, func() bool { return of.Load() > goal || t.Failed() })
			}
			waitMore("entries that are read", &reader.count)
			require.NoError(t, syscall.Kill(sender, syscall.SIGSTOP))
			if synchronous {
				pgtest.WaitFor(t, "commits to wait for the standby", func() bool {
					return pgtest.Value[int](t, watch, "select count(*)::int from pg_stat_activity where wait_event = 'SyncRep'") > 0
				})
			} else {
				waitMore("entries that are read and will be lost", &reader.count)
			}
			require.NoError(t, server.Kill())
			execute(t, standby, "select pg_promote()")
			f.db.Store(standby)
			waitMore("entries of the new primary", &f.written)
			waitMore("entries of the new primary that are read", &reader.count)
			f.stop.Store(true)
			f.running.Wait()
			require.NoError(t, f.consume(ctx, standby))
			require.NoError(t, reader.follow(ctx, standby))
			require.NoError(t, reader.follow(ctx, standby)) // from where a gap has it begin

			same := func(entries []budget.FeedEntry) (same int) {
				var numbers, seqs, amounts []int64
				var scopes []string
				for _, e := range entries {
					numbers, scopes, seqs, amounts = append(numbers, e.Number), append(scopes, e.Scope), append(seqs, e.Seq), append(amounts, e.Amount)
				}
				require.NoError(t, standby.QueryRow(ctx, `
select count(*) from unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[]) e(number, scope, seq, amount) join seen using (number, scope, seq, amount)`,
					numbers, scopes, seqs, amounts).Scan(&same))
				return same
			}
			all := pgtest.Count(t, standby, "metered.ledger")
			require.Equal(t, all, pgtest.Count(t, standby, "seen join metered.ledger using (scope, seq, amount)"))
			require.Equal(t, all, pgtest.Count(t, standby, "seen"))
			require.Equal(t, all, pgtest.Value[int](t, standby, "select max(number)::int from seen"))
			require.Len(t, reader.read, all)
			require.Equal(t, all, same(reader.read))
			requireVerified(t, standby, f.l)
			if synchronous {
				require.Zero(t, reader.gaps)
				return
			}
			require.Equal(t, 1, reader.gaps)
			again := 0 // the key of an entry that was lost is another one's
			for _, e := range reader.lost {
				again += pgtest.Value[int](t, standby, "select count(*)::int from metered.ledger where scope = $1 and seq = $2 and amount <> $3", e.Scope, e.Seq, e.Amount)
			}
			require.Positive(t, again)
		})
	}
}
