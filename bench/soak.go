package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

const (
	maxSoak     = 2 * time.Hour
	soakClients = 4
)

// soaking is a mixed load on one database, and what was seen of it.
type soaking struct {
	*kit
	window time.Duration // of the limits; what is older is purged

	mu      sync.Mutex
	done    int
	denied  int
	refunds int
	seconds []float64 // of each command since the last line
}

// soak runs commands with fresh tokens, refusals, refunds, a worker for the jobs and
// the purges, as an application would, and tells what autovacuum does beside it.
func (b *bench) soak(ctx context.Context, length time.Duration, w io.Writer) error {
	if length > maxSoak {
		return fmt.Errorf("a soak of %v is longer than %v", length, maxSoak)
	}
	k, err := b.kit(ctx, options{conns: soakClients + 8}, oneOf(1000))
	if err != nil {
		return err
	}
	defer k.drop()
	s := &soaking{kit: k, window: max(length/5, 2*time.Second)}
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(context.Context, *river.Job[work]) error { return nil }))
	err = k.setUp(&river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Workers: workers,
		Queues:                      map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}},
		CompletedJobRetentionPeriod: s.window,
	})
	if err != nil {
		return err
	}
	if err := k.queue.Start(ctx); err != nil {
		return err
	}
	defer func() { _ = k.queue.StopAndCancel(context.WithoutCancel(ctx)) }()
	v, err := watchVacuum(ctx, k.site)
	if err != nil {
		return err
	}
	if err := s.run(ctx, length, v, w); err != nil {
		return err
	}
	return s.report(ctx, v, w)
}

// run returns when the time is up, or at the first error.
func (s *soaking) run(ctx context.Context, length time.Duration, v *vacuumWatch, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var group sync.WaitGroup
	loop := func(every time.Duration, f func(context.Context) error) {
		group.Go(func() {
			for ctx.Err() == nil {
				// Not cut short by the end: what has begun is finished.
				if err := f(context.WithoutCancel(ctx)); err != nil {
					fail(err)
					return
				}
				if every > 0 {
					select {
					case <-time.After(every):
					case <-ctx.Done():
					}
				}
			}
		})
	}
	for range soakClients {
		loop(0, s.once)
	}
	loop(s.window/4, s.purge)
	loop(200*time.Millisecond, v.sample)
	began := time.Now()
	loop(min(time.Minute, length/4), func(ctx context.Context) error { return s.line(ctx, time.Since(began), w) })
	group.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// once mints a token and runs a command with it; one of ten meets one hot scope, one
// of twenty is refused, and after one of fifty a charge is refunded.
func (s *soaking) once(ctx context.Context) error {
	var minted tokens.Minted
	err := pgx.BeginFunc(ctx, s.Pool, func(tx pgx.Tx) (err error) {
		minted, err = s.client.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "work", Subject: "bench", TTL: time.Hour})
		return err
	})
	if err != nil {
		return err
	}
	charge := budget.Charge{Scope: s.scope(), Amount: 1, Limits: []budget.Limit{{Max: 1 << 50, Window: s.window}}}
	if rand.IntN(10) == 0 {
		charge.Scope = "hot"
	}
	refused := rand.IntN(20) == 0
	if refused {
		charge.Limits[0].Max = 0
	}
	id := metered.NewID()
	var done metered.Outcome[int64]
	seconds, err := timed(1, func() (err error) {
		done, err = metered.Do(ctx, s.client, metered.Command{
			ID: id, Token: &metered.Redeem{Purpose: "work", Subject: "bench", Presented: minted.Token.Reveal()},
			Charges: []budget.Charge{charge},
		}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
			job, err := tx.Enqueue(ctx, work{N: 1}, &jobs.Options{Key: id})
			return job.JobID, err
		})
		return err
	})
	if refused != errors.Is(err, budget.ErrExceeded) || !refused && err != nil {
		return fmt.Errorf("to be refused: %v, but: %w", refused, err)
	}
	refund := !refused && rand.IntN(50) == 0
	s.count(seconds, refused, refund)
	if !refund {
		return nil
	}
	entry := done.Receipt.Entries[0]
	return pgx.BeginFunc(ctx, s.Pool, func(tx pgx.Tx) error {
		_, err := s.client.Budget.Refund(ctx, tx, budget.Refund{Scope: entry.Scope, Seq: entry.Seq, Amount: 1})
		return err
	})
}

func (s *soaking) count(seconds float64, refused, refund bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seconds = append(s.seconds, seconds)
	if refused {
		s.denied++
	} else {
		s.done++
	}
	if refund {
		s.refunds++
	}
}

func (s *soaking) purge(ctx context.Context) error {
	_, err := s.client.Budget.Purge(ctx, s.Pool, budget.PurgeOptions{OlderThan: s.window})
	if err == nil {
		_, err = s.client.Tokens.Purge(ctx, s.Pool, tokens.PurgeOptions{OlderThan: s.window})
	}
	if err == nil {
		_, err = s.client.Jobs.Purge(ctx, s.Pool, jobs.PurgeOptions{OlderThan: s.window})
	}
	if err == nil {
		_, err = s.client.PurgeOperations(ctx, s.Pool, metered.PurgeOptions{OlderThan: s.window})
	}
	return err
}

const sizeSQL = `select pg_size_pretty(pg_database_size(current_database()))`

// line tells how it goes, for what was done since the last one.
func (s *soaking) line(ctx context.Context, since time.Duration, w io.Writer) error {
	var size string
	if err := s.QueryRow(ctx, sizeSQL).Scan(&size); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.seconds)
	fmt.Fprintf(w, "%5.0f s: %d commands, %d refused, %d refunds; the last ones took %.2f ms, of a hundred the slowest %.2f ms; %s\n",
		since.Seconds(), s.done, s.denied, s.refunds, 1000*median(s.seconds), 1000*quantile(s.seconds, 0.99), size)
	s.seconds = nil
	return nil
}
