package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
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
	sent := &flushes{}
	cfg.ConnConfig.Tracer = sent
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
		sent.texts = nil
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
	s.counted = "what the last call sent, a flush each:\n  " + strings.Join(sent.texts, "\n  ")
	return s, nil
}

// flushes are the statements that a connection sends, those of one flush together.
type flushes struct{ texts []string }

func (f *flushes) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	f.texts = append(f.texts, brief(d.SQL))
	return ctx
}

func (f *flushes) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	var all []string
	for _, q := range d.Batch.QueuedQueries {
		all = append(all, brief(q.SQL))
	}
	f.texts = append(f.texts, strings.Join(all, "; "))
	return ctx
}

func (*flushes) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (*flushes) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*flushes) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// brief is the beginning of a statement, on one line.
func brief(sql string) string {
	text := []rune(strings.Join(strings.Fields(sql), " "))
	if len(text) > 60 {
		return string(text[:60]) + "…"
	}
	return string(text)
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
