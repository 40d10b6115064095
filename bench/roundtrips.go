package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// roundTrips counts on the wire what a call of fn takes, once it is warm: connected,
// and its statements prepared.
func (b *bench) roundTrips(ctx context.Context, fn func(ctx context.Context, k *kit, i int) error) (samples, error) {
	k, err := b.kit(ctx, options{}, nil)
	if err != nil {
		return samples{}, err
	}
	defer k.drop()
	wire, err := startTurns(b.connString)
	if err != nil {
		return samples{}, err
	}
	defer wire.listener.Close()
	cfg := k.Config()
	cfg.MaxConns = 1
	cfg.ConnConfig.DialFunc = wire.dial
	cfg.PingTimeout = 0
	one, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return samples{}, err
	}
	defer one.Close()
	counted := &kit{site: &site{Pool: one}}
	if err := counted.setUp(&river.Config{}); err != nil {
		return samples{}, err
	}
	var s samples
	most := 0
	for i := range b.pick(50, 10) + 5 {
		wire.take()
		if err := fn(ctx, counted, i); err != nil {
			return s, err
		}
		if i < 5 {
			continue // connecting, preparing, and River's first NOTIFY
		}
		trips := wire.take()
		most = max(most, trips)
		s.values = append(s.values, float64(trips))
	}
	s.note = fmt.Sprintf("at most %d, with River's NOTIFY when it is due", most)
	return s, nil
}

// commandRoundTrips counts those of a whole command.
func commandRoundTrips(ctx context.Context, b *bench) (samples, error) {
	return b.roundTrips(ctx, func(ctx context.Context, k *kit, i int) error {
		if len(k.minted) == 0 {
			if _, err := k.stockTokens(ctx, 100); err != nil {
				return err
			}
		}
		token, err := k.takeToken()
		if err != nil {
			return err
		}
		_, err = metered.Do(ctx, k.client, metered.Command{
			ID: fmt.Sprint("op-", i), Name: "work", Input: i,
			Token: &metered.Redeem{Purpose: "work", Subject: "bench", Presented: token.Token.Reveal()},
			Charges: []budget.Charge{
				{Scope: "one", Amount: 1, Limits: roomy}, {Scope: "two", Amount: 1, Limits: roomy},
			},
		}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
			job, err := tx.Enqueue(ctx, work{N: i}, nil)
			return job.JobID, err
		})
		return err
	})
}
