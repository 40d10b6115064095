package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// slowCommits is a pool of n connections on the database of pool whose commits wait
// for 2 ms before they are written to disk, as on a slow one; commits that come
// meanwhile are written with them. It takes a superuser.
func slowCommits(ctx context.Context, pool *pgxpool.Pool, n int32) (*pgxpool.Pool, error) {
	cfg := pool.Config()
	cfg.MaxConns = n
	cfg.ConnConfig.RuntimeParams["commit_delay"] = "2000"
	cfg.ConnConfig.RuntimeParams["commit_siblings"] = "0"
	cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "on"
	return pgxpool.NewWithConfig(ctx, cfg)
}

// hotRun is commands on a few scopes from many clients at once.
type hotRun struct {
	client  *metered.Client
	clients int
	scopes  int           // client i charges scope i % scopes
	span    time.Duration // of a measurement, the first fifth of which does not count
	runs    int
}

// throughput is commands per second, with early release or without.
func (h *hotRun) throughput(ctx context.Context, early bool) (float64, error) {
	h.runs++
	began := time.Now()
	warm, end := began.Add(h.span/5), began.Add(h.span)
	var done atomic.Int64
	errs := make([]error, h.clients)
	var wg sync.WaitGroup
	for i := range h.clients {
		wg.Go(func() {
			charges := []budget.Charge{{Scope: fmt.Sprint("hot/", i%h.scopes), Amount: 1, Limits: roomy}}
			for n := 0; errs[i] == nil && time.Now().Before(end); n++ {
				id := fmt.Sprintf("%d/%d/%d", h.runs, i, n)
				_, errs[i] = metered.Do(ctx, h.client, metered.Command{ID: id, EarlyRelease: early, Charges: charges},
					func(ctx context.Context, tx *metered.Tx) (any, error) {
						_, err := tx.Exec(ctx, `insert into hot_rows values ($1)`, id)
						return nil, err
					})
				if now := time.Now(); now.After(warm) && now.Before(end) {
					done.Add(1)
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return 0, err
		}
	}
	return float64(done.Load()) / (h.span - h.span/5).Seconds(), nil
}

// newHotRun sets up a database for it.
func newHotRun(ctx context.Context, b *bench, clients, scopes int) (h *hotRun, drop func(), err error) {
	pool, dropDatabase, err := b.database(ctx, `create table hot_rows (id text)`)
	if err != nil {
		return nil, nil, err
	}
	slow, err := slowCommits(ctx, pool, int32(clients))
	if err != nil {
		dropDatabase()
		return nil, nil, err
	}
	drop = func() { slow.Close(); dropDatabase() }
	client, err := metered.New(slow, metered.Config{LockTimeout: time.Minute})
	if err != nil {
		drop()
		return nil, nil, err
	}
	span := time.Duration(b.pick(4000, 1500)) * time.Millisecond
	return &hotRun{client: client, clients: clients, scopes: scopes, span: span}, drop, nil
}

var _ = earlyAgainstPlain // command_hot_commit2ms_early_vs_plain, once figures can have a lower bound

// earlyAgainstPlain compares early lock release with the plain command: one scope, 64
// clients, commits slowed to 2 ms.
func earlyAgainstPlain(ctx context.Context, b *bench) (samples, error) {
	const clients = 64
	h, drop, err := newHotRun(ctx, b, clients, 1)
	if err != nil {
		return samples{}, err
	}
	defer drop()
	var s samples
	var early, plain []float64
	for round := range b.pick(6, 4) {
		e, err := h.throughput(ctx, true)
		if err != nil {
			return s, err
		}
		p, err := h.throughput(ctx, false)
		if err != nil {
			return s, err
		}
		if round > 0 { // the first one connects and prepares
			early, plain, s.values = append(early, e), append(plain, p), append(s.values, e/p)
		}
	}
	s.note = fmt.Sprintf("%.0f against %.0f commands a second", median(early), median(plain))
	return s, nil
}
