package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/holds/holdjobs"
)

// seat is the claim of a seat, its block's capacity, and the user's window.
func seat(event string, n int, user string) holds.Claim {
	return holds.Claim{
		Key: holds.Key{Type: "seat", Value: fmt.Sprintf("%s/%d", event, n)}, Holder: user, TTL: 5 * time.Minute,
		Lines:   []holds.Line{{Scope: fmt.Sprintf("block/%s/%d", event, n/100), Amount: 1, Limits: []budget.Limit{budget.Lifetime(100)}}},
		Charges: []budget.Charge{{Scope: "user/" + user, Amount: 1, Limits: []budget.Limit{{Max: 10, Window: 5 * time.Minute}}}},
	}
}

func (k *kit) holdSeat(ctx context.Context, c holds.Claim) (holds.Hold, error) {
	out, err := metered.Do(ctx, k.client, metered.Command{ID: metered.NewID(), Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Claim(ctx, c, &holdjobs.Cleanup{})
		return nil, err
	})
	if err != nil {
		return holds.Hold{}, err
	}
	return out.Holds[0], nil
}

func (k *kit) buySeat(ctx context.Context, h holds.Hold) error {
	_, err := metered.Do(ctx, k.client, metered.Command{ID: metered.NewID(), Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Capture(holds.Capture{IDs: []string{h.ID}, All: true, Holder: h.Holder, Entity: "ticket"})
	})
	return err
}

func seatRoundTrips(ctx context.Context, b *bench) (samples, error) {
	return b.roundTrips(ctx, func(ctx context.Context, k *kit, i int) error {
		_, err := k.holdSeat(ctx, seat("event", i, fmt.Sprint("user-", i)))
		return err
	})
}

// sellOut lets 100 users buy what they can get of 500 seats, ten each, in an order of
// their own. As on a seat map, who looks sees what was sold, and not what is being
// reached for.
func sellOut(ctx context.Context, b *bench) (samples, error) {
	const users, seats = 100, 500
	var s samples
	var held, p50, p95 []float64
	lost, short := 0, 0
	for round := range b.pick(5, 1) {
		k, err := b.kit(ctx, options{conns: 16}, nil)
		if err != nil {
			return s, err
		}
		sold, taken, err := k.sell(ctx, fmt.Sprint("event-", round), users, seats)
		if err == nil {
			var report budget.VerifyReport
			report, err = k.client.Budget.Verify(ctx, k.Pool, budget.VerifyOptions{})
			if err == nil && !report.OK() {
				err = fmt.Errorf("the ledger does not verify: %v", report.Differences[0])
			}
		}
		k.drop()
		if err != nil {
			return s, err
		}
		s.values = append(s.values, float64(sold))
		held = append(held, taken.rate)
		lost, short = lost+taken.lost, short+taken.short
		p50, p95 = append(p50, quantile(taken.ms, 0.5)), append(p95, quantile(taken.ms, 0.95))
	}
	s.note = fmt.Sprintf("%s holds/s, p50 %s ms, p95 %s ms, over 16 connections", number(median(held)), number(median(p50)), number(median(p95)))
	s.counted = fmt.Sprintf("in %d rounds %d users of %d found less than ten seats, and %d times another user was faster",
		len(s.values), short, users*len(s.values), lost)
	return s, nil
}

// taken are the latencies of the holds that were placed, how many a second, how often
// another user had the seat, and how many users were left with less than ten.
type taken struct {
	ms          []float64
	rate        float64
	lost, short int
}

func (k *kit) sell(ctx context.Context, event string, users, seats int) (sold int, t taken, err error) {
	var mu sync.Mutex
	var group sync.WaitGroup
	var lost, short atomic.Int64
	gone := make([]atomic.Bool, seats)
	began := time.Now()
	for u := range users {
		group.Go(func() {
			user := fmt.Sprint("user-", u)
			mine := 0
			for _, n := range rand.Perm(seats) {
				if mine == 10 {
					return
				}
				if gone[n].Load() {
					continue
				}
				start := time.Now()
				h, placeErr := k.holdSeat(ctx, seat(event, n, user))
				ms := time.Since(start).Seconds() * 1000
				if errors.Is(placeErr, holds.ErrTaken) {
					lost.Add(1)
					continue
				}
				gone[n].Store(true)
				if placeErr == nil {
					placeErr = k.buySeat(ctx, h)
				}
				mu.Lock()
				if placeErr != nil {
					err = errors.Join(err, placeErr)
					mu.Unlock()
					return
				}
				sold++
				mine++
				t.ms = append(t.ms, ms)
				mu.Unlock()
			}
			if mine < 10 {
				short.Add(1)
			}
		})
	}
	group.Wait()
	t.lost, t.short = int(lost.Load()), int(short.Load())
	t.rate = float64(sold) / time.Since(began).Seconds()
	return sold, t, err
}
