package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/tokens"
)

// commandRoundTrips counts on the wire what a whole command takes, one that is
// warm: connected, and its statements prepared.
func commandRoundTrips(ctx context.Context, b *bench) (samples, error) {
	pool, drop, err := b.database(ctx)
	if err != nil {
		return samples{}, err
	}
	defer drop()
	wire, err := startTurns(b.connString)
	if err != nil {
		return samples{}, err
	}
	defer wire.listener.Close()
	cfg := pool.Config()
	cfg.MaxConns = 1
	cfg.ConnConfig.DialFunc = wire.dial
	cfg.PingTimeout = 0
	one, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return samples{}, err
	}
	defer one.Close()
	queue, err := river.NewClient(riverpgxv5.New(one), &river.Config{})
	if err != nil {
		return samples{}, err
	}
	client, err := metered.New(one, metered.Config{River: queue})
	if err != nil {
		return samples{}, err
	}
	return countCommands(ctx, client, pool, wire, b.pick(50, 10))
}

func countCommands(ctx context.Context, client *metered.Client, pool *pgxpool.Pool, wire *turns, n int) (samples, error) {
	mints := make([]tokens.Mint, n+5)
	for i := range mints {
		mints[i] = tokens.Mint{Purpose: "work", Subject: "bench", TTL: time.Hour}
	}
	var minted []tokens.Minted
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		minted, err = client.Tokens.MintMany(ctx, tx, mints)
		return err
	})
	if err != nil {
		return samples{}, err
	}
	var s samples
	most := 0
	for i, token := range minted {
		wire.take()
		_, err := metered.Do(ctx, client, metered.Command{
			ID: fmt.Sprint("op-", i), Name: "work", Input: i,
			Token: &metered.Redeem{Purpose: "work", Subject: "bench", Presented: token.Token.Reveal()},
			Charges: []budget.Charge{
				{Scope: "one", Amount: 1, Limits: roomy}, {Scope: "two", Amount: 1, Limits: roomy},
			},
		}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
			job, err := tx.Enqueue(ctx, work{N: i}, nil)
			return job.JobID, err
		})
		if err != nil {
			return s, err
		}
		if i < 5 {
			continue // connecting, preparing, and River's first NOTIFY
		}
		trips := wire.take()
		most = max(most, trips)
		s.values = append(s.values, float64(trips))
	}
	if len(s.values) == 0 {
		return s, errors.New("nothing was counted")
	}
	s.note = fmt.Sprintf("at most %d, with River's NOTIFY when it is due", most)
	return s, nil
}
