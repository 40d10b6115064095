package jobs

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/listen"
)

const (
	// Run looks at the clock at least so often: of the lines, and not of each job.
	longestPause = 5 * time.Second
	// Run's pause after an error, and the bounds of that after a lock that was not to be had.
	afterError        = time.Second
	minBusy, spanBusy = 5 * time.Millisecond, 15 * time.Millisecond
	patience          = 3 // looks at locked lines before Run waits for their locks
	// Anybody may send notices. The looks that they cause are at least so far apart, twice as far
	// each time while they find nothing.
	minApart, maxApart = 5 * time.Millisecond, 200 * time.Millisecond
)

// Run releases parked jobs as soon as their units fit, and drops them after Options.MaxWait, until
// ctx ends. Each process with workers runs one, on their client. It listens on a connection of its
// own, or looks every five seconds.
//
// Run also releases the holds of jobs that River has ended: at once for jobs of its client, else
// within some seconds. onError, which may be nil, gets errors from several goroutines.
func (e *Enqueuer) Run(ctx context.Context, pool *pgxpool.Pool, onError func(error)) error {
	if err := e.gated("pool", pool); err != nil {
		return err
	}
	report := func(err error) {
		if onError != nil && ctx.Err() == nil {
			onError(err)
		}
	}
	wake := make(chan struct{}, 1)
	poke := func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	listening, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = listen.Run(listening, listen.Channel[struct{}]{
			Name: listen.Parked(e.gate.name.String()), Config: pool.Config(),
			Parse: func(string) (struct{}, bool) { return struct{}{}, true },
			Idle:  listen.DefaultIdle, OnError: listen.Wrapped("jobs", report),
		}, func(context.Context, struct{}) error { poke(); return nil })
	}()
	ending := make(chan struct{})
	go func() {
		defer close(ending)
		e.ender(listening, pool, poke, report)
	}()
	defer func() { stop(); <-done; <-ending }()
	busyLooks, apart := 0, time.Duration(0)
	for ctx.Err() == nil {
		began := time.Now()
		pause, found := e.look(ctx, pool, &busyLooks, report)
		if apart = min(max(minApart, 2*apart), maxApart); found {
			apart = 0
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-wake:
			select {
			case <-ctx.Done():
			case <-timer.C:
			case <-e.apart(began, apart):
			}
		}
		timer.Stop()
	}
	return ctx.Err()
}

// look releases all that fits, and returns how long Run may sleep, and whether there was something
// to do.
func (e *Enqueuer) look(ctx context.Context, pool *pgxpool.Pool, busyLooks *int,
	failed func(error)) (pause time.Duration, found bool) {
	var t tally
	defer func() {
		found = t.Released+t.Dropped > 0
		for _, err := range t.troubles {
			failed(err)
		}
	}()
	for {
		more, busy, err := e.releaseDue(ctx, pool, &t)
		switch {
		case err != nil:
			failed(err)
			return afterError, false
		case more:
			continue
		case len(busy) == 0:
			*busyLooks = 0
			pause, err = e.next(ctx, pool, longestPause)
			if err != nil {
				failed(err)
				return afterError, false
			}
			return max(pause, minBusy), false // what is due already, another has locked
		case *busyLooks < patience: // nearly always another Run, which releases the same jobs
			*busyLooks++
			return minBusy + rand.N(spanBusy), false
		}
		*busyLooks = 0
		for _, scope := range busy {
			if err := e.releaseBusy(ctx, pool, scope, &t); err != nil {
				failed(err)
				return afterError, false
			}
		}
	}
}
