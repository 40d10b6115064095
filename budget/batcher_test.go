package budget_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// newBatcher gives a batch five minutes unless cfg says otherwise: 30 seconds can pass on a busy machine.
func newBatcher(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, cfg budget.BatcherConfig) *budget.Batcher {
	t.Helper()
	if cfg.Timeout == 0 {
		cfg.Timeout = 5 * time.Minute
	}
	b, err := budget.NewBatcher(pool, l, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(context.Background())) })
	return b
}

// isBatch picks the flush of a batch.
func isBatch(f *pgtest.Flush) bool { return f.Has("charge_each") }

func TestBatcher_LetsInExactlyTheLimit(t *testing.T) {
	t.Parallel()
	for _, cfg := range []budget.BatcherConfig{{}, {Lanes: 1, MaxBatch: 3}, {Lanes: 5}} {
		t.Run(fmt.Sprintf("%+v", cfg), func(t *testing.T) {
			t.Parallel()
			pool, l, _ := open(t)
			tapped, wire := pgtest.Tap(t, pool, func(c *pgxpool.Config) { c.MaxConns = 8 })
			b := newBatcher(t, tapped, l, cfg)
			const scopes, most = 6, 50
			var made [scopes]atomic.Int64
			var g errgroup.Group
			for i := range 2 * scopes * most {
				g.Go(func() error {
					scope := i % scopes
					posted, err := b.Charge(t.Context(), take(fmt.Sprint("s", scope), 1, budget.PerWindow(most, time.Hour)))
					if err == nil {
						made[scope].Add(posted.Amount)
					} else if !errors.Is(err, budget.ErrExceeded) {
						return err
					}
					return nil
				})
			}
			require.NoError(t, g.Wait())
			for i := range scopes {
				require.EqualValues(t, most, made[i].Load())
				require.EqualValues(t, most, usage(t, pool, l, fmt.Sprint("s", i), 0).Used)
			}
			if cfg.MaxBatch == 0 {
				require.Less(t, len(wire.Sent()), scopes*most, "charges must have shared their commits")
			}
			requireVerified(t, pool, l)
		})
	}
}

// waited is ctx, and a channel that closes when somebody waits for the context's end: a Batcher's caller does so once it
// is in the queue.
func waited(ctx context.Context) (context.Context, <-chan struct{}) {
	queued := make(chan struct{})
	return watched{ctx, sync.OnceFunc(func() { close(queued) })}, queued
}

type watched struct {
	context.Context
	done func()
}

func (w watched) Done() <-chan struct{} {
	w.done()
	return w.Context.Done()
}

// Charges of one scope get the order in which they came.
func TestBatcher_KeepsTheOrderOfAScope(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	tapped, wire := pgtest.Tap(t, pool, nil)
	b := newBatcher(t, tapped, l, budget.BatcherConfig{})
	began, go_ := make(chan struct{}), make(chan struct{})
	wire.Once(isBatch, func(f *pgtest.Flush) { close(began); <-go_ })
	var wg sync.WaitGroup
	seqs := make([]int64, 20)
	for i := range seqs {
		ctx, queued := waited(t.Context())
		wg.Go(func() {
			posted, err := b.Charge(ctx, take("a", int64(i+1)))
			if err == nil {
				seqs[i] = posted.Seq
			}
		})
		<-queued // so that the next one comes later
		if i == 0 {
			<-began
		}
	}
	close(go_)
	wg.Wait()
	for i, seq := range seqs {
		require.EqualValues(t, i+1, seq)
	}
}

func TestBatcher_AnInvalidChargeNeverJoins(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	b := newBatcher(t, pool, l, budget.BatcherConfig{})
	_, err := b.Charge(t.Context(), take("a", 0))
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "charge.Amount", argument.Field)
	_, err = b.Ingest(t.Context(), event("", "a", 1))
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "event.ID", argument.Field)
	for _, cfg := range []budget.BatcherConfig{{MaxBatch: -1}, {MaxBatch: bounds.MaxBatch + 1}, {Lanes: -1}, {Lanes: 65}, {Timeout: 1}, {Timeout: 2 * time.Hour}} {
		_, err := budget.NewBatcher(pool, l, cfg)
		require.ErrorIs(t, err, budget.ErrArgument)
	}
	_, err = budget.NewBatcher(nil, l, budget.BatcherConfig{})
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = new(budget.Batcher).Charge(t.Context(), take("a", 1))
	require.ErrorIs(t, err, budget.ErrArgument)
}

// A charge that the server cannot store fails alone, though nobody knew before.
func TestBatcher_AChargeThatTheServerRefusesFailsAlone(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	execute(t, pool, `create function refuse() returns trigger language plpgsql as $$ begin raise 'bad' using errcode = '22000'; end $$;
		create trigger refuse before insert on metered.ledger for each row when (new.scope = 'bad') execute function refuse()`)
	b := newBatcher(t, pool, l, budget.BatcherConfig{})
	var wg sync.WaitGroup
	errs := make([]error, 100)
	for i := range errs {
		wg.Go(func() {
			scope := fmt.Sprint("s", i)
			if i == 50 {
				scope = "bad"
			}
			_, errs[i] = b.Charge(t.Context(), take(scope, 1))
		})
	}
	wg.Wait()
	for i, err := range errs {
		if i == 50 {
			require.Equal(t, "22000", code(err))
		} else {
			require.NoError(t, err)
		}
	}
}

// A scope that somebody locks keeps only its own charges waiting.
func TestBatcher_ALockedScopeKeepsNoOtherWaiting(t *testing.T) {
	t.Parallel()
	pool, _, _ := open(t)
	l := newLedger(t, budget.Config{LockTimeout: time.Minute})
	b := newBatcher(t, pool, l, budget.BatcherConfig{Lanes: 1})
	holder := begin(t, pool, "")
	require.NoError(t, l.Lock(t.Context(), holder, "hot"))
	hot := make(chan error, 4)
	for range cap(hot) {
		go func() { _, err := b.Charge(t.Context(), take("hot", 1)); hot <- err }()
	}
	for i := range 20 {
		_, err := b.Charge(t.Context(), take(fmt.Sprint("s", i), 1))
		require.NoError(t, err)
		require.Empty(t, hot, "it waits until hot is free")
	}
	hasty := newBatcher(t, pool, newLedger(t, budget.Config{LockTimeout: 50 * time.Millisecond}), budget.BatcherConfig{})
	_, err := hasty.Charge(t.Context(), take("hot", 1))
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NoError(t, holder.Rollback(t.Context()))
	for range cap(hot) {
		require.NoError(t, <-hot)
	}
	require.EqualValues(t, 4, usage(t, pool, l, "hot", 0).Used)
}

// A caller that leaves before its batch began is not charged. A caller that leaves later gets ErrCommitUnknown.
func TestBatcher_ACallerMayLeave(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	tapped, wire := pgtest.Tap(t, pool, nil)
	b := newBatcher(t, tapped, l, budget.BatcherConfig{})
	began, go_ := make(chan struct{}), make(chan struct{})
	wire.Once(isBatch, func(f *pgtest.Flush) { close(began); <-go_ })
	ctx, cancel := context.WithCancel(t.Context())
	taken, waiting := make(chan error, 1), make(chan error, 1)
	go func() { _, err := b.Charge(ctx, take("a", 1)); taken <- err }()
	<-began
	leaver, leaverQueued := waited(ctx)
	go func() { _, err := b.Charge(leaver, take("a", 10)); waiting <- err }()
	stayer, stayerQueued := waited(t.Context())
	kept := make(chan error, 1)
	go func() { _, err := b.Charge(stayer, take("a", 100)); kept <- err }()
	<-leaverQueued
	<-stayerQueued
	cancel()
	err := <-taken
	require.ErrorIs(t, err, budget.ErrCommitUnknown)
	require.ErrorIs(t, err, context.Canceled)
	err = <-waiting
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, budget.ErrCommitUnknown)
	close(go_)
	require.NoError(t, <-kept)
	require.EqualValues(t, 101, usage(t, pool, l, "a", 0).Used, "of the one that left late and the one that stayed")
	_, err = b.Charge(ctx, take("a", 1))
	require.ErrorIs(t, err, context.Canceled)
}

// After a lost commit the batcher looks for its events, and they get the true answer. Charges without an id get
// ErrCommitUnknown.
func TestBatcher_ALostCommit(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]struct {
		do        func(*testing.T, *pgxpool.Pool) func(*pgtest.Flush)
		committed bool
	}{
		"the flush is lost":  {func(*testing.T, *pgxpool.Pool) func(*pgtest.Flush) { return (*pgtest.Flush).Lose }, false},
		"the answer is lost": {func(*testing.T, *pgxpool.Pool) func(*pgtest.Flush) { return (*pgtest.Flush).LoseAnswer }, true},
		"the backend is ended": {func(t *testing.T, pool *pgxpool.Pool) func(*pgtest.Flush) {
			return func(f *pgtest.Flush) { f.Terminate(t, pool) }
		}, false},
		"a pooler says so": {func(*testing.T, *pgxpool.Pool) func(*pgtest.Flush) {
			return func(f *pgtest.Flush) {
				f.AnswerWith(pgtest.ErrorResponse("FATAL", "08P01", "server conn crashed?"))
			}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, l, _ := open(t)
			tapped, wire := pgtest.Tap(t, pool, nil)
			b := newBatcher(t, tapped, l, budget.BatcherConfig{Lanes: 1})
			_, err := b.Charge(t.Context(), take("a", 1)) // the statement is prepared
			require.NoError(t, err)
			began, go_ := make(chan struct{}), make(chan struct{})
			var batches atomic.Int32
			wire.Each(func(f *pgtest.Flush) {
				if !isBatch(f) || len(f.Raw) < 40 {
					return
				}
				switch batches.Add(1) {
				case 1: // of one charge: the others gather meanwhile
					close(began)
					<-go_
				case 2:
					lose.do(t, pool)(f)
				}
			})
			go func() { _, _ = b.Charge(t.Context(), take("other", 1)) }()
			<-began
			results := make(chan error, 2)
			var posted budget.Posted
			ctx, charged := waited(t.Context())
			go func() { _, err := b.Charge(ctx, take("a", 10)); results <- err }()
			ingested := make(chan error, 1)
			ctx2, delivered := waited(t.Context())
			go func() {
				var err error
				posted, err = b.Ingest(ctx2, event("e", "a", 100, budget.Lifetime(1000)))
				ingested <- err
			}()
			<-charged
			<-delivered
			close(go_)
			err = <-results
			require.ErrorIs(t, err, budget.ErrCommitUnknown)
			require.NoError(t, <-ingested)
			require.Equal(t, lose.committed, posted.Replayed)
			want := int64(101)
			if lose.committed {
				want += 10
			}
			require.Equal(t, want, usage(t, pool, l, "a", 0).Used)
		})
	}
}

// When the commit of an event is lost and there is no connection to look for it, the answer is ErrCommitUnknown, not a
// failed connection.
func TestBatcher_ALostCommitThatCannotBeResolved(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	tapped, wire := pgtest.Tap(t, pool, nil)
	require.NoError(t, tapped.Ping(t.Context()))
	b := newBatcher(t, tapped, l, budget.BatcherConfig{Timeout: 3 * time.Second})
	lost := make(chan struct{})
	wire.Once(isBatch, func(f *pgtest.Flush) { wire.Refuse(true); f.LoseAnswer(); close(lost) })
	var err error
	for sent := false; !sent; { // a slow machine may need longer for a batch before it is sent, and then nothing is lost
		_, err = b.Ingest(t.Context(), event("e", "a", 1))
		select {
		case <-lost:
			sent = true
		default:
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
	}
	require.ErrorIs(t, err, budget.ErrCommitUnknown)
	wire.Refuse(false)
	posted, err := newBatcher(t, pool, l, budget.BatcherConfig{}).Ingest(t.Context(), event("e", "a", 1)) // with time enough
	require.NoError(t, err)
	require.EqualValues(t, 1, posted.Seq)
}

func TestBatcher_CloseAnswersEverybody(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	tapped, wire := pgtest.Tap(t, pool, nil)
	b := newBatcher(t, tapped, l, budget.BatcherConfig{})
	began, go_ := make(chan struct{}), make(chan struct{})
	wire.Once(isBatch, func(f *pgtest.Flush) { close(began); <-go_ })
	var g errgroup.Group
	g.Go(func() error { _, err := b.Charge(t.Context(), take("a", 1)); return err })
	<-began
	for range 10 {
		ctx, queued := waited(t.Context())
		g.Go(func() error { _, err := b.Charge(ctx, take("a", 1)); return err })
		<-queued
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, b.Close(ctx), context.DeadlineExceeded)
	_, err := b.Charge(t.Context(), take("a", 1))
	require.ErrorIs(t, err, budget.ErrClosed)
	require.Equal(t, "batcher_closed", metered.Code(err))
	close(go_)
	require.NoError(t, b.Close(t.Context()))
	require.NoError(t, g.Wait())
	require.EqualValues(t, 11, usage(t, pool, l, "a", 0).Used)
}

func TestBatcher_HasNoGoroutineWhenIdle(t *testing.T) {
	pool, l, _ := open(t)
	b := newBatcher(t, pool, l, budget.BatcherConfig{})
	_, err := b.Charge(t.Context(), take("a", 1))
	require.NoError(t, err)
	pgtest.WaitFor(t, "the lane ends", func() bool {
		stacks := make([]byte, 1<<20)
		return !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "budget.(*lane)")
	})
}

// Everything at once: callers that leave, locks of others, ended backends, events delivered by several. Every caller's
// answer is true.
func TestBatcher_EveryAnswerIsTrue(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	tapped, wire := pgtest.Tap(t, pool, func(c *pgxpool.Config) { c.MaxConns = 8 })
	b := newBatcher(t, tapped, l, budget.BatcherConfig{MaxBatch: 40})
	var n atomic.Int64
	wire.Each(func(f *pgtest.Flush) {
		if isBatch(f) && n.Add(1)%9 == 0 {
			[]func(){f.Lose, f.LoseAnswer, func() { f.Terminate(t, pool) }}[pgtest.Random(t).IntN(3)]()
		}
	})
	const scopes, most = 4, 300
	var made, unknown [scopes]atomic.Int64
	var answers sync.Map // the seq of each event
	var g errgroup.Group
	for client := range 40 {
		g.Go(func() error {
			for i := range 50 {
				scope := (client + i) % scopes
				c := take(fmt.Sprint("s", scope), 1, budget.Lifetime(most))
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+pgtest.Random(t).IntN(200))*time.Millisecond)
				var posted budget.Posted
				var err error
				if client%2 == 0 {
					id := fmt.Sprint("e", client/4, " ", i) // two clients deliver it
					c.Scope = fmt.Sprint("s", i%scopes)
					posted, err = b.Ingest(ctx, budget.UsageEvent{ID: id, Charge: c})
					if err == nil {
						if seq, seen := answers.LoadOrStore(id, posted.Seq); seen && seq != posted.Seq {
							err = fmt.Errorf("event %s has entries %v and %d", id, seq, posted.Seq)
						}
					}
				} else if posted, err = b.Charge(ctx, c); err == nil {
					made[scope].Add(1)
				} else if errors.Is(err, budget.ErrCommitUnknown) {
					unknown[scope].Add(1)
				}
				cancel()
				switch {
				case err == nil, errors.Is(err, budget.ErrExceeded), errors.Is(err, budget.ErrCommitUnknown), errors.Is(err, context.DeadlineExceeded):
				default:
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
	wire.Each(nil)
	require.NoError(t, b.Close(t.Context()))
	for i := range scopes {
		name := fmt.Sprint("s", i)
		used := usage(t, pool, l, name, 0).Used
		charges := int64(count(t, pool, "metered.ledger where operation is null and scope = '"+name+"'"))
		require.LessOrEqual(t, used, int64(most))
		require.GreaterOrEqual(t, charges, made[i].Load())
		require.LessOrEqual(t, charges, made[i].Load()+unknown[i].Load())
	}
	answers.Range(func(id, seq any) bool {
		require.Equal(t, 1, count(t, pool, fmt.Sprintf("metered.ledger where operation = '%s' and seq = %d", id, seq)))
		return true
	})
	require.Zero(t, count(t, pool, "(select 1 from metered.ledger where operation is not null group by operation having count(*) > 1) o"))
	requireVerified(t, pool, l)
}
